"""A TFDS dataset of five documents and an empty one, and a test split of the first two."""

from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds

DOCUMENTS = ('', *(f'döc {i}' for i in range(5)))


class TinyText(tfds.core.GeneratorBasedBuilder):
  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    features = {'text': tfds.features.Text(), 'number': tfds.features.Scalar(np.int64)}
    return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
    return {'train': self._generate_examples(6), 'test': self._generate_examples(3)}

  def _generate_examples(self, count: int) -> Iterator[tuple]:
    for i, text in enumerate(DOCUMENTS[:count]):
      yield i, {'text': text, 'number': i}
