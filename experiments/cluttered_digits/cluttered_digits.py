"""Compose a harder set of images from the digits: one whole digit among pieces of others."""

import io
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from tokenformer_jax.config import ImagesConfig
from tokenformer_jax.data.images import Split, open_images

SIZE, PIECES, PIECE = 32, 4, 6  # pixels of a side, pieces of other digits, pixels of their sides
_DIGIT = (20, 29)  # the least and the most pixels of the digit's side
COUNTS = {'train': 20_000, 'test': 2000}


class Cluttered(tfds.core.GeneratorBasedBuilder):
  """Grey images of 32 × 32 pixels, labelled by their one whole digit.

  The digit has a random size, place and brightness. Pieces of digits of other classes are laid over
  the image. Training images use the training split of the digits only, and test images the test
  split.
  """

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    features = {
      'image': tfds.features.Image(shape=(SIZE, SIZE, 1), encoding_format='png'),
      'label': tfds.features.ClassLabel(num_classes=10),
    }
    return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
    digits = open_images(ImagesConfig(source='digits'))
    parts = {'train': digits.train, 'test': digits.validation}
    return {name: self._generate_examples(part, COUNTS[name]) for name, part in parts.items()}

  def _generate_examples(self, digits: Split, count: int) -> Iterator[tuple]:
    loaded = [digits.read(number) for number in range(len(digits))]
    images = [Image.open(io.BytesIO(encoded)) for encoded, _ in loaded]
    labels = np.array([label for _, label in loaded])
    rng = np.random.default_rng(count)
    for i in range(count):
      chosen = int(rng.integers(len(images)))
      others = np.flatnonzero(labels != labels[chosen])
      pixels = compose(images[chosen], [images[k] for k in rng.choice(others, PIECES)], rng)
      file = io.BytesIO()
      Image.fromarray(pixels).save(file, 'png')
      file.seek(0)
      yield i, {'image': file, 'label': int(labels[chosen])}


def compose(digit: Image.Image, others: list[Image.Image], rng: np.random.Generator) -> np.ndarray:
  """Return an image uint8 [32, 32] of one digit and a piece of each of the others."""
  canvas = np.zeros((SIZE, SIZE), np.uint8)

  def lay(pixels: np.ndarray) -> None:
    size = len(pixels)
    top, left = rng.integers(SIZE - size + 1, size=2)
    part = canvas[top : top + size, left : left + size]
    np.maximum(part, (pixels * rng.uniform(0.6, 1)).astype(np.uint8), out=part)

  for image in others:
    side = int(rng.integers(*_DIGIT))
    whole = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
    top, left = rng.integers(side - PIECE + 1, size=2)
    lay(whole[top : top + PIECE, left : left + PIECE])
  side = int(rng.integers(*_DIGIT))
  lay(np.asarray(digit.resize((side, side), Image.Resampling.BICUBIC)))
  return canvas
