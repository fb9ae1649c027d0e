"""A changed index is detected."""

import dataclasses
import json
from pathlib import Path

import numbered
import numpy as np
import pytest

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import shards
from tokenformer_jax.data.store import Store, prepare
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import sealed


def _config(folder: Path, **changes) -> DataConfig:
  path = folder / 'text.jsonl'
  source = f'files:{path}' if path.exists() else numbered.write(path, 40)
  return dataclasses.replace(numbered.config(folder / 'cache', 8, 16, source=source), **changes)


def _meta(store: Store) -> Path:
  return store.path / 'meta.json'


def _index_with(store: Store, **changes) -> None:
  """Write another index, with the digest of itself that it would have."""
  meta = json.loads(_meta(store).read_text())
  meta.pop('seal')
  _meta(store).write_text(sealed.dump(meta | changes))


def test_a_store_of_another_format_is_refused(tmp_path):
  built = prepare(_config(tmp_path))
  _index_with(built, format=0)
  with pytest.raises(
    UserError, match=r'has the format 0, not 4; if .* is a token store, remove it'
  ):
    shards.verify(built.path)


def test_bits_of_the_index_that_flip_are_found_and_the_store_is_built_again(tmp_path):
  config = _config(tmp_path)
  built, rng = prepare(config), np.random.default_rng(0)
  whole = _meta(built).read_bytes()
  for flips in [1] * 40 + [2, 20] * 5:
    content = np.frombuffer(whole, np.uint8).copy()
    content[rng.integers(len(content), size=flips)] ^= 1 << rng.integers(8, size=flips, dtype='u1')
    _meta(built).write_bytes(content.tobytes())
    with pytest.raises(shards.ChangedError):
      shards.open_store(built.path)
    with pytest.raises(UserError):
      shards.verify(built.path)
  assert prepare(config).digest == built.digest
  assert _meta(built).read_bytes() == whole, 'the store is not built again'


def test_a_folder_that_is_no_store_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r'is not a complete token store: .*meta\.json is missing'):
    shards.verify(tmp_path)
  (tmp_path / 'meta.json').write_text('[]')
  with pytest.raises(UserError, match=r'meta\.json is damaged'):
    shards.verify(tmp_path)
