"""The table of a model's groups of parameter tokens: their sizes, origins and training."""

from tokenformer_jax.config import ModelConfig, TokenGroup, is_of_experts
from tokenformer_jax.config.groups import named_groups
from tokenformer_jax.config.model import BASE
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs.checkpoint_meta import Meta, last_addition


def render(meta: Meta) -> str:
  """Return a table of a model's groups: tokens and τ² of each projection, and their origin.

  Projections whose groups of one number have different origins are in different rows.
  """
  named, old = named_groups(meta.config.model), _old_births(meta)
  rows: dict[tuple[int, str, str], dict[str, str]] = {}
  for number in range(1, max(map(len, named.values())) + 1):
    for name, groups in named.items():
      if number <= len(groups):
        group = groups[number - 1]
        births = dict.fromkeys(f'{birth.path} from step {birth.step}' for birth in group.born)
        row = (number, ', '.join(births), _training(group, old))
        rows.setdefault(row, {})[name] = f'{group.tokens}:{group.reference}'
  lines = [
    ['group', *(_heading(name, meta.config.model) for name in named), 'born in', 'training'],
    *(
      [str(number), *(cells.get(name, '–') for name in named), text, state]
      for (number, text, state), cells in rows.items()
    ),
  ]
  return messages.aligned(lines, left=range(len(lines[0])))


def _heading(name: str, model: ModelConfig) -> str:
  """Return the heading of a projection's column, with the number of experts that each have it."""
  if not is_of_experts(name):
    return f'{name} (tokens:τ²)'
  layer = name.removesuffix('ffn.expert').removesuffix('.') or BASE
  return f'{name} (tokens:τ², {model.experts[layer].count} experts)'


def _old_births(meta: Meta) -> set[str]:
  """Return the runs whose tokens `optim.old_tokens=freeze` freezes."""
  last, later = last_addition(meta.lineage)
  if meta.config.optim.old_tokens != 'freeze' or last is None or later:
    return set()
  before = named_groups(last.model)
  return {birth.run for groups in before.values() for group in groups for birth in group.born}


def _training(group: TokenGroup, old: set[str]) -> str:
  """Return whether training changes a group."""
  is_old = [birth.run in old for birth in group.born]
  if group.frozen or all(is_old):
    return 'frozen'
  return 'new tokens trained' if any(is_old) else 'trained'
