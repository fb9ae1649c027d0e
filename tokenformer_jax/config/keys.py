"""The list of a config's keys for `--help`, as their fields describe them."""

from tokenformer_jax import usage
from tokenformer_jax.config.fields import Leaf, leaves
from tokenformer_jax.config.run import Config

_NAMES = 34  # columns of a key and its default
_SCOPES = (
  '[lm], [vit]: for this model.kind only; [grown]: for a model that has grown; others: for this '
  'kind of the group. model.variants has layers by name, with the keys of model.layer.'
)


def render() -> str:
  """Return the keys as lines of text, each with its default, choices, scope and meaning."""
  lines, group = [_SCOPES], ''
  for leaf in leaves(Config(), every=True):
    if (now := leaf.path.rpartition('.')[0].partition('.')[0]) != group:
      group = now
      lines.append('')
    lines.extend(_lines(leaf))
  return '\n'.join(lines)


def _lines(leaf: Leaf) -> list[str]:
  choices = ' | '.join(choice or "''" for choice in leaf.key.choices)
  text = '; '.join(filter(None, [choices, leaf.key.meaning]))
  kinds = leaf.kinds or ((leaf.key.only,) if leaf.key.only else ())
  scope = f'[{", ".join(kinds)}] ' if kinds else ''
  return usage.columns(f'  {leaf.path}={leaf.value}', scope + text, _NAMES)
