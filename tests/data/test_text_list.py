"""Several sources are one, whatever their forms, and repeated documents can be left out."""

import dataclasses
import json
import pickle

import pyarrow as pa
import pytest
from byte_text import byte_config, documents
from pyarrow import parquet

from tokenformer_jax.data import corpus
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.data.store import find, prepare
from tokenformer_jax.data.tokenizers import load


def _write(path, texts) -> str:
  path.parent.mkdir(exist_ok=True)
  if path.suffix == '.parquet':
    parquet.write_table(pa.table({'text': texts}), path)
    return f'parquet:{path}'
  path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
  return f'files:{path}'


@pytest.fixture
def three(tmp_path) -> str:
  """A list of sources of different forms, the documents a, b, c and d."""
  first = _write(tmp_path / 'x/a.jsonl', ['a', 'b'])
  (tmp_path / 'c + c.txt').write_text('c')
  return f'{first} + files:{tmp_path}/c [+] c.txt + {_write(tmp_path / "d.parquet", ["d"])}'


def test_sources_of_a_list_follow_one_another(tmp_path, three):
  source = open_source(three, 'text')
  assert list(source.documents()) == ['a', 'b', 'c', 'd'], 'a source is lost, or out of order'
  parts = [part for part, _ in source.divide(10**6)]
  assert [text for part in parts for text in part.documents()] == ['a', 'b', 'c', 'd']
  store = prepare(byte_config(tmp_path, three, validation_fraction=0.3))
  assert sorted(documents(store) + documents(store, 'validation')) == ['a', 'b', 'c', 'd']


def test_the_fingerprint_of_a_list_covers_each_source(tmp_path, three):
  def fingerprint(spec=three) -> str:
    return open_source(spec, 'text').fingerprint()

  first, *others = three.split(' + files:')
  seen = [fingerprint(), fingerprint(' + '.join([f'files:{others[0]}', first]))]
  for path in (tmp_path / 'x/a.jsonl', tmp_path / 'c + c.txt'):
    path.write_text('{"text": "another"}\n')
    seen.append(fingerprint())
  _write(tmp_path / 'd.parquet', ['another'])
  assert len({*seen, fingerprint()}) == 5, 'a changed source of a list leads to no other store'


def test_repeated_documents_are_left_out_and_counted(tmp_path, capsys):
  texts = [f'document {i % 40}' for i in range(100)]
  spec = f'{_write(tmp_path / "a.jsonl", texts)} + {_write(tmp_path / "b.jsonl", [*texts, "new"])}'
  plain = prepare(byte_config(tmp_path, spec))
  assert 'left out' not in capsys.readouterr().err
  config = byte_config(tmp_path, spec, deduplicate=True)
  store = prepare(config)
  said = capsys.readouterr().err
  assert '160 of 201 documents of the text repeat an earlier one' in said
  found = documents(store) + documents(store, 'validation')
  assert sorted(found) == sorted({*texts, 'new'}), 'a document is lost or still repeated'
  assert store.path != plain.path, 'the store with repeated documents is taken for the one without'
  assert find(config, load('bytes')).path == store.path, 'the store is not found again'
  assert 'left out' not in capsys.readouterr().err, 'the text is read to find a store'


def test_the_first_of_equal_documents_stays(tmp_path, monkeypatch):
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 120)  # one file
  texts = ['b', 'a', '', 'b', 'c', 'a', 'd']
  spec = f'{_write(tmp_path / "a.jsonl", texts)} + {_write(tmp_path / "b.jsonl", ["c", "e", "e"])}'
  units = corpus.open_corpus(byte_config(tmp_path, spec, deduplicate=True)).units
  texts = [[piece.text for piece in one.pieces()] for one in pickle.loads(pickle.dumps(units))]
  assert texts == [['b', 'a', 'c', 'd'], ['e']], (
    'a process that reads a unit does not know what came before it'
  )


def test_validation_text_is_not_trained_on(tmp_path, capsys):
  train = _write(tmp_path / 'train.jsonl', ['a', 'b', 'c', 'a'])
  held_out = _write(tmp_path / 'held_out.jsonl', ['c', 'd', 'd'])
  store = prepare(byte_config(tmp_path, train, validation_source=held_out, deduplicate=True))
  assert (documents(store), documents(store, 'validation')) == (['a', 'b'], ['c', 'd'])
  (tmp_path / 'lone.txt').write_text('b')
  lone = f'files:{tmp_path}/lone.txt'
  store = prepare(byte_config(tmp_path, train, validation_source=lone, deduplicate=True))
  assert (documents(store), documents(store, 'validation')) == (['a', 'c'], ['b'])


def test_bad_documents_do_not_shift_the_repeated_ones(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "a"}\n{}\n{"text": "a"}\n{"text": ""}\n{"text": "b"}\n')
  bad = []
  opened = corpus.open_corpus(byte_config(tmp_path, f'files:{path}', deduplicate=True))
  pieces = dataclasses.replace(opened, bad=bad.append).pieces()
  assert [piece.text for piece in pieces] == ['a', 'b']
  assert len({str(error) for error in bad}) == 1, 'a bad document is not told'
