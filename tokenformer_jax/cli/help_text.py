"""Build the text of `--help`: a command's docstring, its own flags, and the keys of a config."""

import dataclasses
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from absl import flags

from tokenformer_jax.config.names import SHOWN, keys
from tokenformer_jax.config.section import Leaf, field_types, kind_leaf, kinds_of, leaves
from tokenformer_jax.errors import UserError

_WIDEST = 42  # columns of a key and its default
_NOTE = """\
KEY.kind is a section of several kinds; --help=model.layer.mixer lists the keys of the default one,
and --help=model.layer.mixer.linear those of another one. A layer model.variants.NAME has the keys
of model.layer."""
_NAMES = 26  # columns of a flag and its default
_WIDTH = 100
_HOSTS = 'tokenformer_jax.cli.hosts_flags'


def own_flags() -> list[flags.Flag]:
  """Return the flags that this project defines for the command; those for several hosts last."""
  return [*_flags(hosts=False), *_flags(hosts=True)]


def meaning(name: str) -> str:
  """Return the help of a flag, to be part of a sentence."""
  text = flags.FLAGS[name].help.rstrip('.')
  word = text.partition(' ')[0]
  return text if word.isupper() and word != 'A' else f'{text[0].lower()}{text[1:]}'  # CHIP stays.


def render(doc: str, more: str = '') -> str:
  """Return the text of `--help`: a description, the flags, and the text `more`."""
  own = list(_flags(hosts=False))
  text = [doc.strip(), '\nFlags:\n']
  for flag in own:
    text.extend(_lines(flag))
  if several := [f'--{flag.name}' for flag in _flags(hosts=True)]:
    listed = textwrap.fill(', '.join(several), _WIDTH, initial_indent='  ', subsequent_indent='  ')
    text.append(f'\nFor several processes, if JAX does not find them (docs/pods.md):\n\n{listed}')
  return '\n'.join([*text, more]) if more else '\n'.join(text)


def render_matches(word: str, more: str = '') -> str:
  """Return the flags that have a word in their name or description, and the text `more`."""
  lines = [
    line
    for flag in own_flags()
    if word.lower() in f'{flag.name} {flag.help}'.lower()
    for line in _lines(flag)
  ]
  if not lines and not more:
    raise UserError(
      f'--help={word}: no flag or key has this in its name or meaning; --help lists all'
    )
  listed = ['Flags:\n', *lines] if lines else []
  return '\n'.join([*listed, more]).strip('\n')


def _flags(*, hosts: bool) -> Iterator[flags.Flag]:
  """Yield the flags that modules of this project define."""
  for module, defined in flags.FLAGS.flags_by_module_dict().items():
    other = module in sys.modules and not module.startswith(('tokenformer_jax', '__main__'))
    if not other and (module == _HOSTS) == hosts:
      yield from (flag for flag in defined if '.' not in flag.name)


def _lines(flag: flags.Flag) -> list[str]:
  value = flag.default
  if isinstance(value, list | tuple):
    value = ','.join(value)
  elif isinstance(value, bool):
    value = str(value).lower()
  left = f'  --{flag.name}' + ('' if value in (None, '') else f'={value}')
  text = re.sub(r'^<.*?>: ', '', flag.help.split(';\n')[0])  # absl puts choices before the help.
  if choices := getattr(flag.parser, 'enum_values', None):
    text = f'{" | ".join(choice or chr(39) * 2 for choice in choices)}; {text}'
  return columns(left, text, _NAMES)


def columns(left: str, text: str, width: int) -> list[str]:
  """Return lines with a name in a column of a given width, and its text beside or below it."""
  wrapped = textwrap.wrap(text, _WIDTH - width - 2, break_on_hyphens=False) or ['']
  if len(left) <= width:
    left, wrapped = f'{left:{width}}  {wrapped[0]}', wrapped[1:]
  return [left, *(f'{"":{width}}  {line}' for line in wrapped)]


def render_keys(word: str = '') -> str:
  """Return the keys of a config as lines of text, each with its default, choices and meaning.

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
    lines = (columns(name, text, min(width, _WIDEST)) for name, text in rows)
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
