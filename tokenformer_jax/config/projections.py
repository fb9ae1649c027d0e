"""Find, replace and grow the projections of a model that have parameter tokens, by name.

The name of a projection of `model.layer` is the end of its path: `qkv`, `proj`, `ffn`;
`ffn.shared` and `ffn.expert` in a layer with experts. In another layer the name starts with the
layer's name: `local.ffn`. Tokens beside a matrix have the name of its projection, and those beside
each matrix of an MLP that of the MLP and `.each`. Growth and the planner use these names.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenformer_jax.config.growth import GrowConfig
from tokenformer_jax.config.layer import LayerConfig, map_parts, parts
from tokenformer_jax.config.model import BASE, ModelConfig
from tokenformer_jax.config.pattention import (
  SCORES,
  L2NormGELU,
  NoProjectionConfig,
  PattentionConfig,
  TokenGroup,
  from_groups,
  resized,
  score_like,
)
from tokenformer_jax.errors import UserError, nearest

_BESIDE = ('.beside', '.each')  # ends of the paths of tokens that add to matrices


def _projections(model: ModelConfig) -> Iterator[tuple[str, str, Any, bool]]:
  """Yield the name, the name without the layer, the config, and whether it is beside a matrix.

  These are all projections that have parameter tokens, and matrices that can get them.
  """
  for layer, config in model.layers.items():
    for path, part in parts(config):
      beside = path.endswith(_BESIDE) and not path.endswith('.expert.each')
      if isinstance(part, PattentionConfig) or (beside and isinstance(part, NoProjectionConfig)):
        yield projection_name(layer, path), projection_name(BASE, path), part, beside


def pattentions(model: ModelConfig) -> dict[str, PattentionConfig]:
  """Return the projections of a model that have parameter tokens, by name."""
  named = _projections(model)
  return {name: one for name, _, one, _ in named if isinstance(one, PattentionConfig)}


def projection_name(layer: str, path: str) -> str:
  """Return the name of the projection at a path inside a layer."""
  own = path.removeprefix('mixer.').removesuffix('.beside')
  return own if layer == BASE else f'{layer}.{own}'


def is_of_experts(name: str) -> bool:
  """Return whether a projection, given its name, is that of each expert."""
  return f'.{name}'.endswith('.ffn.expert')


def matrices(model: ModelConfig) -> tuple[str, ...]:
  """Return the names of the projections by matrices that have no tokens beside them."""
  return tuple(name for name, _, one, _ in _projections(model) if one == NoProjectionConfig())


def beside_matrices(model: ModelConfig) -> tuple[str, ...]:
  """Return the names of the projections whose tokens are beside a matrix."""
  named = _projections(model)
  return tuple(n for n, _, one, beside in named if beside and isinstance(one, PattentionConfig))


def with_pattentions(
  model: ModelConfig, changed: Mapping[str, PattentionConfig | NoProjectionConfig]
) -> ModelConfig:
  """Return the model with some of its `pattentions` replaced, by name.

  A matrix gets tokens beside it if it has none, and loses them to a `NoProjectionConfig`.
  """

  def replaced(name: str, layer: LayerConfig) -> LayerConfig:
    def other(path: str, part: Any) -> Any:
      is_beside = path.endswith(_BESIDE) and isinstance(part, NoProjectionConfig)
      if not (isinstance(part, PattentionConfig) or is_beside):
        return part
      return changed.get(projection_name(name, path), part)

    return map_parts(layer, other)

  return model.map_layers(replaced)


def with_token_counts(model: ModelConfig, counts: Mapping[str, int]) -> ModelConfig:
  """Return the model with new numbers of parameter tokens for the named projections.

  In a projection with several groups, the numbers of the last ones change: see `resized`.
  """
  changed = {
    name: resized(config, counts.get(name, config.tokens))
    for name, config in pattentions(model).items()
  }
  return with_pattentions(model, changed)


def with_references(
  model: ModelConfig, source: ModelConfig | None = None, growth: GrowConfig | None = None
) -> ModelConfig:
  """Return the model without open reference counts.

  A projection whose count is open, or is that of the same one of `source`, gets the groups that the
  growth of the source makes of it, if it has as many tokens and their score: one group is then the
  sum of the old and the new ones. Any other open count is the number of tokens.

  Args:
    model: the model.
    source: the model that the run continues from; None: it is new.
    growth: how it grows; None: the model is the run's own.
  """
  old = {} if source is None else pattentions(source)
  if not old.keys() <= pattentions(model).keys():
    old = {}
  grown = old
  if source is not None and old and growth is not None:
    grown = pattentions(grown_model(source, token_counts(model), growth))

  def filled(name: str, new: PattentionConfig) -> PattentionConfig:
    before, after = old.get(name), grown.get(name)
    is_open = not all(group.reference for group in new.groups)
    repeats = before and after and len(after.groups) > 1 and new.reference == before.reference
    if after and (is_open or repeats) and (new.tokens, new.score) == (after.tokens, after.score):
      return after
    groups = (dataclasses.replace(g, reference=g.reference or g.tokens) for g in new.groups)
    return from_groups(groups)

  return with_pattentions(
    model, {name: filled(name, new) for name, new in pattentions(model).items()}
  )


def grown_model(model: ModelConfig, counts: Mapping[str, int], config: GrowConfig) -> ModelConfig:
  """Return the model with other counts, and the reference counts that `config.method.scale` makes.

  `counts` are by the names of `config.pattentions`; others stay. `resize` multiplies reference
  counts by the factor of the counts, so that a model that never kept its scale has τ = √N. The
  method `group` puts new tokens into a group of their own; the others put them into the last group.
  A matrix without tokens gets a first group. Fewer tokens are those of the first groups. All
  reference counts of `model` must be filled in.
  """
  method, resizing = config.method, config.method.scale == 'resize'

  def grown(name: str, old: PattentionConfig, count: int) -> PattentionConfig:
    before = old.groups
    if count > old.tokens and method.kind == 'group' and not is_of_experts(name):
      added = count - old.tokens
      score = score_like(old.score, method.new_score) if method.new_score else old.score
      return from_groups((*before, TokenGroup(added, added, score)))
    groups = []
    for was, now in zip(before, resized(old, count).groups, strict=False):
      factor = now.tokens / was.tokens if resizing else 1
      groups.append(dataclasses.replace(now, reference=round(was.reference * factor)))
    return from_groups(groups)

  new = {
    name: grown(name, old, counts.get(name, old.tokens)) for name, old in pattentions(model).items()
  }
  for name in matrices(model):
    if count := counts.get(name):
      score = SCORES[method.new_score]() if method.new_score else L2NormGELU()
      new[name] = PattentionConfig(count, count, score)
  return with_pattentions(model, new)


def token_counts(model: ModelConfig) -> dict[str, int]:
  """Return the numbers of parameter tokens of a model, by the names of `pattentions`."""
  return {name: config.tokens for name, config in pattentions(model).items()}


def counts_as_text(counts: Mapping[str, int]) -> str:
  """Return counts by name in the form of `--param_tokens`: `qkv=128,proj=128,ffn=512`."""
  return ','.join(f'{name}={count}' for name, count in counts.items())


def named_counts(
  model: ModelConfig, given: Mapping[str, int], where: str, *, first: bool = False
) -> dict[str, int]:
  """Return the token counts of a model with some of them replaced.

  In `given`, `local.ffn` names one projection; `ffn` names the feed-forward part of every layer
  that `given` does not name more exactly. `where` names the source of `given` in a message. With
  `first`, a matrix can get its first tokens.
  """
  counts = dict.fromkeys(matrices(model) if first else (), 0) | token_counts(model)
  if not counts:
    raise UserError(f'{where} counts parameter tokens, and this model has none')
  short = {name: own for name, own, *_ in _projections(model)}
  for name in sorted(given, key=lambda name: name.count('.')):  # the exact names last
    matches = [known for known in counts if name in (known, short[known])]
    if not matches:
      known = list(dict.fromkeys([*(short[name] for name in counts), *counts]))
      if not name:
        raise UserError(
          f'{where} is {given[name]} without a name; write NAME={given[name]} with one of the '
          f'names {", ".join(known)}'
        )
      raise UserError(f'{where} names {name!r}{nearest(name, known)}')
    counts |= dict.fromkeys(matches, given[name])
  return {name: count for name, count in counts.items() if count}


def counts_from_text(text: str, where: str) -> dict[str, int]:
  """Return the numbers of a text such as 'qkv=128,ffn=512' by name; '' names a number alone."""
  numbers: dict[str, int] = {}
  for entry in text.split(','):
    name, equals, number = entry.rpartition('=')
    if not re.fullmatch('-?[0-9]{1,13}', number):
      short = entry if len(entry) <= 40 else f'{entry[:40]}…'
      raise UserError(
        f'{where} has {short!r}; it must be {name if equals else "NAME"}=N, an integer'
      )
    if name and name in numbers:
      raise UserError(f'{where} names {name} twice, as {text!r}; give every name once')
    numbers[name] = int(number)
  return numbers
