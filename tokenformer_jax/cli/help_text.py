"""Build the text of `--help`: a command's docstring and its own flags, without library flags."""

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator

from absl import flags

from tokenformer_jax.cli import verbs
from tokenformer_jax.errors import UserError

_NAMES = 26  # columns of a flag and its default
_WIDTH = 100
_HOSTS = 'tokenformer_jax.parallel.hosts'
_EXAMPLE = re.compile(rf'\btokenformer ({"|".join(verbs.VERBS)})\b')
_PROGRAMS = ('tokenformer', 'python -m tokenformer_jax')


def command() -> str:
  """Return the command as the user typed it, such as `tokenformer plan` or `python train.py`."""
  if _program():
    return sys.argv[0]
  spec = getattr(sys.modules['__main__'], '__spec__', None)
  if spec is None or not spec.name:
    return f'python {shlex.quote(sys.argv[0])}'
  return f'python -m {spec.name.removesuffix(".__main__")}'


def spell_command(verb: str) -> str:
  """Return the command line for a verb, in the form in which the user typed this command."""
  program = _program()
  if program is None:
    return 'python train.py' if verb == 'train' else f'{_PROGRAMS[1]} {verb}'
  return f'{program} {verb}'


def as_typed(text: str) -> str:
  """Return a text whose commands `tokenformer VERB` are in the form of this command line."""
  return _EXAMPLE.sub(lambda found: spell_command(found[1]), text)


def _program() -> str | None:
  """Return the program that runs this verb, or None if the verb runs as a module or a script."""
  return next((p for p in _PROGRAMS if sys.argv[0].startswith(f'{p} ')), None)


def own_flags() -> list[flags.Flag]:
  """Return the flags that this project defines for the command; those for several hosts last."""
  return [*_flags(hosts=False), *_flags(hosts=True)]


def render(doc: str, more: str = '') -> str:
  """Return the text of `--help`: a description, the flags, and the text `more`.

  Examples in `doc` begin with `tokenformer VERB`, and get the form in which the user typed this
  command.
  """
  own = list(_flags(hosts=False))
  text = [as_typed(doc).strip(), '\nFlags:\n']
  for flag in own:
    text.extend(_lines(flag))
  if several := [f'--{flag.name}' for flag in _flags(hosts=True)]:
    listed = textwrap.fill(', '.join(several), _WIDTH, initial_indent='  ', subsequent_indent='  ')
    text.append(f'\nFor several processes, if JAX does not find them (docs/pods.md):\n\n{listed}')
  return '\n'.join([*text, more]) if more else '\n'.join(text)


def render_matches(word: str, more: str = '') -> str:
  """Return the flags that have a word in their name or description, and the text `more`."""
  found = [
    line
    for flag in own_flags()
    if word.lower() in f'{flag.name} {flag.help}'.lower()
    for line in _lines(flag)
  ]
  if not found and not more:
    raise UserError(
      f'--help={word}: no flag or key has this in its name or meaning; `{command()} --help` lists '
      'all'
    )
  listed = ['Flags:\n', *found] if found else []
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
