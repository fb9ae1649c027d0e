"""Training and validation text have nothing in common, also where there is one file only."""

import dataclasses
import gzip
import json

import numpy as np
import pytest
from byte_text import byte_config

from tokenformer_jax.data import corpus, lone_text, reading, tokenizers
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.data.store import find, prepare
from tokenformer_jax.errors import UserError

LINES = ''.join(f'line {i}, naïve {"x" * (i % 70)}\n' for i in range(2000))
NO_LINES = 'ä€🙂' * 7000
TITLE = f'Title\n{NO_LINES}'


def _write(path, content) -> str:
  content = content.encode()
  path.write_bytes(gzip.compress(content) if path.suffix == '.gz' else content)
  return f'files:{path}'


def _texts(store) -> tuple[str, str]:
  """The text of both splits, each of which is one document."""
  for split in corpus.SPLITS:
    ends = np.flatnonzero(getattr(store, split)[:] == store.tokenizer.end_of_document)
    assert ends.tolist() == [len(getattr(store, split)) - 1], f'{split} is not one whole document'
    assert store.index.total(split, 'documents') == 1
  return tuple(store.tokenizer.decode(tokens[:-1]) for tokens in (store.train, store.validation))


@pytest.mark.parametrize('name', ['a.txt', 'a.txt.gz'])
@pytest.mark.parametrize('content', [LINES, NO_LINES, TITLE], ids=['lines', 'no_lines', 'title'])
@pytest.mark.parametrize('piece', [2**20, 1000])
def test_the_last_part_of_a_lone_file_is_for_validation(
  tmp_path, monkeypatch, name, content, piece
):
  monkeypatch.setattr(lone_text, '_PIECE_BYTES', piece)
  spec = _write(tmp_path / name, content)
  train, validation = _texts(prepare(byte_config(tmp_path, spec, validation_fraction=0.1)))
  assert train + validation == content, 'text is lost, repeated, or in both splits'
  share = len(validation.encode()) / len(content.encode())
  assert 0.1 <= share < 0.16, 'the validation split is of another size than asked for'
  if content is LINES:
    assert train.endswith('\n'), 'the cut tears a line'


def test_the_pieces_of_a_lone_file_are_short_and_end_where_lines_do(tmp_path, monkeypatch):
  monkeypatch.setattr(lone_text, '_PIECE_BYTES', 1000)
  source = open_source(_write(tmp_path / 'a.txt', LINES), 'text')
  lone = lone_text.LoneText(source.lone_file())
  pieces = list(lone.pieces(0, lone.size()))
  assert max(len(piece.encode()) for piece in pieces) <= 1000, 'memory is not bounded'
  assert all(piece.endswith('\n') for piece in pieces), 'a piece tears a line'
  assert ''.join(pieces) == LINES, 'text is lost or repeated between pieces'


@pytest.mark.parametrize('content', ['ab', 'äö', 'a\nb', '\n\n\n\n', '\ufeffab'])
@pytest.mark.parametrize('fraction', [0.01, 0.5, 0.99])
def test_the_shortest_texts_are_cut_between_characters(tmp_path, content, fraction):
  spec = _write(tmp_path / 'a.txt', content)
  config = byte_config(tmp_path, spec, validation_fraction=fraction)
  try:
    train, validation = _texts(prepare(config))
  except UserError as error:
    assert 'split is empty' in str(error), 'a short text is another error'
    assert content.startswith(('\ufeff', 'ä')), 'two characters are not two splits'
  else:
    assert train + validation == content.removeprefix('\ufeff'), 'a character is torn'


def test_a_long_document_is_encoded_in_pieces_and_stays_one(tmp_path, monkeypatch):
  for name, content in {'a': LINES, 'b': NO_LINES, 'c': 'c', 'd': 'd', 'e': 'e'}.items():
    spec = _write(tmp_path / f'{name}.txt', content).replace(f'{name}.txt', '*.txt')
  whole = prepare(byte_config(tmp_path, spec, validation_fraction=0.4))
  monkeypatch.setattr(corpus, '_LONGEST_WHOLE', 2000)
  monkeypatch.setattr(corpus, '_PIECE_CHARACTERS', 1000)
  config = byte_config(tmp_path, spec, validation_fraction=0.4, cache_dir=str(tmp_path / 'other'))
  pieces = list(corpus.open_corpus(config).pieces())
  assert max(len(piece.text) for piece in pieces) <= 1000, 'memory is not bounded'
  assert prepare(config).digest == whole.digest, 'pieces change the text, its end, or its split'


@pytest.mark.parametrize('content', [LINES, NO_LINES], ids=['lines', 'no_lines'])
def test_a_long_lone_file_is_divided_into_units(tmp_path, monkeypatch, content):
  monkeypatch.setattr(corpus, 'UNIT_BYTES', 8000)
  spec = _write(tmp_path / 'a.txt', content)
  units = corpus.open_corpus(byte_config(tmp_path, spec)).units
  parts = [''.join(piece.text for piece in unit.pieces()) for unit in units]
  assert len(units) > 5 and max(len(part.encode()) for part in parts) <= 12_000
  if content is LINES:
    assert all(part.endswith('\n') for part in parts), 'a unit tears a line'
  train, validation = _texts(prepare(byte_config(tmp_path, spec)))
  assert ''.join(parts) == train + validation == content, 'text is lost or repeated between units'
  packed_spec = _write(tmp_path / 'b.txt.gz', content)
  assert len(corpus.open_corpus(byte_config(tmp_path, packed_spec)).units) <= 2, (
    'it cannot be sought'
  )


def test_a_byte_that_is_not_text_is_found_in_a_lone_file(tmp_path, monkeypatch):
  monkeypatch.setattr(lone_text, '_PIECE_BYTES', 100)
  (tmp_path / 'a.txt').write_bytes(b'text\n' * 100 + b'\xff')
  with pytest.raises(UserError, match=r'a\.txt is not UTF-8 \(byte 500 is 0xff\)'):
    prepare(byte_config(tmp_path, f'files:{tmp_path}/a.txt'))


def test_a_tokenizer_is_trained_on_the_training_part_of_a_lone_file(tmp_path):
  spec = _write(tmp_path / 'a.txt', 'ab' * 5000 + '\n' + 'qz' * 2000)
  store = prepare(byte_config(tmp_path, spec, tokenizer='bpe:300', validation_fraction=0.3))
  assert store.bytes_per_token('train') > 4 > 1.1 > store.bytes_per_token('validation'), (
    'the tokenizer has seen the validation text'
  )


def test_validation_may_have_a_source_of_its_own(tmp_path):
  train = _write(tmp_path / 'train.txt', LINES)
  held_out = _write(tmp_path / 'held_out.txt', NO_LINES)
  config = byte_config(tmp_path, train, validation_source=held_out)
  assert _texts(prepare(config)) == (LINES, NO_LINES), 'a source is not a split as it is'
  assert find(config, tokenizers.load('bytes')).path == prepare(config).path, (
    'the store is not found again'
  )
  without = prepare(dataclasses.replace(config, validation_source=''))
  assert without.path != prepare(config).path, 'a store of another validation text is used'
  before = prepare(config).path
  _write(tmp_path / 'held_out.txt', 'changed')
  assert prepare(config).path != before, 'changed validation text leads to no other store'


def test_a_validation_source_that_cannot_be_one(tmp_path):
  train = _write(tmp_path / 'train.txt', LINES)
  _write(tmp_path / 'empty.txt', '')
  for spec, sentence in {
    'nonsense': r"config\.data\.validation_source is 'nonsense'; it must be stdlib, files:GLOB",
    f'files:{tmp_path}/no.txt': r'validation_source is files:.*no\.txt, which matches no file',
    f'files:{tmp_path}/empty.txt': r'validation_source is files:.*empty\.txt, which holds no text',
    f'files:{tmp_path}/../{tmp_path.name}/t*.txt': r'has /.*train\.txt and config\.data\.source=',
  }.items():
    with pytest.raises(UserError, match=sentence):
      prepare(byte_config(tmp_path, train, validation_source=spec))
  (tmp_path / 'link.txt').symlink_to(tmp_path / 'train.txt')
  link = f'files:{tmp_path}/link.txt'
  with pytest.raises(UserError, match=r'source=.* has .*link\.txt twice; leave it out'):
    corpus.open_corpus(byte_config(tmp_path, f'{train} + {link}'))
  with pytest.raises(UserError, match=r'py and config\.data\.source=stdlib has it'):
    corpus.open_corpus(byte_config(tmp_path, 'stdlib', validation_source='stdlib'))


@pytest.mark.parametrize(
  ('fraction', 'documents', 'moved'),
  [
    (1e-9, (13, 1), '0 characters'),
    (0.5, (5, 9), ''),
    (1 - 1e-9, (1, 13), 'every document'),
  ],
)
def test_a_small_source_has_a_document_in_each_split(tmp_path, capsys, fraction, documents, moved):
  lines = [json.dumps({'text': f'document {i} {i * i} '}) for i in range(14)]
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join(lines))
  config = byte_config(tmp_path, f'files:{path}', validation_fraction=fraction)
  store = prepare(config)
  assert (
    store.index.total('train', 'documents'),
    store.index.total('validation', 'documents'),
  ) == documents
  said = capsys.readouterr().err
  assert (f'holds out {moved} by' in said) == bool(moved)
  path.write_text('\n'.join(reversed(lines)))
  other = prepare(config)
  assert sorted(other.validation[:]) == sorted(store.validation[:]), (
    'the order of documents chooses'
  )


@pytest.mark.parametrize(
  ('fraction', 'by_hash', 'documents'),
  [(0.15, '0 characters', 2), (0.25, '6 characters', 3), (0.35, '', 2)],
)
def test_a_split_of_little_text_gets_its_fraction(tmp_path, capsys, fraction, by_hash, documents):
  """One short page would be too few tokens for a sequence."""
  path = tmp_path / 'a.jsonl'
  path.write_text('\n'.join(json.dumps({'text': f'part {i}'}) for i in range(10)))
  store = prepare(byte_config(tmp_path, f'files:{path}', validation_fraction=fraction))
  assert store.index.total('validation', 'documents') == documents
  assert (f'holds out {by_hash} by their hashes' in capsys.readouterr().err) == bool(by_hash)


def test_equal_documents_cannot_be_split(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"text": "the same"}\n' * 3)
  with pytest.raises(UserError, match='has 3 documents; add documents'):
    prepare(byte_config(tmp_path, f'files:{path}'))


def test_a_lone_file_may_be_longer_than_a_document(tmp_path, monkeypatch):
  monkeypatch.setattr(reading, 'LONGEST_DOCUMENT', 1000)
  train, validation = _texts(prepare(byte_config(tmp_path, _write(tmp_path / 'a.txt', LINES))))
  assert train + validation == LINES
