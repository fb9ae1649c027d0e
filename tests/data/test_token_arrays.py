"""Tokens are read by range over the arrays of shards, whatever their number and size."""

import itertools
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from tokenformer_jax.data import shards
from tokenformer_jax.data import tokens as tokens_lib
from tokenformer_jax.data.tokens import ArraySlice, Tokens, write
from tokenformer_jax.errors import UserError


def _tokens(folder: Path, counts: list[int]) -> tuple[Tokens, np.ndarray]:
  """Return tokens in shards of these counts, after others in the same array, and all as one."""
  whole, slices = np.arange(sum(counts), dtype=np.uint16), []
  for i, end in enumerate(itertools.accumulate(counts)):
    shard = np.concatenate([[999], whole[end - counts[i] : end]]).astype(np.uint16)
    write(folder / f'{i}', shard)
    slices.append(ArraySlice(folder / f'{i}', 1, counts[i], len(shard)))
  return Tokens(slices, 'uint16'), whole


@pytest.mark.parametrize('counts', [[7], [3, 4], [1, 1, 1, 4], [5, 1, 2]])
def test_a_range_is_that_of_one_array(tmp_path, counts):
  tokens, whole = _tokens(tmp_path, counts)
  assert len(tokens) == len(whole)
  for start, stop in itertools.product(range(-9, 10), range(-9, 10)):
    window = tokens[start:stop]
    np.testing.assert_array_equal(window, whole[start:stop], f'{start}:{stop} are other tokens')
    assert window.dtype == np.uint16, 'an empty range is of another type'
  ranges = [(5, 7), (0, 2), (2, 6), (4, 4)]
  for (start, stop), window in zip(ranges, tokens.gather(ranges), strict=True):
    np.testing.assert_array_equal(window, whole[start:stop], 'ranges are in another order')


@pytest.mark.parametrize('count', [1, 7, 8, 9, 20])
def test_files_and_blocks_do_not_show(tmp_path, monkeypatch, count):
  monkeypatch.setattr(tokens_lib, '_FILE_TOKENS', 8)
  monkeypatch.setattr(tokens_lib, '_BLOCK_TOKENS', 4)
  tokens, whole = _tokens(tmp_path, [count])
  assert len(list((tmp_path / '0/c').iterdir())) == -(-(count + 1) // 8)
  for start, stop in itertools.product(range(count), repeat=2):
    np.testing.assert_array_equal(tokens[start:stop], whole[start:stop])


def test_an_array_that_replaces_another_one_is_read_anew(tmp_path):
  for count in (9000, 18_000, 5000):
    tokens, whole = _tokens(tmp_path, [count])
    np.testing.assert_array_equal(tokens[:], whole)
    shutil.rmtree(tmp_path / '0')


def test_a_worker_gets_the_names_of_the_shards_and_no_tokens(tmp_path):
  tokens, whole = _tokens(tmp_path, [3000, 4000])
  tokens[:]
  data = pickle.dumps(tokens)
  assert len(data) < 1000, 'tokens are sent to each worker'
  np.testing.assert_array_equal(pickle.loads(data)[:], whole)


def test_positions_are_exact_in_a_store_of_a_trillion_tokens(monkeypatch):
  count, last = 31_250_001, 40_000  # tokens of a shard, shards
  tokens = Tokens([ArraySlice(Path(), 0, count, count)] * last, 'uint32')
  read = []
  monkeypatch.setattr(tokens, '_start_read', lambda *span: read.append(span) or ())
  monkeypatch.setattr(tokens, '_result', lambda *_: np.zeros(0, np.uint32))
  assert len(tokens) == 1_250_000_040_000
  start = (last - 1) * count - 1
  tokens[start : start + 3]
  assert read == [(last - 2, count - 1, count), (last - 1, 0, 2)], 'other tokens are read'


def test_a_step_between_tokens_is_refused(tmp_path):
  tokens, _ = _tokens(tmp_path, [4])
  with pytest.raises(IndexError, match='must be 1'):
    tokens[::2]


def test_the_same_tokens_give_the_same_bytes(tmp_path, monkeypatch):
  monkeypatch.setattr(tokens_lib, '_FILE_TOKENS', 2**12)
  monkeypatch.setattr(tokens_lib, '_BLOCK_TOKENS', 2**6)
  ids = np.zeros(10_000, np.uint32)  # Blocks of zeros are written as well.
  ids[5000:] = np.arange(5000)
  contents = []
  for name in 'abc':
    write(tmp_path / name, ids)
    files = sorted(p for p in (tmp_path / name).rglob('*') if p.is_file())
    contents.append([(p.relative_to(tmp_path / name), p.read_bytes()) for p in files])
  assert len(contents[0]) == 4
  assert contents[0] == contents[1] == contents[2]


@pytest.mark.parametrize('damage', ['missing', 'cut', 'zeros', 'bit', 'bit of the index'])
def test_a_damaged_file_is_named_and_never_read_as_zeros(tmp_path, damage):
  tokens, whole = _tokens(tmp_path, [9000])
  file = tmp_path / '0/c/0'
  content = bytearray(file.read_bytes())
  content[{'bit': 5000}.get(damage, -30)] ^= 4
  damaged = {'cut': content[:5000], 'zeros': bytes(len(content))}.get(damage, content)
  file.unlink() if damage == 'missing' else file.write_bytes(damaged)
  with pytest.raises(UserError, match=r'the tokens in .*/0 are not as they were written \(.*; re'):
    tokens[2000:3000]
  if damage == 'bit':
    np.testing.assert_array_equal(tokens[5000:], whole[5000:], 'other blocks cannot be read')


def test_an_array_replaces_the_files_of_another_one(tmp_path, monkeypatch):
  monkeypatch.setattr(tokens_lib, '_FILE_TOKENS', 2**12)
  for count in (9000, 3000):
    write(tmp_path / f'{count}', np.arange(count, dtype=np.uint16))
    files = shards.put_array(tmp_path / f'{count}', tmp_path / 'store/00000')
    assert {name: size for name, (size, _) in files.items()} == shards.file_sizes(
      tmp_path / 'store/00000'
    )
  tokens = Tokens([ArraySlice(tmp_path / 'store/00000', 0, 3000, 3000)], 'uint16')
  np.testing.assert_array_equal(tokens[:], np.arange(3000))
