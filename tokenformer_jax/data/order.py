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
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from grain.experimental import index_shuffle

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data.shards import Store
from tokenformer_jax.data.store import prepare, window_count
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.data.tokens import Tokens
from tokenformer_jax.errors import UserError, counted

NO_TOKEN = -1  # fills those rows of the last validation batch that have no sample

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
  parts: int = 1,
) -> np.ndarray:
  """Return inputs and targets of some rows of the global batch of a step, int32 [len(rows), T + 1].

  Steps count from 0, and `rows` are numbers of rows in the global batch. For `parts` see `samples`.

  Raises:
    UserError: the split is too short for one sequence.
  """
  _sample_count(tokens, sequence_length * parts, 'training')
  first = position.batch_start(int(step), batch_size)
  positions = [first + int(row) for row in rows]
  found = samples(tokens, positions, sequence_length=sequence_length, seed=seed, parts=parts)
  return np.stack(list(found))


def samples(
  tokens: np.ndarray | Tokens,
  positions: Sequence[int],
  *,
  sequence_length: int,
  seed: int,
  parts: int = 1,
) -> Iterator[np.ndarray]:
  """Yield the samples at some positions of the endless order of a split, int32 [T + 1] each.

  They are the `parts` of the samples of an order of sequences of `parts` · T tokens.
  """
  n = window_count(tokens, sequence_length * parts)
  places = [divmod(position, parts) for position in positions]
  numbers = [sample_index(seed, whole, n) * parts + part for whole, part in places]
  for window in _windows(tokens, numbers, sequence_length):
    yield window.astype(np.int32)


def train_batches(
  store: Store,
  config: DataConfig,
  seed: int,
  rows: Sequence[int],
  first_step: int,
  last_step: int | None = None,
  position: Position = BEGINNING,
  parts: int = 1,
) -> Generator[np.ndarray, None, None]:
  """Return this host's part of the training batches, read ahead in threads or processes.

  The batches are those of `first_step` … `last_step` − 1 (None: without end), in the form of
  `train_rows`. `rows` are the numbers of the rows in the global batch that this host needs. Close
  the generator to stop the threads or processes (`contextlib.closing`).

  Raises:
    UserError: the split is too short for one sequence.
  """
  _sample_count(store.train, config.sequence_length * parts, 'training')
  steps = _TrainSteps(
    tokens=store.train,
    rows=tuple(rows),
    batch_size=config.batch_size,
    sequence_length=config.sequence_length,
    seed=seed,
    last_step=ENDLESS if last_step is None else last_step,
    position=position,
    parts=parts,
  )
  return read_ahead(steps, first_step, config)


def validation_batches(
  store: Store, config: DataConfig, rows: Sequence[int], batches: int = 0
) -> Iterator[np.ndarray]:
  """Return this host's part of the validation batches, int32 [len(rows), T + 1].

  Every sample comes once, in order; `batches` > 0 limits the batches (see `spread`). `rows` are the
  numbers of the rows in the global batch that this host needs. Rows after the last sample are
  filled with `NO_TOKEN`.

  Raises:
    UserError: the split is too short for one sequence.
  """
  n = _sample_count(store.validation, config.sequence_length, 'validation')

  def batch(index: int) -> np.ndarray:
    result = np.full((len(rows), config.sequence_length + 1), NO_TOKEN, np.int32)
    samples = [index * config.batch_size + row for row in rows]
    there = [i for i, sample in enumerate(samples) if sample < n]
    samples = [samples[i] for i in there]
    windows = _windows(store.validation, samples, config.sequence_length)
    for i, window in zip(there, windows, strict=True):
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
) -> Iterable[np.ndarray]:
  """Return the windows of samples, each of T + 1 tokens."""
  ranges = [(i * sequence_length, (i + 1) * sequence_length + 1) for i in samples]
  if isinstance(tokens, Tokens):
    return tokens.gather(ranges)
  return (tokens[start:stop] for start, stop in ranges)


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
  parts: int = 1

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
      parts=self.parts,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class OneSource:
  """The open text of a run: one source (`data.source`). `mixture.Mixture` has several.

  Attributes:
    store: its token store.
    parts: the training samples of one of the order: see `samples`.
  """

  store: Store
  config: DataConfig
  seed: int
  parts: int = 1

  def at_stage(self, data: DataConfig) -> 'OneSource':
    """Return the text with batches of the sizes of a stage: see `config.at_stage`."""
    return dataclasses.replace(self, config=data, parts=parts_at_stage(self.config, data))

  @property
  def tokenizer(self) -> Tokenizer:
    """Return the tokenizer of the text."""
    return self.store.tokenizer

  @property
  def chat(self) -> dict[str, Any] | None:
    """Return the template of conversations, as `Store.chat`."""
    return self.store.chat

  @property
  def digest(self) -> str:
    """Return a hash of all that decides the samples, besides the seed and their length."""
    return self.store.digest

  @property
  def examples(self) -> int:
    """Return the number of samples in an epoch."""
    return window_count(self.store.train, self.config.sequence_length)

  @property
  def is_fixed(self) -> bool:
    """Return whether all batches have the same parts of the same text."""
    return True

  @property
  def weights(self) -> dict[str, float]:
    """Return the weight of each part of the validation split in the figures of the whole."""
    return {'': 1.0}

  def train_batches(
    self, rows: Sequence[int], first_step: int, last_step: int | None, position: Position
  ) -> Generator[np.ndarray, None, None]:
    """Return this host's part of the training batches: see `train_batches`."""
    return train_batches(
      self.store, self.config, self.seed, rows, first_step, last_step, position, self.parts
    )

  def validation_parts(
    self, rows: Sequence[int], batches: int = 0
  ) -> dict[str, Iterator[np.ndarray]]:
    """Return the validation batches of each source by its name: see `validation_batches`."""
    return {'': validation_batches(self.store, self.config, rows, batches)}

  def bytes_per_token(self, split: str, name: str = '') -> float:
    """Return the UTF-8 bytes of text per token of a split."""
    del name
    return self.store.bytes_per_token(split)

  def figures(self, step: int, position: Position) -> dict[str, float]:
    """Return figures of the data after a step, by their full names."""
    del step, position
    return {}

  def describe(self) -> str:
    """Return a short description of the training text."""
    return describe_store(self.store)


def parts_at_stage(whole: DataConfig, stage: DataConfig) -> int:
  """Return the number of a stage's samples in one of the order."""
  return whole.sequence_length // stage.sequence_length


def open_source(data: DataConfig, seed: int, tokenizer: Tokenizer | None = None) -> OneSource:
  """Open the token store of a run's only source; build it first if it does not exist.

  Raises:
    UserError: see `store.prepare`; or the text is too short for one sequence.
  """
  made = prepare(data, tokenizer)
  check_store(made, data)
  return OneSource(made, data, seed)


def describe_store(store: Store) -> str:
  """Return a short description of the training text of a store."""
  tokens, bytes_per_token = len(store.train), store.bytes_per_token('train')
  if store.chat:
    answers = f'{store.train_answers:,} of them in answers'
    return f'{tokens:,} tokens, {answers} ({bytes_per_token:.2f} bytes each)'
  return f'{tokens:,} tokens of {bytes_per_token:.2f} bytes'


def check_store(store: Store, data: DataConfig) -> None:
  """Check that both splits of a store have a sample, and that its documents can be told apart.

  Raises:
    UserError: a split is too short for one sequence, or `data.documents` needs the ends of
      documents and conversations have such a token inside.
  """
  _sample_count(store.train, data.sequence_length, 'training')
  _sample_count(store.validation, data.sequence_length, 'validation')
  if data.documents != 'joined' and store.divided:
    raise UserError(
      f'config.data.documents is {data.documents}, and {counted(store.divided, "conversation")} of '
      f"{data.source} have the tokenizer's end of document inside, or the token that begins one; "
      'set it to joined, or part turns by another token in config.data.chat_template'
    )


def read_ahead(
  steps: Sequence[Any], first_step: int, config: DataConfig
) -> Generator[Any, None, None]:
  """Yield `steps[first_step:]`, with `config.prefetch` batches read ahead.

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
