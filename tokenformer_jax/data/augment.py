"""Decode and augment images: from an encoded image to the pixels that a model sees.

Pillow decodes, crops, resizes and distorts. The caller seeds the random generator, so that every
host gets the same pixels for the same image and epoch. `mix` mixes the images of a batch on the
devices.
"""

import dataclasses
import io
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from tokenformer_jax.config import ImagesConfig

_RATIO = 4 / 3  # largest aspect ratio of a random crop; the smallest is its inverse
_TRIES = 10

LARGEST = 10.0  # the largest magnitude
_DEVIATION = 0.5  # of a magnitude
_OPERATIONS_PER_IMAGE, _PROBABILITY = 2, 0.5
_GREY = 128  # fills the areas that an operation moves in from outside the image

# Maps an image and a strength between 0 and 1 to the changed image.
Operation = Callable[[Image.Image, float], Image.Image]
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
      image = rand_augment(image, data.rand_augment, rng)
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


def _grey(image: Image.Image) -> int | tuple[int, ...]:
  bands = len(image.getbands())
  return (_GREY,) * bands if bands > 1 else _GREY


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
  method, resample = Image.Transform.AFFINE, Image.Resampling.BICUBIC
  return image.transform(image.size, method, matrix, resample, fillcolor=_grey(image))


def _rotate(image: Image.Image, strength: float) -> Image.Image:
  return image.rotate(30 * strength, Image.Resampling.BICUBIC, fillcolor=_grey(image))


def _enhance(enhancer: type) -> Operation:
  return lambda image, strength: enhancer(image).enhance(1 + 0.9 * strength)


def _solarize_add(image: Image.Image, strength: float) -> Image.Image:
  added = round(110 * strength)
  table = [min(255, value + added) if value < 128 else value for value in range(256)]
  return image.point(table * len(image.getbands()))


# The strength of these operations lies between −1 and 1; both signs are equally likely.
_SIGNED: dict[str, Operation] = {
  'rotate': _rotate,
  'shear_x': lambda image, s: _affine(image, (1, 0.3 * s, 0, 0, 1, 0)),
  'shear_y': lambda image, s: _affine(image, (1, 0, 0, 0.3 * s, 1, 0)),
  'translate_x': lambda image, s: _affine(image, (1, 0, 0.45 * s * image.width, 0, 1, 0)),
  'translate_y': lambda image, s: _affine(image, (1, 0, 0, 0, 1, 0.45 * s * image.height)),
  'color': _enhance(ImageEnhance.Color),
  'contrast': _enhance(ImageEnhance.Contrast),
  'brightness': _enhance(ImageEnhance.Brightness),
  'sharpness': _enhance(ImageEnhance.Sharpness),
}

_UNSIGNED: dict[str, Operation] = {
  'autocontrast': lambda image, s: ImageOps.autocontrast(image),
  'equalize': lambda image, s: ImageOps.equalize(image),
  'invert': lambda image, s: ImageOps.invert(image),
  'posterize': lambda image, s: ImageOps.posterize(image, max(1, 4 - round(4 * s))),
  'solarize': lambda image, s: ImageOps.solarize(image, 256 - round(256 * s)),
  'solarize_add': _solarize_add,
}

OPERATIONS = {**_SIGNED, **_UNSIGNED}


def rand_augment(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
  """Return a grey or RGB image changed by random operations.

  RandAugment (Cubuk et al. 2019, arXiv 1909.13719) with the operations and ranges that ViTs use
  (Touvron et al. 2020, arXiv 2012.12877; He et al. 2021, arXiv 2111.06377). No maintained library
  has this version without PyTorch or TensorFlow. Each image gets two of fifteen operations, each
  applied with probability 1/2, at a magnitude drawn around `magnitude`, which is between 0 and
  `LARGEST`. A larger magnitude is always a larger change.
  """
  names = sorted(OPERATIONS)
  for _ in range(_OPERATIONS_PER_IMAGE):
    name = names[rng.integers(len(names))]
    carried_out, positive = rng.random(2) < _PROBABILITY
    strength = np.clip(rng.normal(magnitude, _DEVIATION), 0, LARGEST) / LARGEST
    if carried_out:
      sign = -1 if name in _SIGNED and not positive else 1
      image = OPERATIONS[name](image, float(sign * strength))
  return image


def mix(
  key: jax.Array, images_BxHxWxC: jax.Array, *, mixup: float, cutmix: float
) -> tuple[jax.Array, jax.Array]:
  """Mix every image with the image of the mirrored row, B − 1 − row.

  mixup (Zhang et al. 2017, arXiv 1710.09412) adds the two images with weights λ and 1 − λ. cutmix
  (Yun et al. 2019, arXiv 1905.04899) pastes a rectangle of the other image. λ is drawn once per
  batch from Beta(α, α), with `mixup` or `cutmix` as α; 0 turns either off. If both are on, each
  batch uses one of them at random.

  Returns:
    The mixed images, and the weight λ of each image's own label. The other label has 1 − λ.
  """
  if not (mixup or cutmix):
    return images_BxHxWxC, jnp.ones(())
  choice, weight, centre = jax.random.split(key, 3)
  others_BxHxWxC = jnp.flip(images_BxHxWxC, axis=0)

  def mixed_up() -> tuple[jax.Array, jax.Array]:
    own = jax.random.beta(weight, mixup, mixup)
    return own * images_BxHxWxC + (1 - own) * others_BxHxWxC, own

  def cut() -> tuple[jax.Array, jax.Array]:
    height, width = images_BxHxWxC.shape[1:3]
    own = jax.random.beta(weight, cutmix, cutmix)
    inside_HxW = _rectangle(centre, height, width, 1 - own)
    pasted = jnp.where(inside_HxW[None, :, :, None], others_BxHxWxC, images_BxHxWxC)
    return pasted, 1 - jnp.mean(inside_HxW)  # The border may have cut the rectangle.

  if not cutmix:
    return mixed_up()
  if not mixup:
    return cut()
  return jax.lax.cond(jax.random.bernoulli(choice), mixed_up, cut)


def _rectangle(key: jax.Array, height: int, width: int, area: jax.Array) -> jax.Array:
  """Return a mask [H, W] of a rectangle with a share of the image's area, around a random point."""
  point = jax.random.uniform(key, (2,))
  half = jnp.sqrt(area) / 2

  def within(size: int, centre: jax.Array) -> jax.Array:
    first, last = (jnp.round(size * jnp.clip(centre + d, 0, 1)) for d in (-half, half))
    return (jnp.arange(size) >= first) & (jnp.arange(size) < last)

  return within(height, point[0])[:, None] & within(width, point[1])[None, :]
