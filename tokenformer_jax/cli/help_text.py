"""Build the text of `--help`: a command's docstring and its own flags, without library flags."""

import re
import sys
import textwrap
from collections.abc import Iterator

from absl import flags

from tokenformer_jax.errors import UserError

_NAMES = 26  # columns of a flag and its default
_WIDTH = 100
_HOSTS = 'tokenformer_jax.parallel.hosts'


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
