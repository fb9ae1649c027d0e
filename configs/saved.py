r"""The config of an earlier run, as its work directory has it.

python train.py --config=configs/saved.py:DIR --workdir=OTHER_DIR
python train.py --workdir=DIR     takes it by itself, to go on with that run
"""

from tokenformer_jax import config, messages
from tokenformer_jax.runs import saved_config
from tokenformer_jax.storage import paths


def get_config(workdir):
  path = paths.parse_path(workdir) / 'config.json'
  saved = saved_config.read(path, 'name a work directory')
  if programs := saved.train.compilation_cache:
    messages.say(
      f'{path} keeps compiled programs in {programs!r}, which is not taken from there, since they '
      f'are run as they are; if you trust them: --config.train.compilation_cache={programs}'
    )
  return config.to_config_dict(saved_config.without_programs(saved))
