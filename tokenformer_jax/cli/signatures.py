"""Make flags from a function, one for each argument, and read the values of a command line.

A flag has the type, the default and the meaning of its argument in the docstring. The function
serves Python, and the command that calls it. `arguments.convert` checks the values of both. In a
flag, a list is `A,B` and a dict of numbers is `A=1,B=2`. An argument of type `Config` is --config
with its overrides, and `*arguments` are the words that are no flags.
"""

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from absl import flags

from tokenformer_jax import config
from tokenformer_jax.cli import config_flag, help_text
from tokenformer_jax.config import Config, arguments
from tokenformer_jax.config.projections import counts_from_text
from tokenformer_jax.errors import UserError, misspelt, nearest

Function = Callable[..., Any]


class Parser(flags.ArgumentParser):
  """Read the text of a flag in the type of an argument."""

  def __init__(self, name: str, annotation: Any):
    self._name, self._annotation = name, annotation
    literals = (args for kind, args in arguments.members(annotation) if kind is Literal)
    self.enum_values = next(literals, ())  # for `--help`

  def parse(self, argument: Any) -> Any:
    if not isinstance(argument, str):
      return argument
    where = f'--{self._name}'
    try:
      return arguments.convert(self._annotation, _read(argument, self._annotation, where), where)
    except UserError as error:
      if {kind for kind, _ in arguments.members(self._annotation)}.isdisjoint((Mapping, Sequence)):
        raise
      raise UserError(f'{error} ({help_text.meaning(self._name)})') from None

  def flag_type(self) -> str:
    return 'string'


def define(
  function: Function, like: Function | None = None, *, without: Collection[str] = ()
) -> None:
  """Define the flags of the arguments of a function, and of others that another one has.

  The first argument of a method and those in `without` have none.
  """
  meanings, hints = _meanings(function), arguments.annotations(function, without)
  own = _parameters(function, without)
  for name, parameter in own.items():
    required = parameter.default is parameter.empty
    default = None if required else parameter.default
    kinds = {kind for kind, _ in arguments.members(hints[name])}
    if Config in kinds:
      config_flag.define(meanings[name], required=required)
    elif bool in kinds:
      flags.DEFINE_bool(name, default, meanings[name], required=required)
    elif arguments.REPEATED in getattr(hints[name], '__metadata__', ()):
      each = Parser(name, dict(arguments.members(hints[name]))[Sequence][0])
      flags.DEFINE_multi(
        each, flags.ArgumentSerializer(), name, list(default or ()), meanings[name]
      )
    else:
      parser = Parser(name, hints[name])
      flags.DEFINE(parser, name, default, meanings[name], required=required)
  if like is not None:
    define(like, without=[*own, *without])


def given(
  function: Function, like: Function | None = None, *, without: Collection[str] = ()
) -> dict[str, Any]:
  """Return the arguments of functions that the command line has: see `define`."""
  names = {*_parameters(function, without), *(_parameters(like, without) if like else ())}
  present = [name for name in names if flags.FLAGS[name].present]
  return {n: config_flag.read() if n == 'config' else flags.FLAGS[n].value for n in present}


def parse(argv: Sequence[str]) -> list[str]:
  """Parse the flags of `argv`, and return the other arguments."""
  if 'config' in flags.FLAGS:
    argv = [argv[0], *config_flag.take_overrides(argv[1:])]
  try:
    words = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    raise UserError(_unknown_flag(error.flagname)) from error
  except (flags.Error, ValueError) as error:  # ValueError: a value for --noNAME
    raise UserError(_absl_sentence(error)) from error
  for word in words[1:]:
    name = re.match(r'[‐-―−]*(config(?=\.)|\w+(?==))', word)
    if name and name[1] in flags.FLAGS and not os.path.exists(word):
      raise UserError(f'{word!r} is no flag; did you mean --{word.lstrip("‐‑‒–—―−")}?')
  return words


def with_defaults(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
  """Return all arguments of a function with a default, some of them with other values."""
  parameters = _parameters(function, ()).items()
  known = {name: p.default for name, p in parameters if p.default is not p.empty}
  return {**known, **given}


def takes_words(function: Function) -> bool:
  """Return whether a function takes the words of a command line that are no flags."""
  return any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values())


def _parameters(function: Function, without: Collection[str]) -> dict[str, inspect.Parameter]:
  return {
    name: parameter
    for name, parameter in inspect.signature(function).parameters.items()
    if name not in ('self', *without)
    and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
  }


class Actions:
  """The actions of a command: its first word names the one whose flags are defined.

  Attributes:
    functions: the actions by name.
    default: the action of a command line without a word; '': there is none.
    without: arguments that have no flag.
  """

  current: 'tuple[str, frozenset[str]]' = ('', frozenset())  # its name, and flags of the others

  def __init__(
    self, functions: Mapping[str, Function], default: str = '', without: Collection[str] = ()
  ):
    self.functions, self.default, self.without = functions, default, without

  def name(self, argv: Sequence[str]) -> str:
    """Return the name of the action."""
    name = argv[1] if len(argv) > 1 and not argv[1].startswith('-') else self.default
    if name not in self.functions:
      raise UserError(f'unknown command {name!r}{nearest(name, self.functions)}')
    return name

  def define(self, name: str) -> None:
    """Define the flags of an action."""
    names = {key: _parameters(one, self.without).keys() for key, one in self.functions.items()}
    others = frozenset().union(*names.values()) - names[name]
    Actions.current = (name, others)
    define(self.functions[name], without=self.without)

  def given(self, argv: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the action that the command line has."""
    if len(argv) > 2:
      raise UserError(f'{argv[2]!r} after {argv[1]!r} is one word too many; name one action')
    if (name := self.name(argv)) != Actions.current[0]:
      raise UserError(f'the word {name!r} comes after flags; put it before them')
    return given(self.functions[name], without=self.without)

  def summaries(self) -> str:
    """Return a line for each action but the default one."""
    names = [name for name in self.functions if name != self.default]
    return '\n'.join(f'  {name:10}{summary(self.functions[name])}' for name in names)


def _docstring(function: Function) -> str:
  return inspect.getdoc(function) or ''


def summary(function: Function) -> str:
  """Return the first line of a function's docstring, without its full stop."""
  return _docstring(function).partition('\n')[0].rstrip('.')


def description(function: Function) -> str:
  """Return the docstring of a function without its sections and examples in Python."""
  text = re.split(r'\n\n(?:Args|Returns|Raises):', _docstring(function))[0]
  return '\n\n'.join(part for part in text.split('\n\n') if not part.startswith('  '))


def _meanings(function: Function) -> dict[str, str]:
  """Return the meaning of each argument from the section `Args` of a docstring."""
  section = re.search(r'\nArgs:\n((?:  .*\n?|\n)*)', _docstring(function))
  entries = re.findall(r'^  (\w+): (.*(?:\n    .*)*)', section[1] if section else '', re.MULTILINE)
  texts = {name: ' '.join(text.split()) for name, text in entries}
  return {name: text[0].upper() + text[1:] for name, text in texts.items()}


def _read(text: str, annotation: Any, where: str) -> Any:
  """Return the text of a flag as a value, in so far as it has the form of one."""
  kinds = dict(arguments.members(annotation))
  if Mapping in kinds and not (int in kinds and _number(int, text) is not None):
    return counts_from_text(text, where)
  if Sequence in kinds:
    of = kinds[Sequence][0]
    if not text and int in dict(arguments.members(of)):
      return []  # no number, as in `grow freeze --groups=`
    if not text:
      raise UserError(f"{where} is ''; it must not be empty")
    return [_read(word.strip(), of, where) for word in text.split(',')]
  for kind in (int, float):
    if kind in kinds and (number := _number(kind, text)) is not None:
      return number
  return text


def _number(kind: type, text: str) -> Any:
  """Return a text as a number, or None."""
  try:
    return kind(text)
  except ValueError:
    return None


def _unknown_flag(name: str) -> str:
  """Return the sentence for an unknown flag, which may be the last part of a config's key."""
  action, of_others = Actions.current
  if name in of_others:
    return f'--{name} has no meaning for {action}; leave it out'
  known = [flag.name for flag in help_text.own_flags()]
  plain = name.replace('-', '_').lower()
  if plain in known:
    return f'--{name} is unknown; did you mean --{plain}?'
  keys = config.keys_named(plain) if 'config' in known else []
  if keys and (plain == keys[0].rpartition('.')[2] or not misspelt(name, known)):
    return f'--{name} is unknown; did you mean {config.any_of(keys, name, "--config.{}")}?'
  if near := misspelt(name, known):
    return f'--{name} is unknown; did you mean --{near}?'
  return f'--{name} is unknown; --help lists the flags'


def _absl_sentence(error: Exception) -> str:
  """Return one sentence for an error that absl or ml_collections raises for a flag."""
  text = ' '.join(str(error).split())
  if missing := re.search(r'Flag --(\S+) must have a value other than None', text):
    return f'--{missing[1]} is missing: {help_text.meaning(missing[1])}'
  if missing := re.search(r'Missing value for flag -*(\S+)', text):
    return f'--{missing[1]} has no value; give --{missing[1]}=VALUE'
  if wrong := re.match(r'flag --(\w+)=(.*?): ', text):
    parser = flags.FLAGS[wrong[1]].parser if wrong[1] in flags.FLAGS else None
    is_bool = isinstance(parser, flags.BooleanParser)
    allowed = 'true or false' if is_bool else getattr(parser, 'syntactic_help', '')
    return f'--{wrong[1]}={wrong[2]}: it must be {allowed}' if allowed else text[5:]
  return text
