"""List a config's keys for `--help`, from the descriptions in their fields."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from tokenformer_jax.cli import help_text
from tokenformer_jax.config.names import SHOWN, keys
from tokenformer_jax.config.section import Leaf, field_types, kind_leaf, kinds_of, leaves

_WIDEST = 42  # columns of a key and its default
_NOTE = """\
KEY.kind is a section of several kinds; --help=model.layer.mixer lists the keys of the default one,
and --help=model.layer.mixer.linear those of another one. A layer model.variants.NAME has the keys
of model.layer."""


def render(word: str = '') -> str:
  """Return the keys as lines of text, each with its default, choices and meaning.

  `word` is a section such as `optim`, perhaps with a kind at its end as in `model.layer.ffn.mlp`,
  or else a word in the paths, choices or meanings of keys, to list these alone; empty: all. The
  text is empty if no key has the word.
  """
  selected = _section_leaves(word.lower()) or _leaves_with(word.lower())
  if not selected:
    return ''
  paragraphs = [_NOTE]
  for _, group in itertools.groupby(selected, lambda leaf: leaf.path.partition('.')[0]):
    rows = [(f'  {leaf.path}={_written(leaf.value)}', text) for leaf, text in _described(group)]
    width = max(len(name) for name, _ in rows)
    lines = (help_text.columns(name, text, min(width, _WIDEST)) for name, text in rows)
    paragraphs.append('\n'.join(itertools.chain.from_iterable(lines)))
  return '\n\n'.join(paragraphs)


def _written(value: Any) -> Any:
  """Return a value as a flag gives it."""
  return ','.join(value) if isinstance(value, tuple) else value


def _section_leaves(word: str) -> list[Leaf]:
  """Return the keys of a section: of the kind at the end of its path, or of the default kind.

  A section of several kinds inside it has one line, with its kinds.
  """
  section: Any = SHOWN
  path, field = '', None
  for name in filter(None, word.split('.')):
    fields, kinds = field_types(type(section)), (field and kinds_of(field)) or {}
    if name in kinds:
      section = kinds[name]()
    elif name in fields and dataclasses.is_dataclass(getattr(section, name)):
      section, field, path = getattr(section, name), fields[name], f'{path}{name}.'
    else:
      return []
  inside = list(leaves(section, path))
  if field is not None and kinds_of(field):
    inside.insert(0, kind_leaf(path.removesuffix('.'), section, field))
  sections = [leaf.path.removesuffix('kind') for leaf in inside if leaf.path.endswith('.kind')]
  inner = [one for one in sections if one != path and (word or one.count('.') > 1)]

  def is_inside(leaf: Leaf) -> bool:
    return any(leaf.path.startswith(one) and leaf.path != f'{one}kind' for one in inner)

  return [leaf for leaf in inside if not is_inside(leaf)]


def _leaves_with(word: str) -> list[Leaf]:
  """Return the keys of all kinds that have a word in their paths, choices or meanings."""

  def texts(leaf: Leaf) -> tuple[str, ...]:
    return (leaf.path, leaf.meaning, *leaf.choices)

  return [leaf for leaf in keys().values() if any(word in text.lower() for text in texts(leaf))]


def _described(listed: Iterator[Leaf]) -> Iterator[tuple[Leaf, str]]:
  """Yield keys with their choices and meanings, once for keys that sections of one kind repeat."""
  seen: set[tuple[str, ...]] = set()
  for leaf in listed:
    same = (leaf.path.rpartition('.')[2], leaf.meaning, *leaf.choices)
    if same in seen:
      continue
    seen.add(same)
    choices = ' | '.join(choice or "''" for choice in leaf.choices)
    yield leaf, '; '.join(filter(None, [choices, leaf.meaning]))
