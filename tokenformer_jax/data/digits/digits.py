"""scikit-learn's handwritten digits as a TFDS dataset, built without TensorFlow or downloads."""

import io
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from tokenformer_jax.errors import UserError

_HELD_OUT = 359  # images in the split `test`: one in five
_LARGEST = 16  # the largest pixel value: the count of black points in a 4 × 4 bitmap


class Digits(tfds.core.GeneratorBasedBuilder):
  """1,797 images of 8 × 8 pixels in ten classes (Alpaydin & Kaynak 1998, UCI, CC BY 4.0).

  The split `test` has one image in five, chosen with a fixed seed. The same people wrote the digits
  of both splits.
  """

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    features = {
      'image': tfds.features.Image(shape=(8, 8, 1), encoding_format='png'),
      'label': tfds.features.ClassLabel(num_classes=10),
    }
    return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
    images_NxHxW, labels_N = _load()
    # A permutation, not every fifth image: the digits mostly come in the order 0 to 9.
    order = np.random.default_rng(0).permutation(len(labels_N))
    return {
      name: self._generate_examples(images_NxHxW, labels_N, sorted(numbers))
      for name, numbers in (('train', order[_HELD_OUT:]), ('test', order[:_HELD_OUT]))
    }

  def _generate_examples(
    self, images_NxHxW: np.ndarray, labels_N: np.ndarray, numbers: Iterable[int]
  ) -> Iterator[tuple]:
    for i in map(int, numbers):
      pixels_HxW = np.round(images_NxHxW[i] * (255 / _LARGEST)).astype(np.uint8)
      file = io.BytesIO()  # TFDS needs TensorFlow to encode arrays, but not for encoded files.
      Image.fromarray(pixels_HxW).save(file, 'png')
      file.seek(0)
      yield i, {'image': file, 'label': int(labels_N[i])}


def _load() -> tuple[np.ndarray, np.ndarray]:
  """Return the images [N, 8, 8], with values up to 16, and their labels."""
  try:
    from sklearn import datasets  # noqa: PLC0415 (slow, and only needed once)
  except ImportError as error:
    raise UserError(
      'config.data.source is digits, which needs scikit-learn, and scikit-learn is not installed; '
      'run pip install -e ".[images]"'
    ) from error
  images, labels = datasets.load_digits(return_X_y=True)
  return np.asarray(images).reshape(-1, 8, 8), np.asarray(labels)
