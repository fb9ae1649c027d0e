"""Text that spells the end of documents is counted, and parted there on demand."""

import dataclasses
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from byte_text import byte_config, documents, total
from pyarrow import parquet

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.data import SourceConfig, Sources
from tokenformer_jax.data import corpus, mixture, reading, store
from tokenformer_jax.errors import UserError

END = '<|endoftext|>'
STORIES = [
  f'Once there was a cat number {i}.\n\n  It sat{" and sat" * (i % 7)}.' for i in range(40)
]
TEXT = f'\n{END}\n'.join(STORIES)


def _config(folder: Path, source: str = '', **changes) -> TextConfig:
  if not source:
    (folder / 'train.txt').write_text(TEXT)
    source = f'files:{folder}/train.txt'
  return byte_config(folder, source, **{'validation_fraction': 0.2, **changes})


def _all_documents(made: store.Store) -> list[str]:
  return documents(made) + documents(made, 'validation')


@pytest.mark.parametrize('workers', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_spelled_ends_are_counted_in_one_line_that_names_the_key(
  tmp_path, capsys, workers, monkeypatch
):
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 400)
  (tmp_path / 'more.txt').write_text(f'{TEXT}</s>\na<eos><|end_of_text|>b</s>')
  config = _config(tmp_path, f'files:{tmp_path}/more.txt', tokenizer='bpe:300')
  made = store.make(config, workers=workers)
  assert total(made, 'documents') == 2 and len(made.index.shards) > 2
  (line,) = [line for line in capsys.readouterr().err.splitlines() if END in line]
  assert line == (
    f'{config.source} spells the end of a document ({END} 39 times, </s> 2 times, <eos> 1 time, '
    '<|end_of_text|> 1 time), which is read as text; to part documents there, set '
    f"config.data.document_separator='{END}'"
  )
  store.prepare(config)
  assert END not in capsys.readouterr().err, 'each start says it again'


def test_the_end_of_the_own_tokenizer_counts_and_broken_characters_do_not(tmp_path, capsys):
  rows = tmp_path / 'rows.jsonl'
  rows.write_text('\n'.join(json.dumps({'text': f'{i} \ufffd'}) for i in range(9)))
  store.prepare(_config(tmp_path, f'files:{rows}'))
  assert 'spells' not in capsys.readouterr().err


def _sources(folder: Path) -> list[str]:
  """Return the stories in each form of a source."""
  with gzip.open(folder / 'packed.txt.gz', 'wt') as file:
    file.write(TEXT)
  (folder / 'two').mkdir()
  half = TEXT.index(END, len(TEXT) // 2)
  (folder / 'two/a.txt').write_text(TEXT[: half + len(END)])
  (folder / 'two/b.txt').write_text(f'{TEXT[half + len(END) :]}\r\n{END}\r\n')
  rows = [{'text': END.join(STORIES[i : i + 3])} for i in range(0, 40, 3)]
  (folder / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  parquet.write_table(pa.Table.from_pylist(rows), folder / 'rows.parquet')
  names = 'packed.txt.gz', 'two', 'rows.jsonl', 'two/a.txt + files:{}/two/b.txt'
  sources = [f'files:{folder}/{name}'.format(folder) for name in names]
  return ['', *sources, f'parquet:{folder}/rows.parquet']


def test_a_separator_parts_the_text_of_every_source(tmp_path, capsys):
  for source in _sources(tmp_path):
    made = store.prepare(_config(tmp_path, source, document_separator=END))
    assert sorted(_all_documents(made)) == sorted(STORIES), source
    assert len(documents(made, 'validation')) > 2, 'documents are not held out by their text'
  assert 'spells' not in capsys.readouterr().err


@pytest.mark.parametrize('size', [1, 13, 50, 333, 5000])
def test_a_large_file_is_parted_in_units(tmp_path, monkeypatch, size):
  monkeypatch.setattr(corpus, 'UNIT_BYTES', size)
  monkeypatch.setattr(reading, '_CHUNK_BYTES', 64)
  (source,) = corpus.open_corpus(_config(tmp_path, document_separator=END)).source.members()
  units = [one for one, _ in source.divide(size)]
  assert len(units) == -(-len(TEXT.encode()) // size)
  assert [text for one in units for text in one.documents()] == STORIES


def test_a_file_longer_than_a_document_may_be_is_parted(tmp_path, monkeypatch):
  monkeypatch.setattr(reading, 'LONGEST_DOCUMENT', 200)
  monkeypatch.setattr(reading, '_CHUNK_BYTES', 64)
  config = _config(tmp_path, document_separator=END)
  assert sorted(_all_documents(store.prepare(config))) == sorted(STORIES)
  with pytest.raises(UserError, match='has a document of more than'):
    store.prepare(dataclasses.replace(config, document_separator='<never>'))


def test_the_separator_belongs_to_a_store_and_to_the_text_of_a_mixture(tmp_path):
  config = _config(tmp_path, document_separator=END)
  plain = dataclasses.replace(config, document_separator='')
  assert store.store_folder(config) != store.store_folder(plain)
  made = store.make(dataclasses.replace(config, store=str(tmp_path / 'named')))
  for named, other, sentence in (
    (made.path, plain, f'separator={END.replace("|", "[|]")}, and here it is empty'),
    (
      store.prepare(plain).path,
      config,
      f'separator=empty, and here it is {END.replace("|", "[|]")}',
    ),
  ):
    with pytest.raises(UserError, match=sentence):
      store.prepare(dataclasses.replace(other, store=str(named)))
  chat = tmp_path / 'chat.jsonl'
  rows = [{'prompt': f'{i} {END}?', 'response': 'yes'} for i in range(9)]
  chat.write_text('\n'.join(map(json.dumps, rows)))
  sources = {
    'text': SourceConfig(source=config.source, weight=0.5),
    'chat': SourceConfig(source=f'files:{chat}', rows='chat', weight=0.5),
  }
  mixed = dataclasses.replace(config, mixture=Sources(sources), sequence_length=16)
  stores = mixture.open_sources(mixed, 0).stores
  assert [total(one, 'documents') for one in stores.values()] == [9, len(STORIES)]
