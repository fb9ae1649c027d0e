"""The stores of a mixture are made beforehand, named in the config and verified."""

import collections
import dataclasses
import shutil

import numbered
import numpy as np
import pytest

from tokenformer_jax.config import DataConfig, SourceConfig, Sources
from tokenformer_jax.data import mixture, shards, store
from tokenformer_jax.data.mixture import make_stores, open_sources, store_folders
from tokenformer_jax.data.text_files import Files
from tokenformer_jax.errors import UserError


@pytest.fixture
def config(tmp_path) -> DataConfig:
  sources = {
    name: SourceConfig(numbered.write(tmp_path / f'{name}.jsonl', count, name), weight=weight)
    for name, count, weight in (('new', 120, 0.75), ('old', 40, 0.25))
  }
  made = numbered.config(tmp_path, 8, 16, mixture=Sources(sources))
  return dataclasses.replace(made, tokenizer='bpe:280')


def _name_stores(config: DataConfig, folder: str) -> DataConfig:
  named = {
    name: dataclasses.replace(source, store=f'{folder}/{name}')
    for name, source in config.mixture.items()
  }
  return dataclasses.replace(config, mixture=Sources(named))


def test_a_run_finds_the_stores_that_were_made_for_its_mixture(config, monkeypatch):
  made = make_stores(config, None)
  assert {name: one.path for name, one in made.items()} == store_folders(config)
  monkeypatch.setattr(store, '_build', lambda *_: pytest.fail('it is made again'))
  assert open_sources(config, 0).stores['old'].path == made['old'].path


def test_each_text_of_a_mixture_is_opened_and_hashed_once(config, monkeypatch):
  calls = collections.Counter()

  def count(owner, name: str) -> None:
    function = getattr(owner, name)

    def counted(*arguments):
      calls[name] += 1
      return function(*arguments)

    monkeypatch.setattr(owner, name, counted)

  for owner, name in ((mixture, 'source_configs'), (store, 'open_corpus'), (Files, 'fingerprint')):
    count(owner, name)
  open_sources(config, 0)
  assert calls == {'source_configs': 1, 'open_corpus': 2, 'fingerprint': 4}, 'and once for a shard'
  calls.clear()
  open_sources(config, 0)
  assert calls == {'source_configs': 1, 'open_corpus': 2, 'fingerprint': 2}


def test_stores_in_folders_of_their_names_are_named_in_the_config(config, tmp_path, monkeypatch):
  digest = open_sources(config, 0).digests
  make_stores(config, f'{tmp_path}/made/')
  named = _name_stores(config, f'{tmp_path}/made')
  shutil.rmtree(store.cache_folder(config) / 'tokenizers')
  monkeypatch.setattr(mixture, '_trained_bpe', lambda *_: pytest.fail('the text is read'))
  assert open_sources(named, 0).digests == digest, 'a store has other tokens'
  folders = store_folders(named)
  assert folders == {name: tmp_path / 'made' / name for name in ('new', 'old')}
  assert all(shards.verify(folder) > 0 for folder in folders.values())
  assert {name: one.digest for name, one in make_stores(named, None).items()} == {
    name: one.digest for name, one in open_sources(named, 0).stores.items()
  }, 'the stores that are there have another tokenizer'


def test_bits_of_the_tokenizer_that_flip_are_found_and_it_is_trained_again(config):
  digest, rng = open_sources(config, 0).digests, np.random.default_rng(0)
  (file,) = (store.cache_folder(config) / 'tokenizers').iterdir()
  whole = file.read_bytes()
  for _ in range(20):
    content = bytearray(whole)
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    file.write_bytes(content)
    assert open_sources(config, 0).digests == digest, 'a run has another tokenizer'
    assert file.read_bytes() == whole, 'the damaged file stays'


def test_a_message_about_a_store_names_its_source(config, tmp_path):
  named = _name_stores(config, f'{tmp_path}/none')
  with pytest.raises(UserError, match=r'config\.data\.mixture\.new\.store is .*no complete token'):
    open_sources(named, 0)
