"""Order the data: a batch is a pure function of the config and the step.

Sample `i` of a split is the window `tokens[i·T : i·T + T + 1]`: T inputs and their targets. A run
visits the samples in an endless order, shuffled anew in each epoch. It begins at step `s₀` and
sample `p₀` (`Position`); row `r` of its global batch of step `s` is the sample at the position
`p₀ + (s − s₀) · batch_size + r` of that order. A checkpoint stores the number of samples seen, so a
resumed run may use another batch size. Resuming at any step on any number of hosts costs nothing.

In a stage of shorter sequences (`data.sequence_length_by_step`) each sample of the order is cut
into equal parts, which follow each other as samples of their own. So the order of the tokens is the
same in all stages, and no token of an epoch comes twice.
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
from tokenformer_jax.data.shards import Store
from tokenformer_jax.data.store import window_count
from tokenformer_jax.data.tokens import Tokens
from tokenformer_jax.errors import UserError, counted

NO_TOKEN = -1  # padding id of rows of the last validation batch that have no sample
ENDLESS = 2**62  # more steps than any run has
_READ_THREADS = 4


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


def train_rows(
  tokens: np.ndarray | Tokens,
  step: int,
  rows: Sequence[int],
  *,
  batch_size: int,
  sequence_length: int,
  seed: int,
  position: Position = BEGINNING,
  subsamples: int = 1,
) -> np.ndarray:
  """Return inputs and targets of some rows of the global batch of a step, int32 [len(rows), T + 1].

  Steps count from 0, and `rows` are numbers of rows in the global batch. For `subsamples` see
  `samples`.
  """
  _sample_count(tokens, sequence_length * subsamples, 'training')
  first = position.batch_start(int(step), batch_size)
  positions = [first + int(row) for row in rows]
  return np.stack(samples(tokens, positions, sequence_length, seed, subsamples))


def samples(
  tokens: np.ndarray | Tokens,
  positions: Sequence[int],
  sequence_length: int,
  seed: int,
  subsamples: int = 1,
) -> list[np.ndarray]:
  """Return the samples at some positions of the endless order of a split, int32 [T + 1] each.

  A sample of the order has `subsamples` · T tokens and is cut into as many samples here.
  """
  n = window_count(tokens, sequence_length * subsamples)
  indices = [divmod(position, subsamples) for position in positions]
  numbers = [sample_index(seed, whole, n) * subsamples + number for whole, number in indices]
  return [window.astype(np.int32) for window in _windows(tokens, numbers, sequence_length)]


def train_batches(
  store: Store,
  config: TextConfig,
  seed: int,
  rows: Sequence[int],
  first_step: int,
  last_step: int | None = None,
  position: Position = BEGINNING,
  subsamples: int = 1,
) -> Generator[np.ndarray, None, None]:
  """Return this host's rows of the training batches, read ahead in threads or processes.

  The batches are those of `first_step` … `last_step` − 1 (None: without end), in the form of
  `train_rows`. `rows` are the numbers of the rows in the global batch that this host needs. Close
  the generator to stop the threads or processes (`contextlib.closing`).
  """
  _sample_count(store.train, config.sequence_length * subsamples, 'training')
  steps = _TrainSteps(
    tokens=store.train,
    rows=tuple(rows),
    batch_size=config.batch_size,
    sequence_length=config.sequence_length,
    seed=seed,
    last_step=ENDLESS if last_step is None else last_step,
    position=position,
    subsamples=subsamples,
  )
  return read_ahead(steps, first_step, config)


def validation_batches(
  store: Store, config: TextConfig, rows: Sequence[int], batches: int = 0
) -> Iterator[np.ndarray]:
  """Return this host's rows of the validation batches, int32 [len(rows), T + 1].

  Every sample comes once, in order; `batches` > 0 limits the batches (see `spread`). `rows` are the
  numbers of the rows in the global batch that this host needs. Rows after the last sample are
  filled with `NO_TOKEN`.
  """
  n = _sample_count(store.validation, config.sequence_length, 'validation')

  def batch(index: int) -> np.ndarray:
    first = index * config.batch_size
    existing = [i for i, row in enumerate(rows) if first + row < n]
    numbers = [first + rows[i] for i in existing]
    windows = _windows(store.validation, numbers, config.sequence_length)
    result = np.full((len(rows), config.sequence_length + 1), NO_TOKEN, np.int32)
    for i, window in zip(existing, windows, strict=True):
      result[i] = window
    return result

  return map(batch, spread(batches, math.ceil(n / config.batch_size)))


def spread(count: int, total: int) -> tuple[int, ...]:
  """Return `count` of the numbers below `total`, spread evenly; 0: all."""
  count = min(count, total) if count else total
  return tuple(i * total // count for i in range(count))


def _sample_count(tokens: np.ndarray | Tokens, sequence_length: int, split: str) -> int:
  n = window_count(tokens, sequence_length)
  if not n:
    raise UserError(
      f'the {split} split has {counted(len(tokens), "token")}, too few for one sequence of '
      f'config.data.sequence_length={sequence_length} and its targets; add text or shorten the '
      'sequence'
    )
  return n


def _windows(
  tokens: np.ndarray | Tokens, samples: Sequence[int], sequence_length: int
) -> list[np.ndarray]:
  """Return the windows of samples, each of T + 1 tokens."""
  ranges = [(i * sequence_length, (i + 1) * sequence_length + 1) for i in samples]
  if isinstance(tokens, Tokens):
    return tokens.gather(ranges)
  return [tokens[start:stop] for start, stop in ranges]


@dataclasses.dataclass(frozen=True, eq=False)
class _TrainSteps:
  """Training batches by step, in the form of a random-access source for Grain."""

  tokens: Tokens
  rows: tuple[int, ...]
  batch_size: int
  sequence_length: int
  seed: int
  last_step: int
  position: Position = BEGINNING
  subsamples: int = 1

  def __len__(self) -> int:
    return self.last_step

  def __getitem__(self, step: int) -> np.ndarray:
    return train_rows(
      self.tokens,
      step,
      self.rows,
      batch_size=self.batch_size,
      sequence_length=self.sequence_length,
      seed=self.seed,
      position=self.position,
      subsamples=self.subsamples,
    )


def describe_store(store: Store) -> str:
  """Return a short description of the training text of a store."""
  tokens, bytes_per_token = len(store.train), store.bytes_per_token('train')
  if store.chat:
    answers = f'{store.train_answers:,} of them in answers'
    return f'{tokens:,} tokens, {answers} ({bytes_per_token:.2f} bytes each)'
  return f'{tokens:,} tokens of {bytes_per_token:.2f} bytes'


def check_store(store: Store, data: TextConfig) -> None:
  """Check that both splits of a store have a sample, and that its documents can be told apart."""
  _sample_count(store.train, data.sequence_length, 'training')
  _sample_count(store.validation, data.sequence_length, 'validation')
  if data.documents != 'joined' and store.divided:
    raise UserError(
      f'config.data.documents is {data.documents}, and {counted(store.divided, "conversation")} of '
      f"{data.source} have the tokenizer's end of document inside, or the token that begins one; "
      'set it to joined, or part turns by another token in config.data.chat_template'
    )


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
