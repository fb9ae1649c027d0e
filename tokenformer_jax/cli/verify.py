"""Compare a whole token store with the digests that were recorded when it was built.

tokenformer verify --config=configs/lm_pile.py:150m
tokenformer verify --store=~/.cache/tokenformer_jax/stores/NAME

A run compares the sizes of files at its start, and later the blocks that it reads; this command
reads all of it. It ends with status 2 if the store is damaged.
"""

import os
from typing import TYPE_CHECKING

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli.prepare import text_of
from tokenformer_jax.config import Config
from tokenformer_jax.config.arguments import Path
from tokenformer_jax.errors import UserError

if TYPE_CHECKING:
  from tokenformer_jax.storage import paths


def main(config: Config | None = None, store: Path | None = None) -> None:
  """Verify a token store, and print its number of tokens.

  Args:
    config: The config whose token store to verify: FILE, FILE:VARIANT or NAME.
    store: The folder of a token store, instead.
  """
  from tokenformer_jax.data import shards
  from tokenformer_jax.storage import paths

  if config is not None and store is None:
    folders = _folders(config)
  elif store is not None and config is None:
    folders = [paths.parse_path(os.path.expanduser(store))]
  else:
    raise UserError('give either --config=FILE or --store=DIR')
  for folder in folders:
    tokens = shards.verify(folder)
    print(f'{folder}: all {tokens:,} tokens are as they were written')


def _folders(config: Config) -> 'list[paths.Path]':
  """Return the folder of the config's store, or those of the sources of a mixture."""
  from tokenformer_jax.data import mixture
  from tokenformer_jax.data import store as store_lib
  from tokenformer_jax.storage import paths

  data = text_of(config)
  stores = mixture.store_folders(data).values() if data.mixture else [store_lib.store_folder(data)]
  for folder in stores:
    if not paths.exists(folder):
      raise UserError(
        f'the token store {folder} does not exist; a run builds it (a run that starts from a '
        'checkpoint may build another one with the tokenizer of the checkpoint: give that with '
        '--store)'
      )
  return [*stores]


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, on_all_hosts=False)
