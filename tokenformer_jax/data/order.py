"""The order of the data: a batch is a pure function of the config and the step.

Sample `i` of a split is the window `tokens[i·T : i·T + T + 1]`, T inputs and their targets. The
training samples are visited in an endless order, shuffled anew in each epoch. A run that begins at
step `s₀` and sample `p₀` (`Position`) has row `r` of the global batch of step `s` at the position
`p₀ + (s − s₀) · batch_size + r` of that order. A checkpoint holds how many samples were seen, so a
resumed run may have another batch size, and resuming at any step on any number of hosts costs
nothing.
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

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data.store import Store, window_count
from tokenformer_jax.errors import UserError, counted

NO_TOKEN = -1  # fills the rows of the last validation batch that have no sample

_ENDLESS = 2**62
_READ_THREADS = 4


@dataclasses.dataclass(frozen=True)
class Position:
  """Where a run begins in the order: the batch of `step` begins at the position `sample`."""

  step: int = 0
  sample: int = 0

  def of_step(self, step: int, batch_size: int) -> int:
    """Return the position at which the batch of a step begins: the samples seen before it."""
    return self.sample + (step - self.step) * batch_size


BEGINNING = Position()


def sample_index(seed: int, position: int, n: int) -> int:
  """The sample at a position of the endless order of `n` samples: each once in an epoch.

  Pure and O(1) in the position.
  """
  epoch, position = divmod(position, n)
  # A hash, because seed + epoch would make epoch 1 of seed 0 equal to epoch 0 of seed 1.
  digest = hashlib.blake2b(f'{seed}/{epoch}'.encode(), digest_size=4).digest()
  epoch_seed = int.from_bytes(digest, 'little')
  return index_shuffle(position, max_index=n - 1, seed=epoch_seed, rounds=4)


def train_rows(
  tokens: np.ndarray,
  step: int,
  rows: Sequence[int],
  *,
  batch_size: int,
  sequence_length: int,
  seed: int,
  position: Position = BEGINNING,
) -> np.ndarray:
  """Some rows of the global batch of a step.

  Args:
    tokens: the training split.
    step: of the optimizer, from 0.
    rows: numbers of the rows in the global batch.
    batch_size: rows of the global batch.
    sequence_length: T.
    seed: of the order.
    position: where the run begins in the order.

  Returns:
    int32 [len(rows), T + 1], inputs and targets.

  Raises:
    UserError: the split is too short for one sequence.
  """
  n = _sample_count(tokens, sequence_length, 'training')
  first = position.of_step(int(step), batch_size)
  batch = np.empty((len(rows), sequence_length + 1), np.int32)
  for i, row in enumerate(rows):
    sample = sample_index(seed, first + int(row), n)
    batch[i] = _window(tokens, sample, sequence_length)
  return batch


def train_batches(
  store: Store,
  config: DataConfig,
  seed: int,
  rows: Sequence[int],
  first_step: int,
  last_step: int | None = None,
  position: Position = BEGINNING,
) -> Generator[np.ndarray, None, None]:
  """This host's part of the training batches, read ahead in threads or processes.

  Args:
    store: the corpus.
    config: gives `batch_size`, `sequence_length`, `prefetch` and `workers`.
    seed: of the order.
    rows: numbers of the rows in the global batch that this host needs.
    first_step: the step of the first batch.
    last_step: the step before which to end; None: never.
    position: where the run begins in the order.

  Returns:
    A generator of the batches of `first_step`, `first_step + 1`, …, as `train_rows` gives them.
    Close it to stop the threads or processes (`contextlib.closing`).

  Raises:
    UserError: the split is too short for one sequence.
  """
  _sample_count(store.train, config.sequence_length, 'training')
  steps = _TrainSteps(
    tokens=store.train,
    rows=tuple(rows),
    batch_size=config.batch_size,
    sequence_length=config.sequence_length,
    seed=seed,
    last_step=_ENDLESS if last_step is None else last_step,
    position=position,
  )
  return read_ahead(steps, first_step, config)


def validation_batches(
  store: Store, config: DataConfig, rows: Sequence[int], batches: int = 0
) -> Iterator[np.ndarray]:
  """This host's part of the validation batches: every sample once, in order.

  Args:
    store: the corpus.
    config: gives `batch_size` and `sequence_length`.
    rows: numbers of the rows in the global batch that this host needs.
    batches: if greater than 0, at most that many batches, spread evenly over the split.

  Returns:
    An iterator of int32 [len(rows), T + 1]. Rows beyond the last sample are filled with `NO_TOKEN`.

  Raises:
    UserError: the split is too short for one sequence.
  """
  n = _sample_count(store.validation, config.sequence_length, 'validation')
  total = math.ceil(n / config.batch_size)
  count = min(batches, total) if batches else total

  def batch(index: int) -> np.ndarray:
    result = np.full((len(rows), config.sequence_length + 1), NO_TOKEN, np.int32)
    for i, row in enumerate(rows):
      sample = index * config.batch_size + row
      if sample < n:
        result[i] = _window(store.validation, sample, config.sequence_length)
    return result

  return (batch(i * total // count) for i in range(count))


def _sample_count(tokens: np.ndarray, sequence_length: int, split: str) -> int:
  n = window_count(tokens, sequence_length)
  if not n:
    raise UserError(
      f'the {split} split has {counted(len(tokens), "token")}, too few for one sequence of '
      f'config.data.sequence_length={sequence_length} and its targets; give more text or shorten '
      'the sequence'
    )
  return n


def _window(tokens: np.ndarray, sample: int, sequence_length: int) -> np.ndarray:
  start = sample * sequence_length
  return tokens[start : start + sequence_length + 1]


@dataclasses.dataclass(frozen=True, eq=False)
class _TrainSteps:
  """The batches by step, as the random-access source that Grain reads."""

  tokens: np.memmap
  rows: tuple[int, ...]
  batch_size: int
  sequence_length: int
  seed: int
  last_step: int
  position: Position = BEGINNING

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
    )

  def __getstate__(self) -> dict[str, Any]:
    # A memory map is pickled as all of its content; a worker maps the file again instead.
    return self.__dict__ | {'tokens': (self.tokens.filename, self.tokens.dtype)}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state, tokens=np.memmap(*state['tokens'], mode='r'))


def read_ahead(
  steps: Sequence[Any], first_step: int, config: DataConfig
) -> Generator[Any, None, None]:
  """Yields `steps[first_step:]`, of which `config.prefetch` batches are read ahead.

  Batches are arrays, or dicts of them, of numpy. Close the generator to stop what reads.
  """
  dataset = grain.MapDataset.source(steps)[first_step:]
  if config.workers:
    if (
      not flags.FLAGS.is_parsed()
    ):  # In a notebook, say. Grain reads flags where it starts workers.
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
    for batch in iterator:  # Copied, because a worker's arrays are shared memory.
      yield jax.tree.map(np.array, batch)
  finally:
    iterator.close()
