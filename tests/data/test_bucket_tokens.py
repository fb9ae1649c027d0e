"""A store in a bucket gives the batches of the same store on a disk, and no step waits for it."""

import dataclasses
import itertools
import pickle
import statistics
import time

import numbered
import numpy as np
import pytest

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import bucket_tokens, order, shards
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


@pytest.fixture
def there(bucket, local, config):
  """The config of a run that reads the store from the bucket, which is as it was written."""
  for file in local.path.iterdir():
    bucket.buckets['bucket'][f'store/{file.name}'] = (1, file.read_bytes())
  return dataclasses.replace(config, store=URL)


def _batches(store, config: DataConfig, count: int) -> np.ndarray:
  batches = order.train_batches(store, config, 0, range(ROWS), 100)
  try:
    return np.stack(list(itertools.islice(batches, count)))
  finally:
    batches.close()


def _media(bucket) -> list[str]:
  return [call for call in bucket.asked if 'alt=media' in call or '/download/' in call]


@pytest.mark.parametrize(
  ('cache_gb', 'workers'), [(0, 0), (0, 2), (1, 0), pytest.param(1, 2, marks=pytest.mark.full_size)]
)
def test_batches_are_those_of_the_store_on_a_disk(there, local, workers, cache_gb):
  there = dataclasses.replace(there, workers=workers, cache_gb=cache_gb)
  store = prepare(there)
  assert store.digest == local.digest
  np.testing.assert_array_equal(_batches(store, there, 12), _batches(local, there, 12))
  rows = list(order.validation_batches(store, there, range(ROWS)))
  np.testing.assert_array_equal(rows, list(order.validation_batches(local, there, range(ROWS))))


def test_a_step_asks_for_its_windows_and_nothing_else(bucket, there):
  tokens = prepare(dataclasses.replace(there, cache_gb=0)).train
  bucket.asked.clear()
  order.train_rows(tokens, 7, [2, 5], batch_size=ROWS, sequence_length=LENGTH, seed=0)
  ranges = [call.rpartition('bytes=')[2].split('-') for call in _media(bucket)]
  assert len(ranges) == 2, 'a host reads the windows of other hosts, or one of its own twice'
  assert all(int(last) - int(first) + 1 == 2 * (LENGTH + 1) for first, last in ranges)


def test_a_cache_is_read_instead_of_the_bucket_until_it_is_full(bucket, there, monkeypatch):
  monkeypatch.setattr(bucket_tokens, '_PIECE', 2**12)
  tokens = prepare(there).train
  copy = pickle.loads(pickle.dumps(tokens))
  whole = tokens[:]
  bucket.asked.clear()
  np.testing.assert_array_equal(tokens[:], whole)
  np.testing.assert_array_equal(tokens[5:9000], whole[5:9000])
  assert not _media(bucket), 'what is in the cache is read again'
  np.testing.assert_array_equal(copy[5:9], whole[5:9], 'the cache of another process is used')
  assert len(_media(bucket)) == 1

  half = len(whole) * 2 // 2**13 * 2**12
  folder = tokens._folder
  small = bucket_tokens.BucketTokens(tokens._files, [len(whole)], 'uint16', folder, half)
  for _ in range(3):
    found = [small[i : i + 1000] for i in range(0, len(whole), 1000)]
    np.testing.assert_array_equal(np.concatenate(found), whole)
  assert small._held * 2**12 <= half, 'the cache is larger than the stated size'
  assert small._held * 2**12 > half * 0.9, 'the cache is not used'
  assert not list(folder.glob('tmp*')), 'the cache can be left behind'


def test_no_step_waits_for_requests_of_50_ms(bucket, there):
  store = prepare(dataclasses.replace(there, cache_gb=0))
  bucket.seconds, waits = 0.05, []
  batches = order.train_batches(store, there, 0, range(ROWS), 0)
  try:
    next(batches)
    for _ in range(30):
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
  store = prepare(dataclasses.replace(there, cache_gb=0))
  with bucket.failing(one_in=33, statuses=(503, 429, 0), matching='store/') as faults:
    found = _batches(store, there, 40)
  assert len(faults.failed) >= 5, 'too few requests failed for the test to say anything'
  np.testing.assert_array_equal(found, _batches(local, there, 40))


def test_a_bucket_without_the_store_is_named(bucket, there):
  del bucket
  with pytest.raises(UserError, match=r'is gs://bucket/other, where there is no complete token'):
    prepare(dataclasses.replace(there, store='gs://bucket/other'))
  with pytest.raises(
    UserError, match=r'gs://bucket/other is not a complete token store: .*missing'
  ):
    shards.verify(paths.parse_path('gs://bucket/other'))


def test_a_shard_that_is_missing_or_changed_is_named(bucket, there):
  objects = bucket.buckets['bucket']
  name, written = 'store/00000.train.tokens', objects['store/00000.train.tokens'][1]
  del objects[name]
  with pytest.raises(UserError, match=rf'config\.data\.store is {URL}, and .*{name} is missing'):
    prepare(there)
  objects[name] = (2, bytes(len(written)))
  with pytest.raises(UserError, match=r'block 0 of gs://bucket/store/.* has changed since'):
    prepare(there)
  with pytest.raises(UserError, match=r'block 0 of gs://bucket/store/.* has changed since'):
    shards.verify(paths.parse_path(URL))
  objects[name] = (3, written)
  tokens = prepare(dataclasses.replace(there, cache_gb=0)).train
  objects[name] = (4, written[:100])
  with pytest.raises(UserError, match=r'the shard .* (ends before byte|cannot be read)'):
    tokens[40:80]
