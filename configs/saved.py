r"""The config of an earlier run, as its work directory has it.

python train.py --config=configs/saved.py:DIR --workdir=OTHER_DIR
python train.py --workdir=DIR     takes it by itself, to go on with that run
"""

import dataclasses
import json

from ml_collections import ConfigDict

from tokenformer_jax import config, messages, paths, saved_config
from tokenformer_jax.errors import UserError


def get_config(workdir):
  path = paths.of(workdir) / 'config.json'
  try:
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
      raise ValueError(f'it holds a {type(values).__name__}')
    saved = config.from_dict(config.Config, values)
  except (paths.errors(path), ValueError, RecursionError, UserError) as error:
    raise UserError(
      f'{path} is not the config of a run ({paths.reason(error)}); name a work directory'
    ) from error
  if programs := saved.train.compilation_cache:
    messages.say(
      f'{path} keeps compiled programs in {programs!r}, which is not taken from there, since they '
      f'are run as they are; if you trust them: --config.train.compilation_cache={programs}'
    )
  return ConfigDict(dataclasses.asdict(saved_config.without_programs(saved)))
