"""Make batches of images: pure functions of the config, the step and the start of the run.

Training images have the endless order of `order.py`, and (seed, epoch, image) seeds the random view
of an image. So a batch is the same on any number of hosts, and resuming at any step costs nothing.
An unusable image gets the label `ABSENT`, and `bad` holds its number, which the host reports.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tokenformer_jax.data import order
from tokenformer_jax.data.augment import Views
from tokenformer_jax.data.images import Split
from tokenformer_jax.errors import TransientError
from tokenformer_jax.storage.retry import retried

ABSENT = -1  # as a label: the row does not count; in `bad`: the row's image is good

Batch = dict[str, np.ndarray]  # images uint8 [R, S, S, C], labels int32 [R], bad int64 [R]


class BadImageError(Exception):
  """An image that cannot be used. The message gives the reason."""


def load(
  split: Split, number: int, views: Views, classes: int, rng: np.random.Generator | None
) -> tuple[np.ndarray, int]:
  """Return a view uint8 [S, S, C] of an image, random if `rng` is given, and the image's label.

  Raises:
    BadImageError: the image does not exist, cannot be decoded, or has a label out of range.
    TransientError: the storage did not return the image for minutes; the image may be good.
  """
  try:
    encoded, label = retried(lambda: split.read(number), f'reading {split.name(number)}')
    pixels = views.evaluation(encoded) if rng is None else views.train(encoded, rng)
  except TransientError:
    raise
  except Exception as error:  # Pillow and array_record raise exceptions of many types.
    raise BadImageError(f'{type(error).__name__}: {error}') from error
  if not 0 <= label < classes:
    raise BadImageError(f'its label is {label}, and there are {classes} classes')
  return pixels, label


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Batches:
  """This host's rows of batches, a source for `order.read_ahead`.

  Attributes:
    classes: every valid label is smaller.
    rows: the numbers of the rows in the global batch that this host needs.
    numbers: the batches; those of training are steps.
    seed: of the order and the views of training; None, for validation: each image once, in order.
  """

  split: Split
  views: Views
  classes: int
  rows: Sequence[int]
  numbers: Sequence[int]
  seed: int | None = None
  position: order.Position = order.BEGINNING
  # The error after which reads stop: batches read ahead would otherwise retry for minutes again.
  given_up: list[TransientError] = dataclasses.field(default_factory=list)

  def __len__(self) -> int:
    return len(self.numbers)

  def __getitem__(self, index: int) -> Batch:
    if self.given_up:
      raise self.given_up[0]
    size = self.views.data.image_size
    result = {
      'images': np.zeros((len(self.rows), size, size, self.views.channels), np.uint8),
      'labels': np.full(len(self.rows), ABSENT, np.int32),
      'bad': np.full(len(self.rows), ABSENT, np.int64),
    }
    n, rng = len(self.split), None
    first = self.position.batch_start(self.numbers[int(index)], self.views.data.batch_size)
    for i, row in enumerate(self.rows):
      number = position = first + int(row)
      if self.seed is not None:
        number = order.sample_index(self.seed, position, n)
        rng = np.random.default_rng((self.seed, position // n, number))
      elif position >= n:
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
