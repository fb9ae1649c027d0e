"""The flag --config, and its overrides --config.KEY=VALUE."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from absl import flags

from tokenformer_jax import config
from tokenformer_jax.config import Config, file
from tokenformer_jax.errors import UserError

_OVERRIDE = re.compile(r'--?config\.([^=]*)(?:=(.*))?', re.DOTALL)

overrides: dict[str, Any] = {}  # the values of --config.KEY=VALUE in this command line, by key


def define(meaning: str, *, required: bool = False) -> None:
  """Define the flag; `take_overrides` reads --config.KEY=VALUE."""
  flags.DEFINE_string('config', None, meaning, required=required)
  overrides.clear()


def read(default: str = '') -> Config:
  """Return the config of the flag, or else of a default file, with its overrides, validated."""
  return file.read(flags.FLAGS.config or default, overrides)


def name(default: str) -> str:
  """Return the name of the file and its variant, joined, without folder and suffix."""
  path, _, variant = (flags.FLAGS.config or default).partition(':')
  return Path(path).stem + (f'_{variant}' if variant else '')


def check_left_out(keys: Mapping[str, str]) -> None:
  """Check that no flag sets a key that a command sets itself; `keys` has the reasons."""
  for key, why in keys.items():
    if {key, f'{key}.kind'} & overrides.keys():
      raise UserError(f'--config.{key} has no effect here, because {why}; leave it out')


def take_overrides(arguments: Sequence[str]) -> list[str]:
  """Return the arguments without `--config.KEY=VALUE`, whose values are kept for `read`."""
  words, others = list(arguments), []
  while words:
    word = words.pop(0)
    if word == '--':
      return [*others, word, *words]
    if not (match := _OVERRIDE.fullmatch(word)):
      others.append(word)
      continue
    key, value = match.groups()
    kind = config.type_of(key)
    if kind is bool and value is None:
      value = 'true'
    elif value is None and not words:
      raise UserError(f'--config.{key} has no value; give --config.{key}=VALUE')
    overrides[key] = _parse(key, words.pop(0) if value is None else value, kind)
  return others


def _parse(key: str, text: str, kind: type) -> Any:
  """Return the value of a key from its text."""
  if kind is tuple:
    return tuple(filter(None, (name.strip() for name in text.split(','))))
  if kind is str:
    return text
  parse, allowed = {
    int: (_integer, 'an integer'),
    float: (float, 'a number'),
    bool: (_BOOLEANS.__getitem__, 'true or false'),
  }[kind]
  try:
    return parse(text.strip().lower())
  except (ValueError, KeyError):
    raise UserError(f'--config.{key}={text}: it must be {allowed}') from None


_BOOLEANS = {'true': True, '1': True, 'false': False, '0': False}


def _integer(text: str) -> int:
  """Return an integer, also written as `1e4`."""
  try:
    return int(text)
  except ValueError:
    try:
      number = Decimal(text)
    except InvalidOperation:
      raise ValueError('not a number') from None
    # Decimal is exact, and the bound stops 1e999999999 from filling the memory.
    if not number.is_finite() or number.adjusted() > 18 or number % 1:
      raise ValueError('not an integer') from None
    return int(number)
