"""From dicts of values to a config, and back to the form that config files change."""

import dataclasses
import typing
from typing import Any

import ml_collections

from tokenformer_jax.config import names, run
from tokenformer_jax.config.run import Config
from tokenformer_jax.errors import UserError


def defaults() -> ml_collections.ConfigDict:
  """Return every key with its default value, as the `ConfigDict` that a config file starts from."""
  return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def resolve(config: ml_collections.ConfigDict) -> Config:
  """Validate a `ConfigDict` and freeze it.

  Raises:
    UserError: an unknown key, a value of the wrong type, or values that do not fit together.
  """
  resolved = from_dict(Config, config.to_dict())
  run.check(resolved)
  return resolved


def from_dict(cls: type, values: dict[str, Any], prefix: str = '') -> Any:
  """Build the dataclass `cls` from nested dicts; keys that are left out have their defaults.

  Raises:
    UserError: an unknown key, or a value of the wrong type.
  """
  types = typing.get_type_hints(cls)
  kwargs = {}
  for name, value in values.items():
    if name not in types:
      raise names.unknown(name, prefix, types)
    kwargs[name] = _convert(types[name], value, f'{prefix}{name}')
  return cls(**kwargs)


def _convert(expected: type, value: Any, path: str) -> Any:
  if dataclasses.is_dataclass(expected):
    if not isinstance(value, dict):
      raise UserError(f'config.{path} is {value!r}; it is a group of keys')
    return from_dict(expected, value, f'{path}.')
  if expected is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if type(value) is not expected:
    raise UserError(
      f'config.{path} is {value!r}, of type {type(value).__name__}; it must be {expected.__name__}'
    )
  return value
