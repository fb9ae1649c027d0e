"""Images on disk for tests: folders of classes, and what is wrong with some of them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def encoded(label: int, kind: str = 'png', size: tuple[int, int] = (20, 16)) -> bytes:
  """An image whose left part is brighter the larger its label is."""
  pixels = np.random.default_rng(label).integers(0, 60, (*size[::-1], 3), np.uint8)
  pixels[:, : size[0] // 2] += np.uint8(40 * label)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, kind)
  return file.getvalue()


def write_classes(root: Path, classes: tuple[str, ...], each: int) -> None:
  """Writes `each` images into a folder for every class."""
  for label, name in enumerate(classes):
    (root / name).mkdir(parents=True)
    for i in range(each):
      kind, suffix = (('png', 'png'), ('jpeg', 'JPG'))[i % 2]
      (root / name / f'{i}.{suffix}').write_bytes(encoded(label, kind))


def write_sets(root: Path) -> str:
  """Writes train/ and val/ of three classes, 12 and 7 images each; returns the source."""
  write_classes(root / 'train', ('ant', 'bee', 'cat'), 12)
  write_classes(root / 'val', ('ant', 'bee', 'cat'), 7)
  return f'folder:{root}'
