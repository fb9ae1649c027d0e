"""Configs from what Python code gives: values, files, and changes to those of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig, ModelConfig, TokenCounts
from tokenformer_jax.config import file as config_file
from tokenformer_jax.errors import UserError, nearest


def resolve(config: Config | ConfigDict | str, **changes: Any) -> Config:
  """Return a validated config.

  Args:
    config: from `config.defaults()`, of a run, or a file: see `config_file.load`.
    **changes: see `changed`.

  Raises:
    UserError: see `changed` and `config_file.load`.
  """
  if isinstance(config, str):
    config = config_file.load(config)
  if isinstance(config, ConfigDict):
    config = config_lib.resolve(config.copy_and_resolve_references())
  return changed(dataclasses.asdict(config), changes)


def changed(values: dict[str, Any], changes: Mapping[str, Any]) -> Config:
  """Return a validated config with other values.

  Args:
    values: a config as nested dicts.
    changes: nested dicts of other values, by group of keys.

  Raises:
    UserError: a key is unknown, or a value does not fit.
  """

  def update(group: dict[str, Any], changes: Mapping[str, Any], prefix: str) -> None:
    for key, value in changes.items():
      config_lib.check_key(f'{prefix}{key}')
      if isinstance(group[key], dict):
        if not isinstance(value, Mapping):
          raise UserError(f'config.{prefix}{key} is a group of keys; give a dict of some of them')
        update(group[key], value, f'{prefix}{key}.')
      else:
        group[key] = value

  update(values, changes, '')
  return config_lib.resolve(ConfigDict(values))


def grow_config(config: Config, how: Mapping[str, Any]) -> GrowConfig:
  """Return the group `grow` with these values, whatever the run's own last growth was.

  Raises:
    UserError: see `changed`.
  """
  plain = dataclasses.asdict(dataclasses.replace(config, grow=GrowConfig()))
  return changed(plain, {'grow': how}).grow


def counts(model: ModelConfig, param_tokens: Mapping[str, int]) -> TokenCounts:
  """Return the counts of parameter tokens by kind; a kind that is left out keeps its count.

  Raises:
    UserError: a kind is unknown, or a count is not a number greater than 0.
  """
  kinds = [field.name for field in dataclasses.fields(TokenCounts)]
  for kind, count in param_tokens.items():
    if kind not in kinds:
      raise UserError(f'param_tokens has {kind!r}{nearest(kind, kinds)}')
    if not isinstance(count, int) or count < 1:
      raise UserError(f'param_tokens has {kind}={count!r}; it must be an integer of at least 1')
  return dataclasses.replace(model.param_tokens, **param_tokens)
