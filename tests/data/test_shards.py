"""A store is read by range over its shards, whatever their number and size."""

import dataclasses
import itertools
import pickle
import shutil
from pathlib import Path

import numbered
import numpy as np
import pytest

from tokenformer_jax.data import shards, store
from tokenformer_jax.data.tokens import Tokens
from tokenformer_jax.errors import UserError

STORED = Path(__file__).parent / 'stored_store'  # of format 1, written by earlier code


def _tokens(folder: Path, counts: list[int]) -> tuple[Tokens, np.ndarray]:
  """Return tokens in shards of these counts, and the same in one array."""
  whole, files = np.arange(sum(counts), dtype=np.uint16), []
  for i, end in enumerate(itertools.accumulate(counts)):
    files.append(str(folder / f'{i}'))
    whole[end - counts[i] : end].tofile(files[-1])
  return Tokens(files, counts, 'uint16'), whole


@pytest.mark.parametrize('counts', [[7], [3, 4], [1, 1, 1, 4], [5, 1, 2]])
def test_a_range_is_that_of_one_array(tmp_path, counts):
  tokens, whole = _tokens(tmp_path, counts)
  assert len(tokens) == len(whole)
  for start, stop in itertools.product(range(-9, 10), range(-9, 10)):
    found = tokens[start:stop]
    np.testing.assert_array_equal(found, whole[start:stop], f'{start}:{stop} are other tokens')
    assert found.dtype == np.uint16, 'an empty range is of another type'


def test_ranges_are_read_in_the_order_that_they_are_asked_for(tmp_path):
  tokens, whole = _tokens(tmp_path, [3, 1, 6])
  ranges = [(8, 10), (0, 2), (2, 9), (4, 4)]
  for (start, stop), found in zip(ranges, tokens.gather(ranges), strict=True):
    np.testing.assert_array_equal(found, whole[start:stop])


def test_a_worker_gets_the_names_of_the_shards_and_no_tokens(tmp_path):
  tokens, whole = _tokens(tmp_path, [3000, 4000])
  tokens[:]
  data = pickle.dumps(tokens)
  assert len(data) < 1000, 'tokens are sent to each worker'
  np.testing.assert_array_equal(pickle.loads(data)[:], whole)


def test_positions_are_exact_in_a_store_of_a_trillion_tokens(monkeypatch):
  count, last = 31_250_001, 40_000  # tokens of a shard, shards
  tokens = Tokens([''] * last, [count] * last, 'uint32')
  read = []
  monkeypatch.setattr(tokens, '_read', lambda *span: read.append(span) or np.zeros(0, np.uint32))
  assert len(tokens) == 1_250_000_040_000
  start = (last - 1) * count - 1
  tokens[start : start + 3]
  assert read == [(last - 2, count - 1, count), (last - 1, 0, 2)], 'other tokens are read'


def test_a_step_between_tokens_is_refused(tmp_path):
  tokens, _ = _tokens(tmp_path, [4])
  with pytest.raises(IndexError, match='must be 1'):
    tokens[::2]


def test_a_store_of_format_1_is_a_store_of_one_shard():
  store = shards.open_store(STORED)
  assert shards.verify(STORED) == len(store.train) + len(store.validation) == 725 + 219
  assert (store.train_documents, store.validation_documents) == (31, 9)
  assert (store.train_bytes, store.validation_bytes) == (694, 210)
  assert store.digest == '4c83baada23968f46a2efb498689188f', 'runs find that their text changed'
  text = store.tokenizer.decode(store.train[:])
  assert text.startswith('document 0: naïve 0') and 'naïve 144' not in text


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (Path.unlink, r'train\.tokens is missing'),
    (lambda file: file.write_bytes(file.read_bytes()[:-2]), r'has 1,448 bytes, not the 1,450 of'),
    (lambda file: file.write_bytes(bytes(1450)), r'block 0 of .*train\.tokens .* has changed'),
  ],
  ids=['missing', 'cut', 'changed'],
)
def test_a_shard_that_is_missing_or_changed_is_named(tmp_path, change, message):
  store = tmp_path / 'store'
  shutil.copytree(STORED, store)
  change(store / 'train.tokens')
  with pytest.raises(shards.ChangedError, match=message):
    shards.open_store(store)
  with pytest.raises(UserError, match=f'{message}.*; remove that folder'):
    shards.verify(store)


@pytest.mark.parametrize(('name', 'changed'), [('uint16', 'uint17'), ('"validation"', '"other"')])
def test_an_index_that_names_nothing_is_damaged_and_the_store_is_built_again(
  tmp_path, name, changed
):
  source = numbered.write(tmp_path / 'text.jsonl', 40, 'text')
  config = dataclasses.replace(numbered.config(tmp_path, 8, 16), source=source)
  built = store.prepare(config)
  index = built.path / 'meta.json'
  index.write_text(index.read_text().replace(name, changed))
  with pytest.raises(UserError, match=r'meta\.json is damaged'):
    shards.verify(built.path)
  assert store.prepare(config).digest == built.digest
