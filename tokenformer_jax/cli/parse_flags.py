"""Parse a command's flags, and report a mistake in them in one sentence."""

import math
import re
from collections.abc import Sequence

from absl import flags

from tokenformer_jax import config
from tokenformer_jax.cli import config_flag, help_text, signatures
from tokenformer_jax.errors import UserError, misspelt


def parse(argv: Sequence[str]) -> list[str]:
  """Parse the flags of `argv`, and return the other arguments.

  Raises:
    UserError: a flag is unknown, missing or empty, or its value does not fit.
  """
  if 'config' in flags.FLAGS:
    argv = [argv[0], *config_flag.take_overrides(argv[1:])]
    if config_flag.overrides and not any(re.match('--?config(=|$)', word) for word in argv):
      key = next(iter(config_flag.overrides))
      raise UserError(f'--config.{key} changes a config; put --config=FILE before it')
  try:
    rest = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    raise UserError(_unknown(error.flagname)) from error
  except (flags.Error, ValueError) as error:  # ValueError: a value for --noNAME
    raise UserError(_sentence(error)) from error
  for flag in help_text.own_flags():
    if flag.present:
      _check_value(flag)
  return rest


def needs_value(other: str, value: object, **given: object) -> None:
  """Refuse arguments that have an effect only with another one, whose value is `value`."""
  for name, one in given.items():
    if not value and one not in (None, False, '', (), []):
      raise UserError(f'--{name} has an effect only with --{other}; leave it out')


def refuse(names: str, why: str, *, unless: object) -> None:
  """Refuse flags, by their names with spaces between, that have no effect in this call.

  Raises:
    UserError: one is given, and `unless` is false; the sentence is the flag and `why`.
  """
  for name in names.split():
    if flags.FLAGS[name].present and not unless:
      raise UserError(f'--{name} {why}')


def needs(names: str, other: str) -> None:
  """Refuse flags that have an effect only with another one, such as `stride` with `text=…`."""
  given = flags.FLAGS[other.partition('=')[0]].value
  refuse(names, f'has an effect only with --{other}; leave it out', unless=given)


def missing_flag(name: str) -> str:
  """Return the sentence for a flag that has no value, from its help."""
  meaning = flags.FLAGS[name].help.rstrip('.')
  first = meaning[0] if meaning[1].isupper() else meaning[0].lower()  # CHIP stays.
  return f'--{name} is missing: {first}{meaning[1:]}'


def _check_value(flag: flags.Flag) -> None:
  """Check that the value of a flag is not empty, and is finite if it is a number."""
  value = flag.value
  if isinstance(flag.parser, signatures.Parser):
    return  # It has checked the value.
  is_empty = not value or '' in value if isinstance(value, list) else value == ''
  if is_empty and flag.default != '' and not _choices(flag):
    raise UserError(f'--{flag.name}= is empty; give it a value, or leave it out')
  # absl compares with bounds, and every comparison with NaN is false.
  if isinstance(value, float) and not math.isfinite(value):
    raise UserError(f'--{flag.name} is {value}; it must be a finite number')


def _unknown(name: str) -> str:
  """Return the sentence for an unknown flag, which may be the last part of a config's key."""
  action, of_others = signatures.Actions.current
  if name in of_others:
    return f'--{name} has no meaning for {action}; leave it out'
  known = [flag.name for flag in help_text.own_flags()]
  plain = name.replace('-', '_').lower()
  if plain in known:
    return f'--{name} is unknown; did you mean --{plain}?'
  if name.startswith('config.') and 'config' in known:
    return f'--{name} changes a config; put --config=FILE before it'
  keys = config.keys_named(plain) if 'config' in known else []
  if keys and (plain == keys[0].rpartition('.')[2] or not misspelt(name, known)):
    named = ' or '.join(f'--config.{path}' for path in keys)
    return f'--{name} is unknown; did you mean {named}?'
  if near := misspelt(name, known):
    return f'--{name} is unknown; did you mean --{near}?'
  return f'--{name} is unknown; `{help_text.command()} --help` lists the flags'


def _sentence(error: Exception) -> str:
  """Return one sentence for an error that absl or ml_collections raises for a flag."""
  text = ' '.join(str(error).split())
  if missing := re.search(r'Flag --(\S+) must have a value other than None', text):
    return missing_flag(missing[1])
  if missing := re.search(r'Missing value for flag -*(\S+)', text):
    return f'--{missing[1]} has no value; give --{missing[1]}=VALUE'
  if found := re.match(r'flag --([^=]+)=', text):
    name = found[1]
    value = text[found.end() :].removesuffix(f': {" ".join(str(error.__context__).split())}')
    allowed = _allowed(name)
    return f'--{name}={value}: it must be {allowed}' if allowed else f'{text[5:]}'
  return text


def _allowed(name: str) -> str:
  """Return the allowed values of a flag, or an empty string if its parser does not say."""
  if name not in flags.FLAGS:
    return ''
  parser = flags.FLAGS[name].parser
  if isinstance(parser, flags.BooleanParser):
    return 'true or false'
  if choices := _choices(flags.FLAGS[name]):
    return 'one of ' + ', '.join(choice or "'' (empty)" for choice in choices)
  return getattr(parser, 'syntactic_help', '')


def _choices(flag: flags.Flag) -> list[str]:
  return getattr(flag.parser, 'enum_values', [])
