"""Parquet files have a document a row, are read page by page, and are refused where damaged."""

import json
import os
import pickle
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data import corpus
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.errors import UserError

TEXTS = [f'döcument {i} ' * (i % 7) for i in range(1000)]
DOCUMENTS = [text for text in TEXTS if text]


def _write(path, texts=TEXTS, **options) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  columns = texts if isinstance(texts, pa.Table) else pa.table({'text': texts, 'n': [*texts]})
  parquet.write_table(columns, path, **options)
  return f'parquet:{path}'


def _read(spec, text_field='text') -> list[str]:
  return list(open_source(spec, text_field).documents())


def test_a_parquet_file_has_a_document_a_row(tmp_path):
  spec = _write(tmp_path / 'a.parquet', compression='zstd', row_group_size=33)
  assert _read(spec) == DOCUMENTS, 'a row is lost, repeated or changed'


@pytest.mark.parametrize('kind', [pa.large_string(), pa.binary(), 'dictionary'])
def test_text_may_be_stored_in_other_types(tmp_path, kind):
  column = pa.array(TEXTS)
  column = column.dictionary_encode() if kind == 'dictionary' else column.cast(kind)
  assert _read(_write(tmp_path / 'a.parquet', pa.table({'text': column}))) == DOCUMENTS


def test_a_dotted_name_is_a_field_of_a_struct(tmp_path):
  rows = [{'text': text, 'n': 1} for text in TEXTS]
  spec = _write(tmp_path / 'a.parquet', pa.table({'meta': rows, 'a.b': TEXTS}))
  assert _read(spec, 'meta.text') == DOCUMENTS == _read(spec, 'a.b')
  for name in ('meta.txt', 'meta.text.x', 'a.c'):
    with pytest.raises(UserError, match=f"has no field '{name}'"):
      _read(spec, name)


def test_a_folder_is_its_parquet_files_in_order(tmp_path):
  for i in (1, 0):
    _write(tmp_path / f'data/train-0000{i}-of-00002.parquet', TEXTS[i::2])
  (tmp_path / 'README.md').write_text('a set')
  expected = [text for text in TEXTS[0::2] + TEXTS[1::2] if text]
  assert _read(f'parquet:{tmp_path}') == expected
  assert _read(f'parquet:{tmp_path}/data/*.parquet') == expected
  with pytest.raises(UserError, match=r'parquet:.*README\.md, which matches no file that ends in'):
    _read(f'parquet:{tmp_path}/README.md')
  with pytest.raises(UserError, match=r'parquet:.*none, which matches no file; check the path'):
    _read(f'parquet:{tmp_path}/none')


def test_a_column_that_is_not_there_is_named(tmp_path):
  spec = _write(tmp_path / 'a.parquet')
  assert _read(spec, 'n') == DOCUMENTS, 'config.data.text_field is ignored'
  with pytest.raises(UserError, match=r"a\.parquet has no field 'txt'.*did you mean 'text'"):
    _read(spec, 'txt')


@pytest.mark.parametrize(
  ('column', 'sentence'),
  [
    (pa.array(['a', None]), r'a\.parquet, row 2, has a NoneType in the field'),
    (pa.array([['a'], ['b']]), r'a\.parquet, row 1, has a list in the field'),
    (
      pa.array([b'a', b'\xff']).view(pa.string()),
      r'a\.parquet is damaged or is not a Parquet file',
    ),
  ],
  ids=['null', 'list', 'bytes'],
)
def test_a_row_without_text_is_named(tmp_path, column, sentence):
  with pytest.raises(UserError, match=sentence):
    _read(_write(tmp_path / 'a.parquet', pa.table({'text': column}), row_group_size=1))


@pytest.mark.parametrize('damage', ['cut short', 'no table', 'garbage'])
def test_a_damaged_file_is_an_error(tmp_path, damage):
  spec = _write(tmp_path / 'a.parquet', compression='zstd')
  path = tmp_path / 'a.parquet'
  whole = path.read_bytes()
  damaged = {'cut short': whole[:-9], 'no table': b'text', 'garbage': whole[:40] + b'x' * 60}
  path.write_bytes(damaged[damage] + (whole[100:] if damage == 'garbage' else b''))
  with pytest.raises(UserError, match=r'a\.parquet is damaged or is not a Parquet file \('):
    _read(spec)
  path.unlink()
  with pytest.raises(UserError, match='matches no file'):
    _read(spec)


@pytest.mark.parametrize('size', [1, 20_000, 10**9])
def test_parts_are_the_whole_in_order(tmp_path, size):
  _write(tmp_path / 'a.parquet', row_group_size=100, use_dictionary=False, compression='none')
  _write(tmp_path / 'b.parquet', ['last'])
  source = open_source(f'parquet:{tmp_path}', 'text')
  parts = [part for part, _ in source.divide(size)]
  assert len(parts) == {1: 11, 20_000: 6, 10**9: 2}[size], 'a large file is not divided'
  assert [text for part in parts for text in part.documents()] == [*DOCUMENTS, 'last']
  assert len({part.fingerprint() for part in parts}) == len(parts), 'parts are taken for another'
  assert pickle.loads(pickle.dumps(parts)) == parts, 'no other process can read a part'


def test_a_large_row_group_is_read_page_by_page(tmp_path):
  texts = [os.urandom(500).hex() for _ in range(10_000)]
  spec = _write(tmp_path / 'a.parquet', pa.table({'text': texts}), use_dictionary=False)
  assert parquet.ParquetFile(tmp_path / 'a.parquet').num_row_groups == 1
  del texts
  before = pa.total_allocated_bytes()
  largest = 0
  for _ in open_source(spec, 'text').documents():
    largest = max(largest, pa.total_allocated_bytes() - before)
  assert largest < 6 * 2**20, f'a row group of 10 MB takes {largest >> 20} MiB'


@pytest.mark.parametrize('form', ['jsonl', 'csv', 'parquet'])
def test_few_documents_are_held_at_a_time(tmp_path, form):
  size, texts = 2**20, [letter * 2**20 for letter in 'abcdefgh']
  if form == 'parquet':
    _write(tmp_path / 'a.parquet', pa.table({'text': texts}), row_group_size=2)
  elif form == 'jsonl':
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    (tmp_path / 'a.jsonl').write_text(lines)
  else:
    (tmp_path / 'a.csv').write_text('\n'.join(['text', *texts]))
  spec = f'{"parquet" if form == "parquet" else "files"}:{tmp_path}'
  held = []
  units = corpus.open_corpus(TextConfig(source=spec)).units
  tracemalloc.start()
  try:
    for unit in units:
      pieces = unit.pieces()
      while (piece := next(pieces, None)) is not None:
        held.append(tracemalloc.get_traced_memory()[0] / size)
        del piece
  finally:
    tracemalloc.stop()
  most = 7 if form == 'csv' else 3.5  # the library has four bytes a character
  assert len(held) == 8 and max(held) < most, f'documents in memory: {held}'
