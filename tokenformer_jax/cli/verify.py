"""Compare a whole token store with the digests that were recorded when it was built.

tokenformer verify --config=configs/lm_pile.py:150m
tokenformer verify --store=~/.cache/tokenformer_jax/stores/NAME

A run compares the sizes of files at its start, and later the blocks that it reads; this command
reads all of it. It ends with status 2 if the store is damaged.
"""

import os
from collections.abc import Sequence

from absl import flags

from tokenformer_jax.cli import config_flag
from tokenformer_jax.cli import main as cli
from tokenformer_jax.data import mixture, shards, store
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths


def define_flags() -> None:
  """Define the command's flags."""
  config_flag.define('The config whose token store to verify: FILE, FILE:VARIANT or NAME.')
  flags.DEFINE_string('store', None, 'The folder of a token store, instead.')


def main(argv: Sequence[str]) -> None:
  """Verify the store that the flags name, and print its number of tokens."""
  del argv
  given = flags.FLAGS.store
  if (given is None) == (flags.FLAGS['config'].value is None):
    raise UserError('give either --config=FILE or --store=DIR')
  folders = _folders() if given is None else [paths.parse_path(os.path.expanduser(given))]
  for folder in folders:
    tokens = shards.verify(folder)
    print(f'{folder}: all {tokens:,} tokens are as they were written')


def _folders() -> list[paths.Path]:
  """Return the folder of the config's store, or those of the sources of a mixture."""
  resolved = config_flag.read()
  if resolved.model.kind != 'lm':
    raise UserError(f'config.model.kind is {resolved.model.kind}, which has no token store')
  data = resolved.data
  folders = [*mixture.store_folders(data).values()] if data.mixture else [store.store_folder(data)]
  for folder in folders:
    if not paths.exists(folder):
      raise UserError(
        f'the token store {folder} does not exist; a run builds it (a run that starts from a '
        'checkpoint may build another one with the tokenizer of the checkpoint: give that with '
        '--store)'
      )
  return folders


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, on_all_hosts=False)
