"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719) with the operations and ranges that ViTs use.

Each image gets two of fifteen operations. Each of the two is applied with probability 1/2, with a
magnitude drawn around the given one. A larger magnitude is always a larger change. Touvron et al.
(2020, arXiv 2012.12877) and He et al. (2021, arXiv 2111.06377) train this way. The code is here
because no maintained library has this version without PyTorch or TensorFlow.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

LARGEST = 10.0  # the largest magnitude
_DEVIATION = 0.5  # of a magnitude
_OPERATIONS_PER_IMAGE, _PROBABILITY = 2, 0.5
_GREY = 128  # fills the areas that an operation moves in from outside the image

# Maps an image and a strength between 0 and 1 to the changed image.
Operation = Callable[[Image.Image, float], Image.Image]


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


def apply(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
  """Return a grey or RGB image changed by random operations.

  The magnitude of an operation is drawn around `magnitude`, which is between 0 and `LARGEST`.
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
