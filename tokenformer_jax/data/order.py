"""Order the data: a batch is a pure function of the config and the step.

Sample `i` of a split is the window `tokens[i·T : i·T + T + 1]`: T inputs and their targets; or row
`i` if conversations are packed into rows of T + 1 tokens (see `shard_writer.Packer`). A run
visits the samples in an endless order, shuffled anew in each epoch. It begins at step `s₀` and
sample `p₀` (`Position`); row `r` of its global batch of step `s` is the sample at the position
`p₀ + (s − s₀) · batch_size + r` of that order. A checkpoint stores the number of samples seen, so a
resumed run may use another batch size. Resuming at any step on any number of hosts costs nothing.

In a stage of shorter sequences (`data.sequence_length_by_step`) each sample of the order is cut
into equal pieces, which follow each other as samples of their own. So the order of the tokens is
the same in all stages, and no token of an epoch comes twice.
"""

import dataclasses
import hashlib
import math
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from grain.experimental import index_shuffle

from tokenformer_jax.config import DataConfig, TextConfig
from tokenformer_jax.data.marks import NO_TOKEN
from tokenformer_jax.data.mixture_order import ONE_SOURCE, MixtureOrder
from tokenformer_jax.data.shards import LONGEST, Store
from tokenformer_jax.data.tokens import Tokens
from tokenformer_jax.errors import UserError, counted

ENDLESS = 2**62  # more steps than any run has
_READ_THREADS = 4
_LEARNED = 0.7  # the share of targets below which a run says what to do


@dataclasses.dataclass(frozen=True)
class Position:
  """The start of a run in the order: the batch of `step` begins at the position `sample`."""

  step: int = 0
  sample: int = 0

  def batch_start(self, step: int, batch_size: int) -> int:
    """Return the position where the batch of a step begins: the number of samples before it."""
    return self.sample + (step - self.step) * batch_size

  def in_length(self, before: int, now: int) -> 'Position':
    """Return the position in samples of another length, at the first sample not begun yet."""
    return Position(self.step, -(-self.sample * before // now))


BEGINNING = Position()


def sample_index(seed: int, position: int, n: int) -> int:
  """Return the sample at a position of the endless order of `n` samples.

  Each epoch has each sample once. The function is pure and takes the same time at every position.
  """
  epoch, position = divmod(position, n)
  # A hash, because seed + epoch would make epoch 1 of seed 0 equal to epoch 0 of seed 1.
  digest = hashlib.blake2b(f'{seed}/{epoch}'.encode(), digest_size=4).digest()
  epoch_seed = int.from_bytes(digest, 'little')
  return index_shuffle(position, max_index=n - 1, seed=epoch_seed, rounds=4)


def window_count(tokens: Tokens, sequence_length: int) -> int:
  """Return the number of sequences of tokens; a sequence needs one more token for its targets."""
  shared = 1 - tokens.packed  # tokens of a sequence that the next one has as well
  return max(0, (len(tokens) - shared) // (sequence_length + 1 - shared))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TrainBatches:
  """This host's rows of the training batches by step, a random-access source for Grain.

  A batch has the inputs and targets of its rows, int32 [len(rows), T + 1].

  Attributes:
    sources: the training tokens of each source of the mixture.
    mixture: which source a sample is of; by default there is one.
    rows: the numbers of the rows in the global batch that this host needs.
    last_step: the step after the last one.
    subsamples: a sample of the order has `subsamples` · T tokens and is cut into as many here.
    bounds: whether the ids say where documents begin: see `marks`.
  """

  sources: Sequence[Tokens]
  rows: Sequence[int]
  batch_size: int
  sequence_length: int
  seed: int
  mixture: MixtureOrder = ONE_SOURCE
  position: Position = BEGINNING
  subsamples: int = 1
  bounds: bool = False
  last_step: int = ENDLESS

  def __len__(self) -> int:
    return self.last_step

  def __getitem__(self, step: int) -> np.ndarray:
    first = self.position.batch_start(int(step), self.batch_size)
    windows = [self._window(first + int(row)) for row in self.rows]
    batch = np.empty((len(windows), self.sequence_length + 1), np.int32)
    for source, tokens in enumerate(self.sources):
      rows = [row for row, window in enumerate(windows) if window[0] == source]
      if rows:
        numbers = [windows[row][1] for row in rows]
        batch[rows] = _read_windows(tokens, numbers, self.sequence_length, self.bounds)
    return batch

  def _window(self, position: int) -> tuple[int, int]:
    """Return the source of a position, and the number of its window of T + 1 tokens there."""
    sample, number = divmod(position, self.subsamples)
    source, sample = self.mixture.locate(sample)
    n = window_count(self.sources[source], self.sequence_length * self.subsamples)
    return source, sample_index(self.seed, sample, n) * self.subsamples + number


def validation_batches(
  store: Store, config: TextConfig, rows: Sequence[int], batches: int = 0
) -> Iterator[np.ndarray]:
  """Return this host's rows of the validation batches, int32 [len(rows), T + 1].

  Every sample comes once, in order; `batches` > 0 limits the batches (see `spread`). `rows` are the
  numbers of the rows in the global batch that this host needs. Rows after the last sample are
  filled with `NO_TOKEN`.
  """
  n, bounds = window_count(store.validation, config.sequence_length), config.documents != 'joined'

  def batch(index: int) -> np.ndarray:
    first = index * config.batch_size
    existing = [i for i, row in enumerate(rows) if first + row < n]
    numbers = [first + rows[i] for i in existing]
    result = np.full((len(rows), config.sequence_length + 1), NO_TOKEN, np.int32)
    if existing:
      result[existing] = _read_windows(store.validation, numbers, config.sequence_length, bounds)
    return result

  return map(batch, spread(batches, math.ceil(n / config.batch_size)))


def spread(count: int, total: int) -> tuple[int, ...]:
  """Return `count` of the numbers below `total`, spread evenly; 0: all."""
  count = min(count, total) if count else total
  return tuple(i * total // count for i in range(count))


def _read_windows(
  tokens: Tokens, numbers: Sequence[int], sequence_length: int, bounds: bool
) -> np.ndarray:
  stride = sequence_length + tokens.packed
  ranges = [(i * stride, i * stride + sequence_length + 1) for i in numbers]
  return np.stack(tokens.gather(ranges, bounds=True) if bounds else tokens.gather(ranges))


def describe_store(store: Store, sequence_length: int) -> str:
  """Return a short description of the training text of a store, and what of it is too long."""
  tokens, bytes_per_token = len(store.train), store.bytes_per_token('train')
  if store.chat:
    answers = store.index.total('train', 'answers')
    share = answers / tokens
    doubt = (
      f'; only {share:.0%} of the targets are learned: raise config.data.batch_size, or shorten '
      'prompts that repeat'
    ) * (share < _LEARNED)
    return (
      f'{tokens:,} tokens, {answers:,} of them in answers ({bytes_per_token:.2f} bytes each{doubt})'
      + _describe_longest(store, sequence_length)
    )
  return f'{tokens:,} tokens of {bytes_per_token:.2f} bytes'


def _describe_longest(store: Store, sequence_length: int) -> str:
  """Return which conversations are longer than a sequence; '' if none is."""
  long = [[n for n in one.longest if n > sequence_length + 1] for one in store.index.shards]
  if not (count := sum(map(len, long))):
    return ''
  tokens, row = max((max(one.longest, default=0), one.longest_row) for one in store.index.shards)
  or_more = ' or more' * (max(map(len, long)) == LONGEST)
  return (
    f'; {counted(count, "conversation")}{or_more} cut by '
    f'config.data.sequence_length={sequence_length}, the longest is {row} with {tokens:,} tokens'
  )


def check_store(store: Store, data: TextConfig) -> None:
  """Check that both splits have a sample to learn from, and that documents can be told apart."""
  for split, tokens in (('training', store.train), ('validation', store.validation)):
    if not window_count(tokens, data.sequence_length):
      divided = split == 'validation' and not data.validation_source
      larger = ', raise config.data.validation_fraction' if divided else ''
      raise UserError(
        f'the {split} split has {counted(len(tokens), "token")}, too few for one sequence of '
        f'config.data.sequence_length={data.sequence_length} and its targets; add text{larger} or '
        'shorten the sequence'
      )
    if store.chat and not _has_answer(tokens, data.sequence_length):
      raise UserError(
        f'the {split} split has no answer in its sequences of '
        f'config.data.sequence_length={data.sequence_length} tokens, only prompts; lengthen the '
        'sequence, shorten the prompts, or set config.data.packing=best_fit, which drops no end of '
        'a conversation'
      )
  if data.documents != 'joined' and store.divided:
    raise UserError(
      f'config.data.documents is {data.documents}, and the token store {store.path} is of an '
      f'earlier version, which did not record where its conversations begin; make it again with '
      '`tokenformer prepare`, in a new folder, or set config.data.documents=joined'
    )


def _has_answer(tokens: Tokens, sequence_length: int) -> bool:
  """Return whether a target of a sequence carries loss; read no further than to the first one."""
  windows = range(window_count(tokens, sequence_length))
  read = (_read_windows(tokens, [i], sequence_length, bounds=False) for i in windows)
  return any((window[:, 1:] >= 0).any() for window in read)


def read_ahead(steps: Any, first_step: int, config: DataConfig) -> Generator[Any, None, None]:
  """Yield `steps[first_step:]`, with `config.prefetch` batches read ahead.

  `steps` has a length and returns a batch by its step to any thread or process.
  A batch is a NumPy array or a dict of them. Close the generator to stop the threads or processes.
  """
  dataset = grain.MapDataset.source(steps)[first_step:]
  if config.workers:
    # Grain reads flags when it starts workers, but a notebook, for example, parses no flags.
    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()
    batches = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    batches = batches.mp_prefetch(
      grain.MultiprocessingOptions(
        num_workers=config.workers,
        per_worker_buffer_size=math.ceil(config.prefetch / config.workers),
      )
    )
  else:
    threads = min(_READ_THREADS, config.prefetch)
    batches = dataset.to_iter_dataset(
      grain.ReadOptions(num_threads=threads, prefetch_buffer_size=config.prefetch)
    )
  iterator = iter(batches)
  try:
    for batch in iterator:
      yield jax.tree.map(np.array, batch)  # A copy: a worker's arrays are in shared memory.
  finally:
    iterator.close()
