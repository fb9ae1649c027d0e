"""Load a config file, which has a function `get_config`, and report a mistake in one sentence."""

import inspect
import re
import sys
import traceback
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tokenformer_jax import config
from tokenformer_jax.config.fields import every_key
from tokenformer_jax.config.names import NAMED
from tokenformer_jax.config.sections import SourceConfig
from tokenformer_jax.errors import UserError, misspelt

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


def load(path: str, named: Iterable[str] = ()) -> ConfigDict:
  """Return the config from `get_config` of a file, with the missing keys filled in.

  Args:
    path: FILE.py, FILE.py:VARIANT, or the name of a config of the package.
    named: paths of entries to add to `model.variants` and `data.mixture` if the file lacks them.

  Raises:
    UserError: there is no such file or variant, or it does not return a config.
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
    where = _definition(get_config, file)
    variants = [variant] if colon else []
    _check_variant(get_config, variants, file, where)
    values = get_config(*variants)
  except UserError:
    raise
  except Exception as error:  # whatever the user's own code raises
    raise UserError(f'--config={path}: {_place(error, file)}') from error
  if not isinstance(values, ConfigDict):
    found = 'nothing' if values is None else f'a {type(values).__name__}'
    raise UserError(
      f'get_config of {where} returns {found}; it must return the ConfigDict of '
      'config.defaults(), changed'
    )
  with values.unlocked():
    _complete(values, config.defaults(), where)
    for path in named:
      section, _, name = path.rpartition('.')
      if name not in config.lookup(values, section):
        config.lookup(values, section)[name] = ConfigDict()
    for name, layer in values.model.variants.items():
      _follow(layer, values.model.layer, where, f'model.variants.{name}.')
    for name, source in values.data.mixture.items():
      _check_group(source, f'data.mixture.{name}', where)
      _complete(source, ConfigDict(every_key(SourceConfig())), where, f'data.mixture.{name}.')
  values.lock()
  return values


def _check_file(path: str, file: str) -> None:
  if not file:
    raise UserError(f'--config={path} names no file; it is FILE.py or FILE.py:VARIANT')
  here = Path(file)
  if not here.exists():
    folder = here.parent
    known = {path.stem: path.stem for path in _shipped_folder().glob('*.py')}
    known |= {path.name: path for path in folder.glob('*.py')} if folder.is_dir() else {}
    near = misspelt(here.name, known) or misspelt(here.stem, known)
    hint = f'; did you mean {known[near]}?' if near else ''
    raise UserError(f'--config={path}: there is no file {file}{hint}')
  if here.suffix != '.py' or not here.is_file():
    raise UserError(
      f'--config={path} is not a Python file; it is FILE.py or FILE.py:VARIANT, and saved:DIR is '
      'the config of the run in DIR'
    )


def _module(file: str) -> types.ModuleType:
  """Return the file's module, as if imported."""
  try:
    source = Path(file).read_bytes()
  except OSError as error:
    raise UserError(f'the file --config={file} cannot be read ({error.strerror})') from error
  module = types.ModuleType('config_of_this_run')
  module.__file__ = file
  sys.modules[module.__name__] = module  # dataclasses and pickle look for it here
  exec(compile(source, file, 'exec'), module.__dict__)
  return module


def _definition(function: Any, file: str) -> str:
  code = getattr(function, '__code__', None)
  return f'{file}, line {code.co_firstlineno},' if code else file


def _check_variant(function: Any, variants: list[str], file: str, where: str) -> None:
  try:
    inspect.signature(function).bind(*variants)
  except TypeError:
    if variants:
      raise UserError(
        f'get_config of {where} takes no variant, and --config={file}:{variants[0]} names one; '
        f'leave out :{variants[0]}'
      ) from None
    raise UserError(
      f'get_config of {where} needs a variant; give --config={file}:VARIANT'
    ) from None


def _complete(
  values: ConfigDict,
  defaults: ConfigDict,
  where: str,
  group: str = '',
) -> None:
  """Add the keys that a file leaves out, so that a flag can override them."""
  for key in values:
    if key not in defaults and group[:-1] not in NAMED:
      _check_name(f'{group}{key}', where)
  for key, default in defaults.items():
    if key not in values:
      values[key] = default
    elif isinstance(default, ConfigDict):
      _check_group(values[key], f'{group}{key}', where)
      _complete(values[key], default, where, f'{group}{key}.')


def _follow(layer: Any, base: ConfigDict, where: str, group: str) -> None:
  """Add the keys that a layer leaves out, each as a reference to the base's final value."""
  _check_group(layer, group[:-1], where)
  for key in layer:
    if key not in base:
      _check_name(f'{group}{key}', where)
  for key, value in base.items():
    if isinstance(value, ConfigDict):
      if key not in layer:
        layer[key] = ConfigDict()
      _follow(layer[key], value, where, f'{group}{key}.')
    elif key not in layer:
      layer[key] = base.get_oneway_ref(key)


def _check_name(path: str, where: str) -> None:
  """Check that a key in a file exists."""
  try:
    config.check_key(path)
  except UserError as error:
    raise UserError(f'get_config of {where} returns an invalid config: {error}') from None


def _check_group(value: Any, path: str, where: str) -> None:
  """Check that the value of a section of keys is a `ConfigDict`."""
  if not isinstance(value, ConfigDict):
    raise UserError(
      f'get_config of {where} sets config.{path} to {value!r}, and that is a section of keys'
    )


def _place(error: Exception, file: str) -> str:
  """Return the place in the config file that an exception comes from, and its message."""
  if isinstance(error, SyntaxError) and error.filename and error.lineno:
    return f'{error.filename}, line {error.lineno}, is not Python ({error.msg})'
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == file]
  where = f'{file}, line {lines[-1]},' if lines else file
  return f'{where} fails with {message_of(error)}'


def message_of(error: Exception) -> str:
  """Return an error's kind and message in one line."""
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text[:_LONGEST]}' if text else type(error).__name__
