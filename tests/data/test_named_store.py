"""A run reads the store that `data.store` names, and no store of another text or tokenizer."""

import dataclasses
import json
from pathlib import Path

import pytest

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import store as store_lib
from tokenformer_jax.data.store import prepare
from tokenformer_jax.errors import UserError


def _config(folder: Path, **changes) -> DataConfig:
  path = folder / 'corpus.jsonl'
  if not path.exists():
    path.write_text(''.join(json.dumps({'text': f'document {i}'}) + '\n' for i in range(50)))
  config = DataConfig(**_fields(folder), cache_dir=str(folder / 'cache'))
  return dataclasses.replace(config, **changes)


def test_a_run_reads_the_store_that_its_config_names(tmp_path):
  built = prepare(_config(tmp_path))
  (tmp_path / 'corpus.jsonl').unlink()
  config = DataConfig(
    **{**_fields(tmp_path), 'store': str(built.path), 'cache_dir': str(tmp_path / 'other')}
  )
  assert prepare(config).digest == built.digest
  assert store_lib.find(config, built.tokenizer).digest == built.digest
  assert not (tmp_path / 'other').exists(), 'a store is built beside the one that is named'


def _fields(folder: Path) -> dict:
  corpus_file = folder / 'corpus.jsonl'
  return {'source': f'files:{corpus_file}', 'tokenizer': 'bytes', 'validation_fraction': 0.2}


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'store': 'nowhere'}, r'config\.data\.store is nowhere, where there is no complete token'),
    ({'source': 'stdlib'}, r'made with config\.data\.source=files:.*, and here it is stdlib; set'),
    ({'validation_fraction': 0.3}, r'made with config\.data\.validation_fraction=0\.2, and here'),
    ({'tokenizer': 'bpe:300'}, r'made with config\.data\.tokenizer=bytes, and here it is bpe:300'),
  ],
)
def test_a_named_store_of_another_text_is_refused(tmp_path, changes, message):
  built = prepare(_config(tmp_path))
  with pytest.raises(UserError, match=message):
    prepare(DataConfig(**{**_fields(tmp_path), 'store': str(built.path), **changes}))


def test_a_named_store_of_another_tokenizer_is_refused(tmp_path):
  built = prepare(_config(tmp_path))
  trained = prepare(_config(tmp_path, tokenizer='bpe:300')).tokenizer
  config = _config(tmp_path, store=str(built.path))
  with pytest.raises(UserError, match=r'a store of another tokenizer .* than that of this run'):
    prepare(config, trained)


def test_a_named_store_that_changed_is_not_built_again(tmp_path):
  built = prepare(_config(tmp_path))
  (built.path / '00000.train.tokens').unlink()
  with pytest.raises(UserError, match=r'config\.data\.store is .*train\.tokens is missing; remove'):
    prepare(_config(tmp_path, store=str(built.path)))
