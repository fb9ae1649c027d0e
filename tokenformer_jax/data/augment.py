"""Decode and augment images: from an encoded image to the pixels that a model sees.

Pillow decodes, crops and resizes. The caller seeds the random generator, so that every host gets
the same pixels for the same image and epoch.
"""

import dataclasses
import io
import math

import numpy as np
from PIL import Image

from tokenformer_jax.config import ImagesConfig
from tokenformer_jax.data import rand_augment

_RATIO = 4 / 3  # largest aspect ratio of a random crop; the smallest is its inverse
_TRIES = 10

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclasses.dataclass(frozen=True)
class Views:
  """The views of images, uint8 [S, S, C], that a data config describes."""

  data: ImagesConfig
  channels: int

  def train(self, encoded: bytes, rng: np.random.Generator) -> np.ndarray:
    """Return a random view of an image."""
    data = self.data
    image = Image.open(io.BytesIO(encoded))
    box = _centre(image.size, data.eval_crop)
    if data.crop_area < 1:
      box = random_crop(image.size, data.crop_area, rng)
    image = self._resized(image, box)
    if data.flip and rng.random() < 0.5:
      image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if data.rand_augment:
      image = rand_augment.apply(image, data.rand_augment, rng)
    return self._pixels(image)

  def evaluation(self, encoded: bytes) -> np.ndarray:
    """Return the centre crop of an image."""
    image = Image.open(io.BytesIO(encoded))
    return self._pixels(self._resized(image, _centre(image.size, self.data.eval_crop)))

  def _resized(self, image: Image.Image, box: Box) -> Image.Image:
    """Return a box of an image in the size and colour mode of the model."""
    mode, size = 'L' if self.channels == 1 else 'RGB', self.data.image_size
    width, height = image.size
    shrink = min(box[2] - box[0], box[3] - box[1]) / size
    if shrink >= 2:  # Pillow can decode a JPEG at 1/2, 1/4 or 1/8 of its size, which saves time.
      image.draft(mode, (math.ceil(width / shrink), math.ceil(height / shrink)))
    x, y = image.size[0] / width, image.size[1] / height
    box = (box[0] * x, box[1] * y, min(box[2] * x, image.size[0]), min(box[3] * y, image.size[1]))
    if image.mode.startswith('I'):  # 16 bits: `convert` would make all values over 255 white.
      image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image if image.mode == mode else image.convert(mode)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)

  def _pixels(self, image: Image.Image) -> np.ndarray:
    size = self.data.image_size
    return np.array(image, np.uint8).reshape(size, size, self.channels)


def _centre(size: tuple[int, int], share: float) -> Box:
  """Return the centred square whose side is `share` of the shorter side."""
  width, height = size
  side = share * min(width, height)
  left, top = (width - side) / 2, (height - side) / 2
  return left, top, left + side, top + side


def random_crop(size: tuple[int, int], least_area: float, rng: np.random.Generator) -> Box:
  """Draw a box of at least a given share of an image (Szegedy et al. 2014, arXiv 1409.4842).

  The aspect ratio is drawn between 3:4 and 4:3. If none of ten draws fits into the image, the
  result is the centred square.
  """
  width, height = size
  for _ in range(_TRIES):
    area = width * height * rng.uniform(least_area, 1)
    ratio = math.exp(rng.uniform(-math.log(_RATIO), math.log(_RATIO)))
    wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
    if wide <= width and high <= height:
      left, top = rng.uniform(0, width - wide), rng.uniform(0, height - high)
      return left, top, left + wide, top + high
  return _centre(size, 1)
