"""Scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels in ten classes.

They are those of Alpaydin & Kaynak 1998 (UCI, CC BY 4.0). One image in five, chosen with a fixed
seed, is held out. The same people wrote the digits of both splits.
"""

import hashlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokenformer_jax.errors import UserError

_HELD_OUT = 359
_LARGEST = 16  # the largest pixel value: the count of black points in a 4 × 4 bitmap


def load() -> dict[str, list[dict[str, Any]]]:
  """Return the examples of the splits `train` and `test`: an encoded `image` and its `label`."""
  spec = importlib.util.find_spec('sklearn')
  if spec is None or not spec.origin:
    raise UserError(
      'config.data.source is digits, which needs scikit-learn, and scikit-learn is not installed; '
      'run pip install -e ".[images]"'
    )
  # Its file alone: importing scikit-learn takes longer than everything here.
  file = Path(spec.origin).parent / 'datasets/data/digits.csv.gz'
  table_Nx65 = np.loadtxt(file, delimiter=',')
  pixels_NxHxW = np.round(table_Nx65[:, :-1] * (255 / _LARGEST)).astype(np.uint8).reshape(-1, 8, 8)
  # A permutation, not every fifth image: the digits mostly come in the order 0 to 9.
  order = np.random.default_rng(0).permutation(len(pixels_NxHxW))

  def examples(split: str, numbers: np.ndarray) -> list[dict[str, Any]]:
    # Seeds of runs and the figures of the docs belong to this order, which TFDS would choose.
    ordered = sorted(numbers, key=lambda i: hashlib.md5(f'{split}{i}'.encode()).digest())
    return [{'image': _png(pixels_NxHxW[i]), 'label': int(table_Nx65[i, -1])} for i in ordered]

  return {
    'train': examples('train', order[_HELD_OUT:]),
    'test': examples('test', order[:_HELD_OUT]),
  }


def _png(pixels_HxW: np.ndarray) -> bytes:
  file = io.BytesIO()
  Image.fromarray(pixels_HxW).save(file, 'png')
  return file.getvalue()
