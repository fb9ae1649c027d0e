"""Sources of images for classification: built-in digits, TFDS datasets, and folders.

A split gives encoded images and labels by number, in any order and from any process; nothing is
decoded here (see `augment.py`), and no TensorFlow is needed.
"""

import abc
import contextlib
import dataclasses
import functools
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer_jax import paths
from tokenformer_jax.cli import say
from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import store
from tokenformer_jax.data.records import cannot_be_opened
from tokenformer_jax.errors import UserError

_SUFFIXES = ('.jpg', '.jpeg', '.png')
_TRAIN_FOLDERS, _VALIDATION_FOLDERS = ('train',), ('val', 'validation', 'test')
_VALIDATION_SPLITS = ('validation', 'test')


class Split(abc.ABC):
  """Images by number; can be sent to another process."""

  @abc.abstractmethod
  def __len__(self) -> int: ...

  @abc.abstractmethod
  def read(self, number: int) -> tuple[bytes, int]:
    """An encoded image and its label. What goes wrong in reading is raised as it comes."""

  @abc.abstractmethod
  def name(self, number: int) -> str:
    """What the user knows an image as."""

  def chosen(self, validation: bool, fraction: float) -> 'Split':
    """The part of the images, chosen by a hash of the name, that is validation, or the rest."""

    def is_validation(number: int) -> bool:
      digest = hashlib.blake2b(self.name(number).encode(), digest_size=8).digest()
      return int.from_bytes(digest, 'little') < fraction * 2**64

    numbers = [i for i in range(len(self)) if is_validation(i) == validation]
    return Part(self, np.array(numbers, np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class Files(Split):
  """Image files with a label each; names are below `root`."""

  root: str
  names: tuple[str, ...]
  labels: np.ndarray

  def __len__(self) -> int:
    return len(self.names)

  def read(self, number: int) -> tuple[bytes, int]:
    return Path(self.name(number)).read_bytes(), int(self.labels[number])

  def name(self, number: int) -> str:
    return os.path.join(self.root, self.names[number])


@dataclasses.dataclass(frozen=True, eq=False)
class Records(Split):
  """The examples of a split of a TFDS dataset."""

  of: str
  examples: Any
  image: str  # the names of the features
  label: str

  def __len__(self) -> int:
    return len(self.examples)

  def read(self, number: int) -> tuple[bytes, int]:
    example = self.examples[number]
    return example[self.image], int(example[self.label])

  def name(self, number: int) -> str:
    return f'{self.of}, example {number}'


@dataclasses.dataclass(frozen=True, eq=False)
class Part(Split):
  """Some images of a split."""

  whole: Split
  numbers: np.ndarray

  def __len__(self) -> int:
    return len(self.numbers)

  def read(self, number: int) -> tuple[bytes, int]:
    return self.whole.read(int(self.numbers[number]))

  def name(self, number: int) -> str:
    return self.whole.name(int(self.numbers[number]))


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
  """What a source has to give.

  Attributes:
    classes: their names, in the order of the labels.
    channels: 1 if all images are grey, else 3.
    train, validation: its images.
  """

  classes: tuple[str, ...]
  channels: int
  train: Split
  validation: Split


@functools.cache
def open_images(data: DataConfig) -> ImageSet:
  """The images that `data.source` names: `digits`, `tfds:NAME` or `folder:DIR`.

  Raises:
    UserError: the source is of another form, cannot be read, or a split of it has no images.
  """
  kind, _, name = data.source.partition(':')
  if data.source == 'digits':
    found = _records(_digits(data), 'digits', data)
  elif kind == 'tfds' and name:
    found = _tfds(name, data)
  elif kind == 'folder' and name:
    found = _folder(paths.local(name).expanduser(), data)
  else:
    raise UserError(
      f'config.data.source is {data.source!r}; for images it must be digits, tfds:NAME or '
      'folder:DIR'
    )
  for split in ('train', 'validation'):
    if not len(getattr(found, split)):
      raise UserError(
        f'the {split} split of config.data.source={data.source} has no images; give more of them, '
        'or change config.data.validation_fraction'
      )
  return found


def _digits(data: DataConfig) -> Any:
  """The builder of the built-in digits, which are made if they are not there yet."""
  import tensorflow_datasets as tfds  # noqa: PLC0415 (slow, and only needed here)

  from tokenformer_jax.data.digits import digits  # noqa: PLC0415

  tfds.disable_progress_bar()
  folder = store.cache_folder(data) / 'tfds'
  try:
    folder.mkdir(parents=True, exist_ok=True)
    builder = digits.Digits(data_dir=folder, file_format='array_record')
    with store.lock(folder / 'digits'), contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()
  except OSError as error:
    raise UserError(
      f'the digits cannot be written to {folder} ({error.strerror}); set config.data.cache_dir to '
      'a folder that can be'
    ) from error
  return builder


def _tfds(name: str, data: DataConfig) -> ImageSet:
  import tensorflow_datasets as tfds  # noqa: PLC0415 (slow, and only needed here)

  try:
    return _records(tfds.builder(name, file_format='array_record'), f'tfds:{name}', data)
  except UserError:
    raise
  except Exception as error:  # TFDS raises many kinds.
    raise cannot_be_opened(name, error) from error


def _records(builder: Any, name: str, data: DataConfig) -> ImageSet:
  import tensorflow_datasets as tfds  # noqa: PLC0415

  features, splits = builder.info.features, builder.info.splits

  def feature(cls: type) -> str:
    named = [key for key, value in features.items() if type(value) is cls]
    if len(named) != 1:
      raise UserError(
        f'config.data.source is {name}, which has {len(named)} features of the kind '
        f'{cls.__name__}; an image classification set has one'
      )
    return named[0]

  image, label = feature(tfds.features.Image), feature(tfds.features.ClassLabel)

  def records(split: str) -> Records:
    examples = builder.as_data_source(split, decoders={image: tfds.decode.SkipDecoding()})
    return Records(f'{name}, {split}', examples, image, label)

  held_out = [split for split in _VALIDATION_SPLITS if split in splits]
  train = records('train')
  return ImageSet(
    classes=tuple(features[label].names),
    channels=1 if features[image].shape[-1] == 1 else 3,
    **_splits(train, records(held_out[0]) if held_out else None, data),
  )


def _splits(train: Split, validation: Split | None, data: DataConfig) -> dict[str, Split]:
  if validation is not None:
    return {'train': train, 'validation': validation}
  fraction = data.validation_fraction
  return {'train': train.chosen(False, fraction), 'validation': train.chosen(True, fraction)}


def _folder(root: Path, data: DataConfig) -> ImageSet:
  """DIR/train/CLASS/… and DIR/val/CLASS/…, or DIR/CLASS/… of which a part is held out."""
  if not root.is_dir():
    raise UserError(f'config.data.source is folder:{root}, which is not a folder')
  train_root = _first_folder(root, _TRAIN_FOLDERS)
  validation_root = _first_folder(root, _VALIDATION_FOLDERS)
  if (train_root is None) != (validation_root is None):
    raise UserError(
      f'config.data.source is folder:{root}, which has a folder {train_root or validation_root} '
      'and no counterpart; it must have train/ and val/, or the folders of the classes'
    )
  classes, train = _files(train_root or root, data)
  validation = None
  if validation_root is not None:
    theirs, validation = _files(validation_root, data)
    if unknown := sorted(set(theirs) - set(classes)):
      raise UserError(
        f'{validation_root} has the classes {", ".join(unknown)}, which {train_root} has not'
      )
    # The labels of the validation split go by the classes of the training split.
    order = np.array([classes.index(name) for name in theirs], np.int32)
    validation = dataclasses.replace(validation, labels=order[validation.labels])
  return ImageSet(tuple(classes), 3, **_splits(train, validation, data))


def _first_folder(root: Path, names: tuple[str, ...]) -> Path | None:
  return next((root / name for name in names if (root / name).is_dir()), None)


def _files(root: Path, data: DataConfig) -> tuple[list[str], Files]:
  """The classes below a folder, those without images left out, and the images."""
  classes, names, labels, others, empty = [], [], [], 0, []
  for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    everything = sorted(str(path.relative_to(root)) for path in folder.rglob('*') if path.is_file())
    found = [name for name in everything if name.lower().endswith(_SUFFIXES)]
    others += len(everything) - len(found)
    if not found:
      empty.append(folder.name)
      continue
    names += found
    labels += [len(classes)] * len(found)
    classes.append(folder.name)
  if empty:
    sentence = f'{len(empty)} class folders of {root} have no images: {", ".join(empty)}'
    if data.on_bad_image == 'fail':
      raise UserError(f'{sentence}; take them away, or set config.data.on_bad_image=skip')
    say(f'{sentence}; they are no classes')
  if others:
    say(f'{others} files in {root} do not end in {", ".join(_SUFFIXES)}; they are left out')
  return classes, Files(str(root), tuple(names), np.array(labels, np.int32))
