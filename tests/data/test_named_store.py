"""A run reads the store of its text and tokenizer, also one that `data.store` names."""

from pathlib import Path

import numbered
import pytest
from byte_text import byte_config

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import corpus, lone_text
from tokenformer_jax.data import store as store_lib
from tokenformer_jax.data.store import prepare
from tokenformer_jax.data.tokenizers import ByteTokenizer
from tokenformer_jax.errors import UserError


def _config(folder: Path, **changes) -> DataConfig:
  path = folder / 'corpus.jsonl'
  source = f'files:{path}' if path.exists() else numbered.write(path, 50)
  return byte_config(folder, source, **{'validation_fraction': 0.2, **changes})


def test_a_run_reads_the_store_that_its_config_names(tmp_path):
  built = prepare(_config(tmp_path))
  config = _config(tmp_path, store=str(built.path), cache_dir=str(tmp_path / 'other'))
  (tmp_path / 'corpus.jsonl').unlink()
  assert prepare(config).digest == built.digest
  assert store_lib.find(config, built.tokenizer).digest == built.digest
  assert not (tmp_path / 'other').exists(), 'a store is built beside the one that is named'


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'store': 'nowhere'}, r'config\.data\.store is nowhere, where there is no complete token'),
    ({'source': 'stdlib'}, r'made with config\.data\.source=files:.*, and here it is stdlib;'),
    ({'validation_fraction': 0.3}, r'made with config\.data\.validation_fraction=0\.2, and here'),
    ({'tokenizer': 'bpe:300'}, r'made with config\.data\.tokenizer=bytes, and here it is bpe:300'),
  ],
)
def test_a_named_store_of_another_text_is_refused(tmp_path, changes, message):
  built = prepare(_config(tmp_path))
  with pytest.raises(UserError, match=message):
    prepare(_config(tmp_path, **{'store': str(built.path), **changes}))


def test_a_named_store_that_changed_is_not_built_again(tmp_path):
  built = prepare(_config(tmp_path))
  (built.path / '00000/c/0').unlink()
  with pytest.raises(
    UserError, match=r'config\.data\.store is .*00000/c/0 is missing; make it .* in a new'
  ):
    prepare(_config(tmp_path, store=str(built.path)))


class _Begun(ByteTokenizer):
  begin = (1,)


def _documents(store, split: str) -> list[str]:
  return store.tokenizer.decode(getattr(store, split)[:]).split('\N{REPLACEMENT CHARACTER}')


def test_documents_begin_as_the_tokenizer_does(tmp_path, monkeypatch):
  plain = prepare(_config(tmp_path))
  begun = prepare(_config(tmp_path), _Begun())
  assert begun.path != plain.path and begun.digest != plain.digest, 'a store of others is taken'
  for split in store_lib.SPLITS:
    *wanted, _ = _documents(plain, split)
    assert _documents(begun, split) == [*(f'\1{document}' for document in wanted), '']
    assert begun.index.total(split, 'bytes') == plain.index.total(split, 'bytes')
  monkeypatch.setattr(lone_text, '_PIECE_BYTES', 100)
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 500)
  (tmp_path / 'lone.txt').write_text('\n'.join(f'this is line {i}' for i in range(200)))
  lone = prepare(_config(tmp_path, source=f'files:{tmp_path}/lone.txt'), _Begun())
  assert len(lone.index.shards) > 3
  for split in store_lib.SPLITS:
    document, _ = _documents(lone, split)
    assert document[0] == '\1' and document.count('\1') == 1, 'a piece begins a document'


def test_a_run_keeps_its_tokenizer_whatever_store_it_finds(tmp_path):
  """A store has the same tokens for a model that ends texts in another way."""
  other = type('Other', (ByteTokenizer,), {'ends': (0xFF, 7)})()
  first = prepare(_config(tmp_path))
  for config in (_config(tmp_path), _config(tmp_path, store=str(first.path))):
    reopened = prepare(config, other)
    assert reopened.path == first.path and reopened.tokenizer is other


def test_a_named_store_of_another_tokenizer_is_refused(tmp_path):
  config = _config(tmp_path, store=str(prepare(_config(tmp_path)).path))
  trained = prepare(_config(tmp_path, tokenizer='bpe:300')).tokenizer
  begun = r"documents as \['…', 255\], and here it is documents as \[1, '…', 255\]"
  for tokenizer, sentence in ((trained, 'the tokenizer .*, and here it is'), (_Begun(), begun)):
    with pytest.raises(UserError, match=f'made with {sentence}'):
      prepare(config, tokenizer)
