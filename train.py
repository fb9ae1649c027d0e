r"""Trains a model.

python train.py                                   the default language model, on a CPU in minutes
python train.py --config=configs/lm_pile.py:150m  another one
python train.py --config=configs/vit_digits.py    a vision transformer, also in minutes
python train.py --config.optim.learning_rate=3e-4 another value for any key
python train.py --workdir=DIR                     an earlier run, with the config it has
"""

import itertools
import os
import sys
from collections.abc import Sequence

from absl import flags

from tokenformer_jax import cli, paths, train
from tokenformer_jax.config import file as config_file
from tokenformer_jax.config import keys as config_keys
from tokenformer_jax.errors import UserError

_HERE = os.path.dirname(os.path.abspath(__file__))
config_file.define(
  'The config, FILE or FILE:VARIANT (default: that of the run in --workdir, if there is one, or '
  'configs/lm_stdlib.py).'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where checkpoints and figures go (default: runs/NAME_OF_THE_CONFIG).'
)
_STOPPED_STATUS = flags.DEFINE_integer(
  'stopped_status',
  0,
  'Exit status after a stop (SIGTERM, Ctrl-C) before the last step; with one of its own, 75 say, '
  'what started the run knows that it is to be started again.',
  lower_bound=0,
  upper_bound=255,
)


def main(argv: Sequence[str]) -> int:
  """Runs the config in the work directory; goes on where an earlier run stopped."""
  del argv
  run = config_file.read()
  workdir = _WORKDIR.value or os.path.join('runs', config_file.name())
  _, stopped = train.train_or_stop(run, workdir)
  return _STOPPED_STATUS.value if stopped else 0


def _help_of_keys() -> str:
  """What --help says of the config's keys."""
  return (
    '\nKeys, each with the default that config files start from: --config.KEY=VALUE\n'
    + config_keys.render()
  )


def _with_config(arguments: list[str]) -> list[str]:
  """The arguments, with a --config if there is none.

  Not as the flag's default, which would be loaded, and given the overrides, beside any other.
  """
  given = {}
  for argument, following in itertools.zip_longest(arguments, arguments[1:]):
    if argument.startswith('-'):
      name, equals, value = argument.lstrip('-').partition('=')
      given[name] = value if equals else following
  if 'config' in given:
    return arguments
  workdir = given.get('workdir')
  if workdir and _has_config(workdir):
    return [f'--config={_HERE}/configs/saved.py:{workdir}', *arguments]
  return [f'--config={_HERE}/configs/lm_stdlib.py', *arguments]


def _has_config(workdir: str) -> bool:
  try:
    return (paths.of(workdir) / 'config.json').exists()
  except UserError:  # which the run will say
    return False


if __name__ == '__main__':
  sys.argv[1:] = _with_config(sys.argv[1:])
  cli.run(main, stops=True, more_help=_help_of_keys)
