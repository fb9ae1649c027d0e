"""A TFDS dataset with the features and splits of imagenet2012, and few images of random shapes."""

import io
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

TRAIN, VALIDATION, CLASSES = 40, 12, 1000


class TinyImagenet(tfds.core.GeneratorBasedBuilder):
  VERSION = tfds.core.Version('5.1.0')

  def _info(self) -> tfds.core.DatasetInfo:
    features = {
      'image': tfds.features.Image(encoding_format='jpeg'),
      'label': tfds.features.ClassLabel(num_classes=CLASSES),
      'file_name': tfds.features.Text(),
    }
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict(features), supervised_keys=('image', 'label')
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
    return {
      'train': self._generate_examples(0, TRAIN),
      'validation': self._generate_examples(1, VALIDATION),
    }

  def _generate_examples(self, seed: int, count: int) -> Iterator[tuple]:
    rng = np.random.default_rng(seed)
    for i in range(count):
      width, height = rng.integers(40, 500, 2)
      small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
      image = small.resize((width, height), Image.Resampling.BICUBIC)
      # As in ImageNet, one is a PNG and one has four channels, whatever their names say.
      file = io.BytesIO()
      image.convert('CMYK' if i == 1 else 'RGB').save(file, 'png' if i == 2 else 'jpeg')
      file.seek(0)
      name = f'n{i:08}.JPEG'
      yield name, {'image': file, 'label': int(rng.integers(CLASSES)), 'file_name': name}
