"""The flag --config, and its overrides --config.KEY=VALUE."""

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from tokenformer_jax import config
from tokenformer_jax.config import Config, file
from tokenformer_jax.config.names import NAMED
from tokenformer_jax.errors import UserError

_MOST_POWER = 10  # of a factor; realistic powers lie between −2 and 0


def define(help_text: str) -> None:
  """Define the flag and its overrides `--config.KEY=VALUE`."""
  config_flags.DEFINE_config_file('config', None, help_text)
  flags.FLAGS['config'].parser = _Parser()
  config_flags.register_flag_parser_for_type(int, _Integer())
  config_flags.register_flag_parser_for_type(tuple, _Names())


def read() -> Config:
  """Return the config of the flag, with its overrides, validated.

  Raises:
    UserError: a value cannot be computed from others, or does not fit: see `config.resolve`.
  """
  flag = flags.FLAGS['config']
  try:
    values_in_file = flag.parser.values.copy_and_resolve_references()
    values = flag.value.copy_and_resolve_references()
  except Exception as error:  # The file's own code may run here, in references to other values.
    name = config_flags.get_config_filename(flag)
    raise UserError(
      f'--config={name}: a value that depends on others cannot be computed '
      f'({file.message_of(error)})'
    ) from error
  # A flag may choose another kind; the file's values for the former kind then remain.
  return config.resolve(values, config.from_dict(Config, values_in_file.to_dict()))


def name() -> str:
  """Return the name of the file and its variant, joined, without folder and suffix."""
  file, _, variant = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
  return Path(file).stem + (f'_{variant}' if variant else '')


def check_left_out(keys: Mapping[str, str]) -> None:
  """Check that no flag sets a key that a command sets itself; `keys` has the reasons.

  Raises:
    UserError: one does.
  """
  for key, why in keys.items():
    name = f'config.{key}'
    if name in flags.FLAGS and flags.FLAGS[name].present:
      raise UserError(f'--{name} has no effect here, because {why}; leave it out')


def check_overrides(arguments: Sequence[str]) -> None:
  """Check that every `--config.KEY` among the arguments names a single key.

  A key of `model.variants.NAME` or `data.mixture.NAME` adds this entry to a config that has none.

  Raises:
    UserError: there is no such key, or it is a section of keys.
  """
  parser = flags.FLAGS['config'].parser
  parser.named = []
  for argument in itertools.takewhile(lambda word: word != '--', arguments):
    flag = argument.partition('=')[0]
    word = flag.lstrip('-').removeprefix('no')
    if flag.startswith('-') and word.startswith('config.'):
      key = word.removeprefix('config.')
      config.check_key(key, single=True)
      if entry := re.match(rf'((?:{"|".join(map(re.escape, NAMED))})\.\w+)\.', key):
        parser.named.append(entry[1])


class _Integer(flags.IntegerParser):
  """Parses integers, also written as `1e4`."""

  def convert(self, argument: Any) -> int:
    try:
      return super().convert(argument)
    except ValueError:
      try:
        number = Decimal(argument)
      except InvalidOperation:
        raise ValueError('not a number') from None
      # Decimal is exact, and the bound stops 1e999999999 from filling the memory.
      if not number.is_finite() or number.adjusted() > 18 or number % 1:
        raise ValueError('not an integer') from None
      return int(number)


class _Names(flags.ArgumentParser):
  """Parses names with commas between them; an empty text has none."""

  def parse(self, argument: Any) -> tuple[str, ...]:
    if isinstance(argument, tuple):  # the default
      return argument
    return tuple(filter(None, (name.strip() for name in argument.split(','))))


class _Parser(flags.ArgumentParser):
  """Loads the file and reports a mistake in one sentence; ml_collections would raise any exception.

  It compiles the source itself, because an import would write bytecode beside the user's file.
  """

  def __init__(self):
    self.values = config.defaults()  # the file's values, without the changes by flags
    self.named: list[str] = []  # the paths of named layers and sources that flags mention

  def parse(self, path: str) -> ConfigDict:
    values = file.load(path, self.named)
    self.values = copy.deepcopy(values)
    return values


def define_rate_power(default: float) -> None:
  """Define the flag of commands that train several sizes of a config."""
  flags.DEFINE_float(
    'rate_power',
    default,
    'p: the learning rate of a size is that of the config times factor^p.',
    -_MOST_POWER,
    _MOST_POWER,
  )
