"""Make configs from the arguments of Python code: values, files and changes to a run's config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig, ModelConfig
from tokenformer_jax.config import file as config_file
from tokenformer_jax.errors import UserError


def resolve(config: Config | ConfigDict | str, **changes: Any) -> Config:
  """Return a validated config.

  Args:
    config: a config from `config.defaults()`, a run's config, or a file: see `config_file.load`.
    **changes: see `changed`.

  Raises:
    UserError: see `changed` and `config_file.load`.
  """
  if isinstance(config, str):
    config = config_file.load(config)
  if isinstance(config, ConfigDict):
    config = config_lib.resolve(config.copy_and_resolve_references())
  return changed(config, changes)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
  """Return a validated config with some values changed.

  Args:
    config: the config to change.
    changes: nested dicts of the new values, by group of keys.

  Raises:
    UserError: a key is unknown, or a value does not fit.
  """
  return config_lib.resolve(ConfigDict(dict(changes)), config)


def grow_config(config: Config, how: Mapping[str, Any]) -> GrowConfig:
  """Return the group `grow` with these values, and defaults instead of the run's last growth.

  Raises:
    UserError: see `changed`.
  """
  return changed(dataclasses.replace(config, grow=GrowConfig()), {'grow': how}).grow


def counts(model: ModelConfig, param_tokens: Mapping[str, int]) -> dict[str, int]:
  """Return counts of parameter tokens by the names of `config.pattentions`.

  Raises:
    UserError: a name is unknown, or a count is not a number greater than 0.
  """
  for name, count in param_tokens.items():
    if not isinstance(count, int) or count < 1:
      raise UserError(f'param_tokens has {name}={count!r}; it must be an integer of at least 1')
  return config_lib.named_counts(model, param_tokens, 'param_tokens')
