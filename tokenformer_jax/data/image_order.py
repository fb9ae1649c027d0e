"""Batches of images: pure functions of the config, the step, and where the run begins.

Positions of the endless order of training images are as in `order.py`; what is random about an
image is seeded by (seed, epoch, image). So a batch is the same on any number of hosts, and resuming
at any step costs nothing. An image that cannot be used has the label `NOTHING`, and its number
stands in `bad` for the host to tell.
"""

import abc
import dataclasses
import math
from collections.abc import Generator, Sequence

import numpy as np

from tokenformer_jax.data import order
from tokenformer_jax.data.augment import Views
from tokenformer_jax.data.images import Split
from tokenformer_jax.errors import TransientError
from tokenformer_jax.retry import retried

NOTHING = -1  # the label of a row that does not count, and in `bad` of one that is as it should be

Batch = dict[str, np.ndarray]  # images uint8 [R, S, S, C], labels int32 [R], bad int64 [R]


class BadImageError(Exception):
  """An image that cannot be used; the message says why."""


def load(
  split: Split, number: int, views: Views, classes: int, rng: np.random.Generator | None
) -> tuple[np.ndarray, int]:
  """Return a view uint8 [S, S, C] of an image, random if there is a generator, and its label.

  Raises:
    BadImageError: it is not there, cannot be decoded, or its label is out of range.
    TransientError: the storage did not give it for minutes; the image may well be good.
  """
  try:
    encoded, label = retried(lambda: split.read(number), f'reading {split.name(number)}')
    pixels = views.evaluation(encoded) if rng is None else views.train(encoded, rng)
  except TransientError:
    raise
  except Exception as error:  # Pillow and array_record raise many kinds.
    raise BadImageError(f'{type(error).__name__}: {error}') from error
  if not 0 <= label < classes:
    raise BadImageError(f'its label is {label}, and there are {classes} classes')
  return pixels, label


@dataclasses.dataclass(frozen=True, eq=False)
class Steps(abc.ABC):
  """Batches by number, as the random-access source that Grain reads."""

  split: Split
  views: Views
  classes: int
  rows: tuple[int, ...]
  batch_size: int
  batches: int
  # Why the storage was given up: batches read ahead would otherwise try it for minutes again.
  given_up: list[TransientError] = dataclasses.field(default_factory=list, kw_only=True)

  def __len__(self) -> int:
    return self.batches

  def __getitem__(self, batch: int) -> Batch:
    if self.given_up:
      raise self.given_up[0]
    size = self.views.data.image_size
    result = {
      'images': np.zeros((len(self.rows), size, size, self.views.channels), np.uint8),
      'labels': np.full(len(self.rows), NOTHING, np.int32),
      'bad': np.full(len(self.rows), NOTHING, np.int64),
    }
    for i, row in enumerate(self.rows):
      number, rng = self._image(int(batch), int(row))
      if number is None:
        continue
      try:
        result['images'][i], result['labels'][i] = load(
          self.split, number, self.views, self.classes, rng
        )
      except BadImageError:
        result['bad'][i] = number
      except TransientError as error:
        self.given_up.append(error)
        raise
    return result

  @abc.abstractmethod
  def _image(self, batch: int, row: int) -> tuple[int | None, np.random.Generator | None]:
    """The number of an image, None where there is none, and what its view is drawn with."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrainSteps(Steps):
  """The batch of every step of training."""

  seed: int
  position: order.Position = order.BEGINNING

  def _image(self, batch: int, row: int) -> tuple[int, np.random.Generator]:
    position, n = self.position.of_step(batch, self.batch_size) + row, len(self.split)
    number = order.sample_index(self.seed, position, n)
    return number, np.random.default_rng((self.seed, position // n, number))


@dataclasses.dataclass(frozen=True, eq=False)
class ValidationSteps(Steps):
  """Every image once, in order; `chosen` are the batches to take of all of them."""

  chosen: tuple[int, ...]

  def _image(self, batch: int, row: int) -> tuple[int | None, None]:
    number = self.chosen[batch] * self.batch_size + row
    return (number if number < len(self.split) else None), None


def train_batches(
  split: Split,
  views: Views,
  classes: int,
  seed: int,
  rows: Sequence[int],
  first_step: int,
  last_step: int,
  position: order.Position = order.BEGINNING,
) -> Generator[Batch, None, None]:
  """This host's part of the training batches of `first_step` … `last_step` − 1, read ahead.

  Args:
    split: the training images.
    views: how they are changed, with the sizes of batches.
    classes: labels are below it.
    seed: of the order and the views.
    rows: numbers of the rows in the global batch that this host needs.
    first_step: the step of the first batch.
    last_step: the step before which to end.
    position: where the run begins in the order.
  """
  size = views.data.batch_size
  steps = TrainSteps(split, views, classes, tuple(rows), size, last_step, seed, position)
  return order.read_ahead(steps, first_step, views.data)


def validation_batches(
  split: Split, views: Views, classes: int, rows: Sequence[int], batches: int = 0
) -> Generator[Batch, None, None]:
  """This host's part of the validation batches: every image once, or `batches` spread over them."""
  size = views.data.batch_size
  total = math.ceil(len(split) / size)
  count = min(batches, total) if batches else total
  chosen = tuple(i * total // count for i in range(count))
  steps = ValidationSteps(split, views, classes, tuple(rows), size, count, chosen)
  return order.read_ahead(steps, 0, views.data)
