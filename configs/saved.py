r"""The config of an earlier run, from its work directory.

  python train.py --config=configs/saved.py:DIR --workdir=OTHER_DIR

`python train.py --workdir=DIR` uses this config without the flag, to continue that run.
"""

from tokenformer_jax import config
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs import saved_config
from tokenformer_jax.storage import paths


def get_config(workdir):
  path = paths.parse_path(workdir) / 'config.json'
  saved = saved_config.read(path, 'name another work directory')
  if programs := saved.train.compilation_cache:
    messages.say(
      f'{path} names {programs!r} for compiled programs, which is ignored, because such programs '
      f'run unchecked; if you trust them: --config.train.compilation_cache={programs}'
    )
  return config.to_config_dict(saved_config.without_programs(saved))
