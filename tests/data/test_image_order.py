"""Batches of images: pure functions of the step, the same on any hosts, every image once."""

import dataclasses
import errno
import math
import os
from typing import ClassVar

import image_files
import numpy as np
import pytest

from tokenformer_jax.config import ImagesConfig
from tokenformer_jax.data import image_order, images, order
from tokenformer_jax.data.augment import Views
from tokenformer_jax.errors import TransientError
from tokenformer_jax.storage import retry

SIZE, BATCH = 12, 8
DATA = ImagesConfig(image_size=SIZE, batch_size=BATCH, crop_area=0.3, flip=True, prefetch=2)
VIEWS = Views(DATA, 3)


@dataclasses.dataclass(frozen=True)
class Numbered:
  """Images whose label is their number, some of them broken."""

  count: int
  broken: tuple[int, ...] = ()

  def __len__(self):
    return self.count

  def read(self, number):
    data = image_files.encoded(number % 5)
    return data[: len(data) // 2] if number in self.broken else data, number

  def name(self, number):
    return str(number)


def _batches(split, numbers, rows=range(BATCH), first=0, views=VIEWS, **options):
  options = {'classes': 1000, **options}
  steps = image_order.Batches(split=split, views=views, rows=rows, numbers=numbers, **options)
  return order.read_ahead(steps, first, views.data)


def _train(split, rows=range(BATCH), first=0, last=9, **options):
  return list(_batches(split, range(last), rows, first, **{'seed': 0, **options}))


def _joined(batches, name):
  return np.concatenate([batch[name] for batch in batches])


def test_an_epoch_has_every_image_once_and_the_next_one_in_another_order():
  labels = _joined(_train(Numbered(24)), 'labels').reshape(3, 24)
  for epoch in labels:
    assert sorted(epoch) == list(range(24))
  assert np.any(labels[0] != labels[1])


def test_a_batch_does_not_depend_on_hosts_or_on_where_training_began():
  split = Numbered(20)
  whole = _train(split)
  parts = [_train(split, rows) for rows in (range(4), range(4, BATCH))]
  resumed = _train(split, first=5)
  for name in ('images', 'labels'):
    np.testing.assert_array_equal(
      [batch[name] for batch in whole],
      [np.concatenate([a[name], b[name]]) for a, b in zip(*parts, strict=True)],
      err_msg=f'two hosts read other {name}',
    )
    np.testing.assert_array_equal(_joined(whole[5:], name), _joined(resumed, name))


def test_views_of_an_image_differ_from_epoch_to_epoch_and_by_seed():
  split = Numbered(BATCH)
  first, second = _train(split, last=2)
  other, _ = _train(split, last=2, seed=1)
  same = np.argsort(first['labels'])
  for batch in (second, other):
    there = np.argsort(batch['labels'])
    assert np.any(first['images'][same] != batch['images'][there])


@dataclasses.dataclass(frozen=True)
class Away(Numbered):
  """Images on a disk that is away for longer than reading is tried again when one is asked for."""

  last: int = 0

  def read(self, number):
    if number == self.last:
      raise TransientError(f'reading {number} failed 9 times')
    return super().read(number)


@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_batches_end_where_a_disk_is_away(workers):
  views = Views(dataclasses.replace(DATA, workers=workers), 3)
  split = Away(20, last=order.sample_index(0, 17, 20))  # in batch 2
  batches, read = _batches(split, range(9), views=views, seed=0), []
  with pytest.raises(TransientError, match=r'reading .* failed 9 times'):
    read += batches
  assert len(read) == 2, 'a disk that is away passes for bad images'
  for batch, expected in zip(read, _train(Numbered(20), last=2), strict=True):
    for name, array in expected.items():
      np.testing.assert_array_equal(batch[name], array)


class Busy(Numbered):
  """Images on a disk that fails; how often it was asked stands in `tries`."""

  tries: ClassVar[list[int]] = []

  def read(self, number):
    self.tries.append(number)
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_storage_that_was_given_up_is_not_tried_anew_for_batches_read_ahead(monkeypatch):
  monkeypatch.setattr(retry, 'PAUSES', (0.0,) * 3)
  steps = image_order.Batches(
    split=Busy(20), views=VIEWS, classes=1000, rows=(0, 1), numbers=range(2)
  )
  for i in range(2):
    with pytest.raises(TransientError, match='failed 4 times'):
      steps[i]
  assert len(Busy.tries) == 4, 'a process that gave up goes on trying for minutes before it ends'


class Unreadable(list):
  """Examples of a TFDS set; what array_record says of two of them, and does not say again."""

  def __init__(self, *errors):
    super().__init__({'image': image_files.encoded(i), 'label': i} for i in range(4))
    self.errors = dict(enumerate(errors))

  def __getitem__(self, i):
    if i in self.errors:
      raise RuntimeError(self.errors.pop(i))
    return super().__getitem__(i)


def test_a_file_of_records_that_is_away_is_told_from_a_bad_record(monkeypatch):
  monkeypatch.setattr(retry, 'PAUSES', (0.0,))
  away = 'open() failed: No such file or directory; opening /d/digits-train.array_record-00000'
  broken = 'Invalid Riegeli/records file: chunk boundary is 131072'
  split = images.Records('of', 'set', Unreadable(away, broken), 'image', 'label')
  assert image_order.load(split, 0, VIEWS, 4, None)[1] == 0, 'an intact image is called bad'
  with pytest.raises(image_order.BadImageError, match='Invalid Riegeli'):
    image_order.load(split, 1, VIEWS, 4, None)


@pytest.mark.parametrize('count', [1, 8, 21])
@pytest.mark.parametrize('hosts', [1, 2])
def test_validation_has_every_image_once(count, hosts):
  seen = []
  for host in range(hosts):
    rows = range(host * BATCH // hosts, (host + 1) * BATCH // hosts)
    batches = _batches(Numbered(count), range(math.ceil(count / BATCH)), rows)
    seen += [label for label in _joined(batches, 'labels') if label != image_order.ABSENT]
  assert sorted(seen) == list(range(count))


@pytest.mark.parametrize('classes', [1000, 13])
def test_a_bad_image_does_not_count_and_is_reported(classes):
  split = Numbered(16, broken=(3, 9))
  bad = {3, 9} if classes == 1000 else {3, 9, 13, 14, 15}
  batches = _train(split, last=2, classes=classes)
  labels, told = _joined(batches, 'labels'), _joined(batches, 'bad')
  assert set(labels) - {-1} == set(range(16)) - bad and np.sum(labels == -1) == len(bad)
  assert set(told) - {-1} == bad
  assert not _joined(batches, 'images')[labels == -1].any()
