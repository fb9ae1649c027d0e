r"""Make the token store of a run, on all cores of a machine without accelerators.

  tokenformer prepare --config=lm_pile.py:150m --out=gs://BUCKET/pile
  tokenformer train --config=lm_pile.py:150m --config.data.store=gs://BUCKET/pile

Without --out and config.data.store it is made in config.data.cache_dir, where a run of the config
on this machine finds it. A mixture has a store for each source, with --out in a folder of its name.
When the command was interrupted, the same command continues after the last complete shard, and the
store is the same bytes for any number of --workers, and for the workers of Apache Beam on many
machines (--beam). docs/data.md says more.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Literal

from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import Config, TextConfig
from tokenformer_jax.config.arguments import Count, Path, Text
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel.messages import say

if TYPE_CHECKING:
  from tokenformer_jax.data.store import Store

_NAMED = 10  # documents that were left out, of those that are named


def main(
  config: Config,
  *,
  out: Path | None = None,
  workers: Count | None = None,
  beam: Text | None = None,
  bad: Literal['fail', 'skip'] = 'fail',
) -> None:
  """Make the store of a run, or of each source of a mixture, and print its path and size.

  Args:
    config: The config whose text to tokenize: FILE, FILE:VARIANT or NAME.
    out: The folder of the store, or of the stores of a mixture, on a disk or in a bucket.
    workers: Processes that tokenize, one thread each; default: one a core.
    beam: Flags of Apache Beam, whose workers tokenize instead: '--runner=DataflowRunner …'.
    bad: A document that cannot be read ends the command or is left out.
  """
  import jax

  from tokenformer_jax.data import beam as beam_lib
  from tokenformer_jax.data import mixture, store
  from tokenformer_jax.data.corpus import SPLITS

  jax.config.update('jax_platforms', 'cpu')
  data = text_of(config)
  if beam:
    if workers:
      raise UserError('--workers and --beam are both given; --beam has the number of its workers')
    beam_lib.read_options(beam)
  workers = workers or len(os.sched_getaffinity(0))
  os.environ['RAYON_NUM_THREADS'] = str(workers)  # for text of one shard
  options = {'workers': workers, 'beam': beam or '', 'skip_bad': bad == 'skip'}
  if data.mixture:
    stores = mixture.make_stores(data, None if out is None else str(out), **options)
  else:
    if out is not None:
      data = dataclasses.replace(data, store=str(out))
    stores = {'': store.make(data, **options)}
  for made in stores.values():
    _report_bad(made)
    documents = sum(made.index.total(split, 'documents') for split in SPLITS)
    print(
      f'{made.path}: {len(made.train):,} tokens to train on and {len(made.validation):,} held out, '
      f'of {counted(documents, "document")}'
    )


def text_of(config: Config) -> TextConfig:
  """Return the section `data` of a language model."""
  if not isinstance(config.data, TextConfig):
    raise UserError(f'config.model.kind is {config.model.kind}, which has no token store')
  return config.data


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, on_all_hosts=False)


def _report_bad(made: 'Store') -> None:
  """Say which documents were left out."""
  from tokenformer_jax.data.shard_writer import NAMED_BAD

  written = made.index.shards
  named = [text for shard in written for text in shard.bad][:_NAMED]
  for text in named:
    say(f'left out: {text}')
  if more := sum(shard.bad_documents for shard in written) - len(named):
    say(f'left out: {more:,} more; {made.path}/meta.json names up to {NAMED_BAD} of a shard')
