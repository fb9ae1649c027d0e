"""Parse a command's flags, and report a mistake in them in one sentence."""

import os
import re
from collections.abc import Sequence

from absl import flags

from tokenformer_jax import config
from tokenformer_jax.cli import config_flag, help_text, signatures
from tokenformer_jax.errors import UserError, misspelt


def parse(argv: Sequence[str]) -> list[str]:
  """Parse the flags of `argv`, and return the other arguments."""
  if 'config' in flags.FLAGS:
    argv = [argv[0], *config_flag.take_overrides(argv[1:])]
  try:
    words = flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as error:
    raise UserError(_unknown(error.flagname)) from error
  except (flags.Error, ValueError) as error:  # ValueError: a value for --noNAME
    raise UserError(_sentence(error)) from error
  for word in words[1:]:
    name = re.match(r'[‐-―−]*(config(?=\.)|\w+(?==))', word)
    if name and name[1] in flags.FLAGS and not os.path.exists(word):
      raise UserError(f'{word!r} is no flag; did you mean --{word.lstrip("‐‑‒–—―−")}?')
  return words


def missing_flag(name: str) -> str:
  """Return the sentence for a flag that has no value, from its help."""
  return f'--{name} is missing: {help_text.meaning(name)}'


def _unknown(name: str) -> str:
  """Return the sentence for an unknown flag, which may be the last part of a config's key."""
  action, of_others = signatures.Actions.current
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


def _sentence(error: Exception) -> str:
  """Return one sentence for an error that absl or ml_collections raises for a flag."""
  text = ' '.join(str(error).split())
  if missing := re.search(r'Flag --(\S+) must have a value other than None', text):
    return missing_flag(missing[1])
  if missing := re.search(r'Missing value for flag -*(\S+)', text):
    return f'--{missing[1]} has no value; give --{missing[1]}=VALUE'
  if wrong := re.match(r'flag --(\w+)=(.*?): ', text):
    parser = flags.FLAGS[wrong[1]].parser if wrong[1] in flags.FLAGS else None
    is_bool = isinstance(parser, flags.BooleanParser)
    allowed = 'true or false' if is_bool else getattr(parser, 'syntactic_help', '')
    return f'--{wrong[1]}={wrong[2]}: it must be {allowed}' if allowed else text[5:]
  return text
