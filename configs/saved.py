r"""The config of an earlier run, as its work directory has it.

python train.py --config=configs/saved.py:DIR --workdir=OTHER_DIR
python train.py --workdir=DIR     takes it without being told, to go on with that run
"""

import json

from tokenformer_jax import config, paths
from tokenformer_jax.errors import UserError


def get_config(workdir):
  path = paths.of(workdir) / 'config.json'
  try:
    values = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise UserError(
      f'{path} is not the config of a run ({error}); name a work directory'
    ) from error
  c = config.defaults()
  c.update(values)
  return c
