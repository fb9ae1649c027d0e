"""Open sources of images for classification: built-in digits, TFDS datasets, and folders.

A split returns encoded images and labels by number, in any order and from any process. `augment.py`
decodes the images. TensorFlow is not needed.
"""

import dataclasses
import errno
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenformer_jax.config import ImagesConfig
from tokenformer_jax.data import digits, tfds_sets
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import is_transient, retried

_SUFFIXES = ('.jpg', '.jpeg', '.png')
_VALIDATION_SPLITS = ('validation', 'test')
# Names of a folder of a split in any case, as in `datasets`; a filler may stand beside
# them, as in `training_set`, `Test Images`, `seg_train`.
_SPLITS = {
  **dict.fromkeys(('train', 'training'), 'train'),
  **dict.fromkeys(('val', 'valid', 'validation', 'dev'), 'validation'),
  **dict.fromkeys(('test', 'testing', 'eval', 'evaluation'), 'test'),
}
# These are names of classes as well, where no folder has the name of a counterpart.
_CLASS_NAMES = ('valid', 'dev', 'eval', 'evaluation')
_FILLERS = ('set', 'data', 'dataset', 'images', 'imgs', 'split', 'folder', 'seg')
# Folders that systems and tools write. Names that begin with a dot are hidden as well.
_SYSTEM_FOLDERS = ('__MACOSX', '@eaDir', '$RECYCLE.BIN', 'lost+found')
# Read errors that concern one file, not the storage that holds it.
_FILE_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


class KnownSet(NamedTuple):
  """Sizes of an image set that are known without opening the set."""

  classes: int
  channels: int
  examples: int  # of the training split


KNOWN_SETS = {'tfds:imagenet2012': KnownSet(classes=1000, channels=3, examples=1_281_167)}


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
  """Image files with a label each. The names are relative to `root`."""

  root: str
  names: tuple[str, ...]
  labels: np.ndarray

  def __len__(self) -> int:
    return len(self.names)

  def read(self, number: int) -> tuple[bytes, int]:
    name = self.name(number)
    try:
      return Path(name).read_bytes(), int(self.labels[number])
    except OSError as error:
      bad_file = isinstance(error, _FILE_ERRORS) and os.path.isdir(os.path.dirname(name))
      if bad_file or is_transient(error):
        raise
      # The storage fails or is not mounted. Report EIO, because the image itself may be good.
      raise OSError(errno.EIO, error.strerror or str(error), name) from error

  def name(self, number: int) -> str:
    return os.path.join(self.root, self.names[number])

  def key(self, number: int) -> str:
    return self.names[number]


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
  """Examples with an encoded image and a label, such as those of a split of a TFDS dataset."""

  source: str  # the source as the config spells it, and the split
  dataset: str  # the dataset without configuration and version, and the split
  examples: Any
  image: str  # the name of the image feature
  label: str  # the name of the label feature

  def __len__(self) -> int:
    return len(self.examples)

  def read(self, number: int) -> tuple[bytes, int]:
    example = tfds_sets.read_example(self.examples, number)
    return example[self.image], int(example[self.label])

  def name(self, number: int) -> str:
    return f'{self.source}, example {number}'

  def key(self, number: int) -> str:
    return f'{self.dataset}, example {number}'


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
  """Some of the images of a source, by their numbers there. It can be pickled."""

  images: Files | Records
  numbers: range | np.ndarray

  def __len__(self) -> int:
    return len(self.numbers)

  def read(self, number: int) -> tuple[bytes, int]:
    """Return an encoded image and its label. Read errors pass through unchanged."""
    return self.images.read(int(self.numbers[number]))

  def name(self, number: int) -> str:
    """Return the name of an image for messages to the user."""
    return self.images.name(int(self.numbers[number]))


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
  """The classes and splits of an image source."""

  classes: tuple[str, ...]  # names, in the order of the labels
  channels: int  # 1 if all images are grey, else 3
  train: Split
  validation: Split


@functools.cache
def open_images(data: ImagesConfig) -> ImageSet:
  """Open the images that `data.source` names: `digits`, `tfds:NAME` or `folder:DIR`."""
  form, _, name = data.source.partition(':')
  if data.source != 'digits' and not (form in SOURCES and name and form != 'digits'):
    raise UserError(
      f'config.data.source is {data.source!r}; for images it must be digits, tfds:NAME or '
      'folder:DIR'
    )
  images = SOURCES[form](name, data)
  for split in ('train', 'validation'):
    if not len(getattr(images, split)):
      raise UserError(
        f'the {split} split of config.data.source={data.source} has no images; add images or '
        'change config.data.validation_fraction'
      )
  return images


def _digits(name: str, data: ImagesConfig) -> ImageSet:
  del name
  train, test = (
    Records(f'digits, {split}', f'digits, {split}', examples, 'image', 'label')
    for split, examples in digits.load().items()
  )
  return ImageSet(tuple('0123456789'), 1, **_splits(train, test, data))


def _tfds(name: str, data: ImagesConfig) -> ImageSet:
  import tensorflow_datasets as tfds  # noqa: PLC0415 (slow, and only needed here)

  with tfds_sets.opening('config.data.source', name):
    builder = retried(
      lambda: tfds.builder(name, file_format='array_record'), f'opening tfds:{name}'
    )
    return _records(builder, f'tfds:{name}', f'tfds:{builder.name}', data)


def _records(builder: Any, name: str, dataset: str, data: ImagesConfig) -> ImageSet:
  import tensorflow_datasets as tfds  # noqa: PLC0415

  features, splits = builder.info.features, builder.info.splits

  def feature(cls: type) -> str:
    named = [key for key, value in features.items() if type(value) is cls]
    if len(named) != 1:
      raise UserError(
        f'config.data.source is {name}, which has {counted(len(named), "feature")} of the type '
        f'{cls.__name__}; choose a dataset for image classification, which has exactly one'
      )
    return named[0]

  image, label = feature(tfds.features.Image), feature(tfds.features.ClassLabel)

  def open_split(split: str) -> Records:
    examples = builder.as_data_source(split, decoders={image: tfds.decode.SkipDecoding()})
    return Records(f'{name}, {split}', f'{dataset}, {split}', examples, image, label)

  held_out = [split for split in _VALIDATION_SPLITS if split in splits]
  train = open_split('train')
  return ImageSet(
    classes=tuple(features[label].names),
    channels=1 if features[image].shape[-1] == 1 else 3,
    **_splits(train, open_split(held_out[0]) if held_out else None, data),
  )


def _splits(
  train: Files | Records, validation: Files | Records | None, data: ImagesConfig
) -> dict[str, Split]:
  """Return the splits; without images for validation, a hash of the keys holds some out.

  A key does not depend on how the source is spelled or where it is mounted.
  """
  if validation is not None:
    return {
      'train': Split(train, range(len(train))),
      'validation': Split(validation, range(len(validation))),
    }
  keys = (os.fsencode(train.key(number)) for number in range(len(train)))
  hashes = [hashlib.blake2b(key, digest_size=8).digest() for key in keys]
  bound = data.validation_fraction * 2**64
  held_out = np.array([int.from_bytes(one, 'little') < bound for one in hashes], bool)
  return {
    'train': Split(train, np.flatnonzero(~held_out)),
    'validation': Split(train, np.flatnonzero(held_out)),
  }


def _open_folder(name: str, data: ImagesConfig) -> ImageSet:
  root = paths.local(name).expanduser()
  try:
    return retried(lambda: _folder(root, data), f'listing {root}')
  except OSError as error:
    raise UserError(
      f'config.data.source is folder:{root}, and {error.filename or root} cannot be listed '
      f'({paths.reason(error)})'
    ) from error


def _folder(root: Path, data: ImagesConfig) -> ImageSet:
  """Read DIR/train/CLASS/… and DIR/val/CLASS/…, or DIR/CLASS/… with some images held out."""
  if not root.is_dir():
    raise UserError(f'config.data.source is folder:{root}, which is not a folder')
  folders = _split_folders(root)
  if not folders:
    classes, train = _files(root, data)
    return ImageSet(tuple(classes), 3, **_splits(train, None, data))
  train_root, validation_root = folders
  (classes, train), (names, validation) = (_files(one, data) for one in folders)
  if unknown := sorted(set(names) - set(classes)):
    raise UserError(
      f'{validation_root} has {counted(len(unknown), "class")} that {train_root} does not have: '
      f'{", ".join(unknown)}; add training images of each class or remove its validation folder'
    )
  # Renumber the validation labels by the classes of the training split.
  order = np.array([classes.index(name) for name in names], np.int32)
  validation = dataclasses.replace(validation, labels=order[validation.labels])
  return ImageSet(tuple(classes), 3, **_splits(train, validation, data))


def _split_folders(root: Path) -> tuple[Path, ...]:
  """Return the folders of training and of validation, or of a test where there is no validation.

  There are none if no folder has the name of a split. A message names the folders left out.
  """
  folders: dict[str, list[Path]] = {'train': [], 'validation': [], 'test': [], '': []}
  for folder in _folders_in(root):
    words = [word for word in re.split(r'[ ._-]+', folder.name.lower()) if word not in _FILLERS]
    folders[_SPLITS.get(' '.join(words), '')].append(folder)
  train, held_out = folders['train'], folders['validation'] or folders['test']
  others = folders.pop('')
  names = [folder.name for split in folders.values() for folder in split]
  if not train and all(name.lower() in _CLASS_NAMES for name in names):
    return ()
  if len(train) != 1 or len(held_out) != 1:
    beside = f' beside {", ".join(one.name for one in others[:5])}' if others else ''
    raise UserError(
      f'config.data.source is folder:{root}, which has {" and ".join(names)}{beside}: a split '
      'without its counterpart, or twice; it must have train/ and val/ or test/, with folders of '
      f'classes in each, or folders of classes alone; name folder:{root}/{names[0]} to hold out '
      'some of its images, or rename a class of that name'
    )
  unread = [*(folders['test'] if folders['validation'] else []), *others]
  if unread:
    say(
      f'{root}: trains on {train[0].name}, validates on {held_out[0].name}, and leaves out '
      f'{", ".join(one.name for one in unread)}'
    )
  return train[0], held_out[0]


def _folders_in(root: Path) -> list[Path]:
  return sorted(path for path in root.iterdir() if path.is_dir() and not _is_hidden(path.name))


def _files(root: Path, data: ImagesConfig) -> tuple[list[str], Files]:
  """Return the classes that have images below a folder, and the images."""
  classes, names, labels, others, empty = [], [], [], 0, []
  for folder in _folders_in(root):
    everything = _names_below(folder, root)
    images = [name for name in everything if name.lower().endswith(_SUFFIXES)]
    others += len(everything) - len(images)
    if not images:
      empty.append(folder.name)
      continue
    names += images
    labels += [len(classes)] * len(images)
    classes.append(folder.name)
  loose = [one.name for one in root.iterdir() if one.suffix.lower() in _SUFFIXES and one.is_file()]
  loose = [name for name in loose if not _is_hidden(name)]
  if loose and not classes:
    raise UserError(
      f'{root} has {counted(len(loose), "image")} in no folder of a class, such as {min(loose)}; '
      'put the images of each class into a folder of its name'
    )
  others += len(loose)
  if empty:
    sentence = f'no images in {counted(len(empty), "class folder")} of {root}: {", ".join(empty)}'
    if data.on_bad_image == 'fail':
      raise UserError(
        f'{sentence}; add images, remove the folder, or set config.data.on_bad_image=skip'
      )
    say(f'{sentence}; they are not counted as classes')
  if others:
    say(
      f'{root}: left out {counted(others, "file")} without an ending of {", ".join(_SUFFIXES)}, or '
      'in no folder of a class'
    )
  return classes, Files(str(root), tuple(names), np.array(labels, np.int32))


def _names_below(folder: Path, root: Path) -> list[str]:
  """Return the sorted files below a class folder, relative to `root`, but hidden ones.

  Links are followed. A folder that several links reach counts once, and a link to a folder above
  the class is left out. A link to a missing file stays in: reading it reports a bad image.
  """

  def fail(error: OSError) -> None:
    raise error

  above = Path(os.path.realpath(root))
  names, seen = [], {str(above), *map(str, above.parents)}
  for here, folders, files in os.walk(folder, onerror=fail, followlinks=True):
    real, below = os.path.realpath(here), os.path.relpath(here, root)
    if real in seen:
      folders.clear()  # os.walk does not enter what is not in this list.
      continue
    seen.add(real)
    folders[:] = sorted(name for name in folders if not _is_hidden(name))
    names += [os.path.join(below, name) for name in files if not _is_hidden(name)]
  return sorted(names)


def _is_hidden(name: str) -> bool:
  return name.startswith('.') or name in _SYSTEM_FOLDERS


# The function that opens a form of source, by the word before the colon of `data.source`.
SOURCES = {'digits': _digits, 'tfds': _tfds, 'folder': _open_folder}
