"""A store in a bucket gives the batches of the same store on a disk, and no step waits for it."""

import dataclasses
import statistics
import time

import numbered
import numpy as np
import pytest
import tensorstore as ts

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import order, shards, tokens
from tokenformer_jax.data.mixture import one_source
from tokenformer_jax.data.store import prepare
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths, retry

pytestmark = pytest.mark.slow

ROWS, LENGTH = 8, 16
URL = 'gs://bucket/store'


@pytest.fixture(scope='module')
def config(tmp_path_factory) -> DataConfig:
  folder = tmp_path_factory.mktemp('text')
  source = numbered.write(folder / 'corpus.jsonl', 2000)
  return numbered.config(folder / 'cache', ROWS, LENGTH, source=source, validation_fraction=0.1)


@pytest.fixture(scope='module')
def local(config):
  return prepare(config)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
  """Have each read of tokens ask the bucket."""
  monkeypatch.setattr(tokens, '_context', lambda: ts.Context({}))


@pytest.fixture
def there(bucket, local, config):
  """The config of a run that reads the store from the bucket, which is as it was written."""
  for file in (path for path in local.path.rglob('*') if path.is_file()):
    name = f'store/{file.relative_to(local.path)}'
    bucket.buckets['bucket'][name] = (1, file.read_bytes())
  return dataclasses.replace(config, store=URL)


def _batches(store, config: DataConfig, count: int) -> np.ndarray:
  return np.stack([*one_source(store, config, 0).train_batches(range(ROWS), 100, 100 + count)])


def _media(bucket) -> list[str]:
  return [call for call in bucket.asked if 'alt=media' in call or '/download/' in call]


@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.full_size)])
def test_batches_are_those_of_the_store_on_a_disk(there, local, workers):
  there = dataclasses.replace(there, workers=workers)
  store = prepare(there)
  assert store.digest == local.digest
  np.testing.assert_array_equal(_batches(store, there, 12), _batches(local, there, 12))
  rows = list(order.validation_batches(store, there, range(ROWS)))
  np.testing.assert_array_equal(rows, list(order.validation_batches(local, there, range(ROWS))))


def test_a_step_reads_the_blocks_of_its_own_rows(bucket, there):
  train = prepare(there).train
  bucket.asked.clear()
  batches = order.TrainBatches(
    sources=[train], rows=[2, 5], batch_size=ROWS, sequence_length=LENGTH, seed=0
  )
  assert batches[7].shape == (2, LENGTH + 1)
  ranges = [call.rpartition('bytes=')[2] for call in _media(bucket)]
  blocks = [span.split('-') for span in ranges if not span.startswith('-')]  # not the index
  assert 1 <= len(blocks) <= 4, 'a host reads the windows of other hosts'
  assert all(int(last) - int(first) < 10_000 for first, last in blocks), (
    'a read is more than a block'
  )


def test_no_step_waits_for_requests_of_50_ms(bucket, there):
  store = prepare(there)
  bucket.seconds, waits = 0.05, []
  batches = one_source(store, there, 0).train_batches(range(ROWS), 0)
  try:
    next(batches)
    for _ in range(15):
      time.sleep(0.1)  # a step
      begin = time.monotonic()
      next(batches)
      waits.append(time.monotonic() - begin)
  finally:
    bucket.seconds = 0.0
    batches.close()
  assert statistics.quantiles(waits, n=10)[-1] < 0.02, f'steps wait for the bucket: {waits}'


def test_errors_lose_and_repeat_no_sample(bucket, there, local, monkeypatch):
  monkeypatch.setattr(retry, 'PAUSES', (0.05,) * 8)
  store = prepare(there)
  with bucket.failing(one_in=8, statuses=(503, 429, 0), matching='store/') as faults:
    batches = _batches(store, there, 40)
  assert len(faults.failed) >= 5, 'too few requests failed for the test to say anything'
  np.testing.assert_array_equal(batches, _batches(local, there, 40))


def test_a_bucket_without_the_store_is_named(bucket, there):
  del bucket
  with pytest.raises(UserError, match=r'is gs://bucket/other, where there is no complete token'):
    prepare(dataclasses.replace(there, store='gs://bucket/other'))
  with pytest.raises(
    UserError, match=r'gs://bucket/other is not a complete token store: .*missing'
  ):
    shards.verify(paths.parse_path('gs://bucket/other'))


def test_a_file_that_is_missing_or_changed_is_named(bucket, there):
  objects = bucket.buckets['bucket']
  name, written = 'store/00000/c/0', objects['store/00000/c/0'][1]
  del objects[name]
  with pytest.raises(UserError, match=rf'config\.data\.store is {URL}, and .*{name} is missing'):
    prepare(there)
  objects[name] = (2, bytes(len(written)))
  with pytest.raises(UserError, match=r'gs://bucket/store/00000/c/0 has changed since'):
    shards.verify(paths.parse_path(URL))
  with pytest.raises(UserError, match='the tokens in gs://bucket/store/00000 are not as they were'):
    prepare(there).train[40:80]
  objects[name] = (3, written)
  train = prepare(there).train
  del objects[name]
  with pytest.raises(UserError, match='the tokens in gs://bucket/store/00000 are not as they were'):
    train[40:80]
