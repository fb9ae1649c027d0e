"""The runs of members (members.py), their rates, and their text."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, GrowConfig
from tokenformer_jax.data import order
from tokenformer_jax.training import sizes

AGES = 3  # of parameters: outside the layers, old in layers, new in layers


@dataclasses.dataclass(frozen=True)
class Rate:
  """The learning rate of a run by its step, and the factors on it.

  Attributes:
    peak: the highest rate.
    warmup: updates from `start` on in which it rises from 0.
    start: the step at which the warm-up begins.
    decay_from: the step from which it falls linearly; 0: never.
    end: the step at which it is zero.
    new: a factor for parameters that the growth at `start` added.
    new_warmup: updates in which their rate rises to that.
    layers: a factor for all parameters in layers.
  """

  peak: float
  warmup: int = 50
  start: int = 0
  decay_from: int = 0
  end: int = 0
  new: float = 1.0
  new_warmup: int = 0
  layers: float = 1.0

  def by_age(self, first: int, last: int) -> np.ndarray:
    """Return the rates of the steps `first` … `last` − 1 for each of the `AGES`, [steps, 3]."""
    steps = np.arange(first, last)
    since = steps - self.start + 1
    rate = self.peak * np.minimum(1, since / max(1, self.warmup))
    if self.decay_from:
      left = (self.end - steps) / (self.end - self.decay_from)
      rate = rate * np.clip(left, 0, 1)
    new = self.new * np.minimum(1, since / (self.new_warmup + 1))
    of_layers = self.layers * rate
    return np.stack([rate, of_layers, of_layers * new], axis=1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Run:
  """Steps of one member.

  Attributes:
    name: unique among all runs.
    shape: the name of its program.
    seed: of the first parameters and the order of the data.
    first: the number of sequences that it has seen at its start, in steps of this run's batch.
    last: the step at which it ends.
    rate: its learning rate.
    decay: of weights, times the rate.
    begin: the run and the step that it continues from; None: from scratch.
    grow: how its model grows at the start; None: it does not.
    edit: the name of a change to the state after growth: a key of `EDITS`.
    keep: steps at which others begin.
  """

  name: str
  shape: str
  seed: int
  first: int
  last: int
  rate: Rate
  decay: float = 0.1
  begin: tuple[str, int] | None = None
  grow: GrowConfig | None = None
  edit: str = ''
  keep: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
  """The text of all runs.

  Attributes:
    tokens: of the training split.
    order: the samples in the order of each seed, [seeds, samples].
    held_out: the validation windows, [rows, T + 1].
    bytes_per_token: of the validation split.
  """

  tokens: np.ndarray
  order: np.ndarray
  held_out: np.ndarray
  bytes_per_token: float

  @classmethod
  def read(cls, path: Path) -> 'Text':
    """Return the text that `write` has written."""
    with np.load(path) as file:
      return cls(file['tokens'], file['order'], file['held_out'], float(file['bytes_per_token']))

  @classmethod
  def of(cls, config: Config, seeds: Iterable[int], samples: int) -> 'Text':
    """Return the text of a run, and the first samples of its order for each seed."""
    task = tasks.make(sizes.fill_in(config))
    task.prepare()
    store, rows = task._data.store, range(config.data.batch_size)
    count = order.window_count(store.train, config.data.sequence_length)
    numbers = [[order.sample_index(s, i, count) for i in range(samples)] for s in seeds]
    tokens = np.asarray(store.train[0 : len(store.train)])
    held_out = np.concatenate(list(task.validation_batches(rows)))
    most = np.iinfo(np.uint8).max
    dtype = np.uint8 if tokens.max() <= most else np.int32
    return cls(
      tokens.astype(dtype),
      np.array(numbers, np.int32),
      held_out.astype(np.int32),
      task._data.bytes_per_token('validation'),
    )

  def write(self, path: Path) -> None:
    """Write the text to a file."""
    np.savez_compressed(path, **vars(self))
