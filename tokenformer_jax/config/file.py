"""Load a config file, which has a function `get_config`, and report a mistake in one sentence."""

import inspect
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from tokenformer_jax import config
from tokenformer_jax.config import arguments
from tokenformer_jax.errors import UserError, arg, misspelt

_LONGEST = 300  # letters to keep of another library's message


def shipped(name: str) -> Path:
  """Return the path of a config file of the package, given its name without suffix."""
  return _shipped_folder() / f'{name}.py'


def _shipped_folder() -> Path:
  """Return the folder of config files: inside an installed package, beside it in a checkout."""
  package = Path(__file__).parent.parent
  installed = package / 'configs'
  return installed if installed.is_dir() else package.parent / 'configs'


def _located(file: str) -> str:
  """Return the path of a config file, given a path or the name of a config of the package.

  A file NAME.py of the user comes before that of the package; a NAME without suffix is no file.
  """
  name = re.fullmatch(r'(\w+)(\.py)?', file)
  is_users = name and name[2] and Path(file).exists()
  return str(shipped(name[1])) if name and not is_users and shipped(name[1]).exists() else file


def read(path: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> config.Config:
  """Return the validated config of a file, with other values by dotted path.

  A value of the file that is a reference to another one follows its override.
  """
  values = load(path)
  in_file = _computed(values)
  with values.unlocked(), values.ignore_type():
    for key, value in overrides.items():
      *sections, name = key.split('.')
      inside: Any = values
      for section in sections:
        inside = inside[section] if isinstance(inside, ConfigDict) and section in inside else None
      if name != 'kind' and isinstance(inside, ConfigDict) and name in inside:
        inside[name] = value
  computed = _changed(in_file, _computed(values))
  base = config.from_dict(config.Config, in_file)
  return config.resolve(computed, config.from_dotted(overrides), base=base)


def from_argument(
  given: config.Config | ConfigDict | str | os.PathLike[str], **changes: Any
) -> config.Config:
  """Return the validated config of an argument of Python code, with changes by section."""
  if isinstance(given, (str, os.PathLike)):
    given = load(os.fspath(given))
  if isinstance(given, ConfigDict):
    return config.resolve(changes, base=config.from_dict(config.Config, _computed(given)))
  if not isinstance(given, config.Config):
    raise UserError(
      f'config is {arguments.shown(given)}; it must be a config, from config.defaults() or of a '
      'run, or a file'
    )
  return config.resolve(changes, base=given)


def load(path: str) -> ConfigDict:
  """Return the `ConfigDict` from `get_config` of a file.

  Args:
    path: FILE.py, FILE.py:VARIANT, or the name of a config of the package.
  """
  file, colon, variant = path.partition(':')
  file = _located(file)
  _check_file(path, file)
  try:
    module = _module(file)
    if not callable(get_config := getattr(module, 'get_config', None)):
      raise UserError(
        f'{file} has no function get_config; a config file defines get_config(), which changes '
        'config.defaults() and returns it'
      )
    _check_variant(path, get_config)
    values = get_config(*([variant] if colon else []))
  except UserError as error:
    if not (line := _line(error, file)) or Path(file).absolute().parent == _shipped_folder():
      raise
    raise UserError(f'{arg.config}={path}, line {line}: {error}') from error
  except Exception as error:  # whatever the user's own code raises
    raise UserError(f'{arg.config}={path}: {_locate(error, file)}') from error
  if not isinstance(values, ConfigDict):
    returned = 'nothing' if values is None else f'a {type(values).__name__}'
    raise UserError(
      f'get_config of {file} returns {returned}; it must return the ConfigDict of '
      'config.defaults(), changed'
    )
  return values


def _computed(values: ConfigDict) -> dict[str, Any]:
  """Return the values as nested dicts, references to others replaced by values."""
  try:
    return values.copy_and_resolve_references().to_dict()
  except Exception as error:  # The file's own code may run here.
    raise UserError(
      f'a value of the config that depends on others cannot be computed ({message_of(error)})'
    ) from error


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
  """Return the values of nested dicts that differ from others of the same form."""
  return {
    name: _changed(old[name], value) if isinstance(value, dict) else value
    for name, value in new.items()
    if value != old[name]
  }


def _check_file(path: str, file: str) -> None:
  if not file:
    raise UserError(f'{arg.config}={path} names no file; it is FILE.py or FILE.py:VARIANT')
  here = Path(file)
  if not here.exists():
    shipped_names = {path.stem: path.stem for path in _shipped_folder().glob('*.py')}
    known = shipped_names | {path.name: path for path in here.parent.glob('*.py')}
    near = misspelt(here.name, known) or misspelt(here.stem, known)
    hint = f'; did you mean {known[near]}?' if near else ''
    if not near and file == here.stem:  # the name of a config of the package, not a path
      hint = f'; known names: {", ".join(sorted(shipped_names))}'
    raise UserError(f'{arg.config}={path}: there is no file {file}{hint}')
  if here.suffix != '.py' or not here.is_file():
    raise UserError(
      f'{arg.config}={path} is not a Python file; it is FILE.py or FILE.py:VARIANT, and saved:DIR '
      'is the config of the run in DIR'
    )


def _check_variant(path: str, get_config: Callable[..., Any]) -> None:
  """Check that `--config=FILE:VARIANT` has a variant if `get_config` has a parameter for it."""
  signature = inspect.signature(get_config)
  file, colon, variant = path.partition(':')
  try:
    signature.bind(*[variant] if colon else [])
  except TypeError:
    reason = f'takes no variant; leave :{variant} out'
    if not colon:  # A parameter has no default.
      upper = next(iter(signature.parameters)).upper()
      reason = f'needs a variant; give {arg.config}={file}:{upper}'
    raise UserError(f'{arg.config}={path}: get_config{signature} {reason}') from None


def _module(file: str) -> types.ModuleType:
  """Return the file's module, as if imported."""
  try:
    source = Path(file).read_bytes()
  except OSError as error:
    raise UserError(f'the file {arg.config}={file} cannot be read ({error.strerror})') from error
  module = types.ModuleType('config_of_this_run')
  module.__file__ = file
  sys.modules[module.__name__] = module  # dataclasses and pickle look for it here
  exec(compile(source, file, 'exec'), module.__dict__)
  return module


def _locate(error: Exception, file: str) -> str:
  """Return the line of the config file that raises an exception, and its message."""
  if isinstance(error, SyntaxError) and error.filename and error.lineno:
    return f'{error.filename}, line {error.lineno}, is not Python ({error.msg})'
  line = _line(error, file)
  where = f'{file}, line {line},' if line else file
  return f'{where} fails with {message_of(error)}'


def _line(error: Exception, file: str) -> int | None:
  """Return the last line of a file that an exception came through, or None."""
  frames = traceback.extract_tb(error.__traceback__)
  return next((frame.lineno for frame in reversed(frames) if frame.filename == file), None)


def message_of(error: Exception) -> str:
  """Return an error's kind and message in one line."""
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text[:_LONGEST]}' if text else type(error).__name__
