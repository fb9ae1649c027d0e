"""From an encoded image to the pixels that a model sees, in training and in evaluation.

Pillow decodes, crops and resizes. Randomness comes from a generator of numpy's that the caller
seeds, so that the same image of the same epoch is the same on every host.
"""

import dataclasses
import io
import math

import numpy as np
from PIL import Image, ImageEnhance

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import rand_augment

_RATIO = 4 / 3  # of the sides of a random crop, or its inverse
_TRIES = 10
_ERASED_AREA, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 1 / 0.3)

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclasses.dataclass(frozen=True)
class Views:
  """The views of images that a config asks for: uint8 [S, S, C]."""

  data: DataConfig
  channels: int

  def train(self, encoded: bytes, rng: np.random.Generator) -> np.ndarray:
    """A random view."""
    data = self.data
    image = Image.open(io.BytesIO(encoded))
    box = _centre(image.size, data.eval_crop)
    if data.crop_area < 1:
      box = random_crop(image.size, data.crop_area, rng)
    image = self._resized(image, box)
    if data.flip and rng.random() < 0.5:
      image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if data.rand_augment:
      image = rand_augment.apply(image, data.rand_augment, data.rand_augment_std, rng)
    if data.color_jitter:
      image = jitter(image, data.color_jitter, rng)
    pixels_SxSxC = self._pixels(image)
    if data.erase and rng.random() < data.erase:
      erase(pixels_SxSxC, rng)
    return pixels_SxSxC

  def evaluation(self, encoded: bytes) -> np.ndarray:
    """The middle of the image."""
    image = Image.open(io.BytesIO(encoded))
    return self._pixels(self._resized(image, _centre(image.size, self.data.eval_crop)))

  def _resized(self, image: Image.Image, box: Box) -> Image.Image:
    """A part of the image at the size and in the colours of the model."""
    mode, size = 'L' if self.channels == 1 else 'RGB', self.data.image_size
    width, height = image.size
    shrink = min(box[2] - box[0], box[3] - box[1]) / size
    if shrink >= 2:  # JPEG: decodes at a half, a quarter or an eighth, whichever is enough.
      image.draft(mode, (math.ceil(width / shrink), math.ceil(height / shrink)))
    x, y = image.size[0] / width, image.size[1] / height
    box = (box[0] * x, box[1] * y, min(box[2] * x, image.size[0]), min(box[3] * y, image.size[1]))
    image = image if image.mode == mode else image.convert(mode)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)

  def _pixels(self, image: Image.Image) -> np.ndarray:
    size = self.data.image_size
    return np.array(image, np.uint8).reshape(size, size, self.channels)


def _centre(size: tuple[int, int], part: float) -> Box:
  """The square in the middle that has `part` of the shorter side."""
  width, height = size
  side = part * min(width, height)
  left, top = (width - side) / 2, (height - side) / 2
  return left, top, left + side, top + side


def random_crop(size: tuple[int, int], least_area: float, rng: np.random.Generator) -> Box:
  """A part of the image of at least that area (Szegedy et al. 2014, arXiv 1409.4842).

  Its shape is drawn between 3:4 and 4:3. If none of ten draws fits into the image, its middle.
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


def jitter(image: Image.Image, most: float, rng: np.random.Generator) -> Image.Image:
  """Changes brightness, contrast and saturation, in a random order, by up to `most`."""
  enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
  for i in rng.permutation(len(enhancers)):
    image = enhancers[i](image).enhance(rng.uniform(1 - most, 1 + most))
  return image


def erase(pixels_SxSxC: np.ndarray, rng: np.random.Generator) -> None:
  """Fills a rectangle with noise (Zhong et al. 2017, arXiv 1708.04896)."""
  height, width, channels = pixels_SxSxC.shape
  for _ in range(_TRIES):
    area = height * width * rng.uniform(*_ERASED_AREA)
    ratio = math.exp(rng.uniform(*map(math.log, _ERASED_RATIO)))
    high, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < high < height and 0 < wide < width:
      top, left = rng.integers(height - high + 1), rng.integers(width - wide + 1)
      noise = rng.integers(0, 256, (high, wide, channels), np.uint8)
      pixels_SxSxC[top : top + high, left : left + wide] = noise
      return
