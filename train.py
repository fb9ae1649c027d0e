r"""Trains a model.

python train.py                                   the default language model, on a CPU in minutes
python train.py --config=configs/lm_pile.py:150m  another one
python train.py --config.optim.learning_rate=3e-4 another value for any key
"""

import os
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from tokenformer_jax import cli, config, train

_HERE = os.path.dirname(os.path.abspath(__file__))
_CONFIG = config_flags.DEFINE_config_file(
  'config', os.path.join(_HERE, 'configs/lm_stdlib.py'), 'The configuration: FILE or FILE:VARIANT.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where checkpoints and figures go (default: runs/NAME_OF_THE_CONFIG).'
)


def main(argv: Sequence[str]) -> None:
  """Runs the config in the work directory; goes on where an earlier run stopped."""
  del argv
  file, _, variant = config_flags.get_config_filename(flags.FLAGS['config']).partition(':')
  name = os.path.splitext(os.path.basename(file))[0] + (f'_{variant}' if variant else '')
  train.train(config.resolve(_CONFIG.value), _WORKDIR.value or os.path.join('runs', name))


if __name__ == '__main__':
  cli.run(main)
