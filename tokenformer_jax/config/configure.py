"""Make configs from the arguments of Python code: values, files and changes to a run's config."""

import os
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig, arguments
from tokenformer_jax.config import file as config_file
from tokenformer_jax.errors import UserError


def resolve(config: Config | ConfigDict | str | os.PathLike[str], **changes: Any) -> Config:
  """Return a validated config, from a file as `config_file.load` or with `changes` as `changed`.

  Raises:
    UserError: see `changed` and `config_file.load`.
  """
  if isinstance(config, (str, os.PathLike)):
    config = config_file.load(os.fspath(config))
  if isinstance(config, ConfigDict):
    config = config_lib.resolve(config.copy_and_resolve_references())
  if not isinstance(config, Config):
    raise UserError(
      f'config is {arguments.shown(config)}; it must be a config, from config.defaults() or of a '
      'run, or a file'
    )
  return changed(config, changes)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
  """Return a validated config with new values, nested dicts by section of keys.

  Raises:
    UserError: a key is unknown, or a value does not fit.
  """
  return config_lib.resolve(changes, base=config)


def with_value(changes: Mapping[str, Any], section: str, **values: Any) -> dict[str, Any]:
  """Return changes with more values in a section of keys.

  Raises:
    UserError: the section has something else than values by key.
  """
  was = changes.get(section, {})
  if not isinstance(was, Mapping):
    raise UserError(f'config.{section} is {was!r}; it is a section of keys')
  return {**changes, section: {**was, **values}}


def grow_config(how: Mapping[str, Any]) -> GrowConfig:
  """Return the section `grow` with these values, and defaults for the others.

  Raises:
    UserError: see `changed`.
  """
  return changed(Config(), {'grow': how}).grow
