"""Conversations are packed whole into sequences, the same ones on every host and in every run."""

import dataclasses
import io
import json

import numpy as np
import pytest
from byte_text import byte_config

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.data import SourceConfig, Sources
from tokenformer_jax.data import marks, order, packing, shards, store, tokenizers
from tokenformer_jax.data.corpus import Piece
from tokenformer_jax.data.mixture import open_sources
from tokenformer_jax.data.order import TrainBatches, window_count
from tokenformer_jax.data.shard_writer import SplitWriter
from tokenformer_jax.errors import UserError

LENGTH = 64
END = tokenizers.ByteTokenizer.end_of_document


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  rng = np.random.default_rng(0)

  def text(most: int) -> str:
    return ''.join(rng.choice(list('abcdefgh'), rng.integers(1, most)))

  rows = [{'prompt': text(10), 'response': text(30)} for _ in range(300)]
  rows.append({'prompt': 'long', 'response': 'x' * 200})
  path = tmp_path_factory.mktemp('rows') / 'a.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  (path.parent / 'T.jinja').write_text(
    '{% for m in messages %}{% if m.role == "user" %}?{{ m.content }}!{% else %}'
    '{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}'
  )
  return path


def _config(tmp_path, source, **changes) -> TextConfig:
  values = {'rows': 'chat', 'packing': 'best_fit', 'chat_template': f'{source.parent}/T.jinja'}
  sizes = {'sequence_length': LENGTH, 'batch_size': 4}
  return byte_config(tmp_path, f'files:{source}', **{**values, **sizes, **changes})


def _documents(tokens: np.ndarray) -> list[tuple[int, ...]]:
  """The documents of a text with marks, each with its end; ends alone are left out."""
  ends = np.flatnonzero(marks.plain(tokens) == END) + 1
  parts = (tuple(part.tolist()) for part in np.split(tokens, ends))
  return [part for part in parts if len(part) > 1]


def test_rows_have_every_conversation_once_and_whole(tmp_path, source):
  made = store.prepare(_config(tmp_path, source))
  cut = store.prepare(_config(tmp_path, source, packing='cut'))
  for split in ('train', 'validation'):
    rows, plain = (getattr(one, split)[:] for one in (made, cut))
    rows, expected = rows.reshape(-1, LENGTH), _documents(plain)
    fit = [one for one in expected if len(one) < LENGTH]
    assert len(fit) >= len(expected) - 1, 'there are several long ones'
    assert sorted(_documents(rows.ravel())) == sorted(expected)
    inside = [one for row in rows for one in _documents(row)]
    assert not {*fit} - {*inside}, 'a document that fits is cut'
    goes_on = (rows[:, 0] >= 0).sum()
    assert goes_on == sum(len(one) // LENGTH for one in expected), 'a row begins with an answer'
    assert (rows >= 0).sum() == (plain >= 0).sum() == made.index.total(split, 'answers')
  size = sum(map(len, _documents(cut.train[:])))
  assert size / len(made.train) > 0.95
  shards.verify(made.path)


def test_batches_are_rows_by_the_step_whoever_reads_them(tmp_path, source):
  made = store.prepare(_config(tmp_path, source))
  rows = made.train[:].reshape(-1, LENGTH)
  count = window_count(made.train, LENGTH)
  assert count == len(rows) - 1

  def batch(step: int, *hosts: range) -> np.ndarray:
    sources, sizes = [made.train], {'batch_size': 4, 'sequence_length': LENGTH, 'seed': 7}
    parts = [TrainBatches(sources=sources, rows=host, **sizes)[step] for host in hosts]
    return np.concatenate(parts)

  for step in (0, 5, 10**9):
    expected = rows[[order.sample_index(7, step * 4 + r, count) for r in range(4)]]
    np.testing.assert_array_equal(batch(step, range(4))[:, :-1], expected)
    np.testing.assert_array_equal(batch(step, range(2), range(2, 4))[:, :-1], expected)


def test_a_store_of_rows_is_for_their_length_and_other_stores_stay(tmp_path, source):
  config = _config(tmp_path, source)
  made = store.make(dataclasses.replace(config, store=str(tmp_path / 'rows')), workers=2)
  assert made.digest == store.prepare(config).digest
  named = dataclasses.replace(config, store=str(tmp_path / 'rows'))
  with pytest.raises(
    UserError, match=r'made with config.data.sequence_length=64, and here it is 32'
  ):
    store.prepare(dataclasses.replace(named, sequence_length=32))
  with pytest.raises(
    UserError, match=r'made with config.data.packing=best_fit, and here it is cut'
  ):
    store.prepare(dataclasses.replace(named, packing='cut'))
  plain = dataclasses.replace(named, packing='cut', store=str(tmp_path / 'plain'))
  assert 'sequence_length' not in store.make(plain).index.made_from
  with pytest.raises(
    UserError, match=r'made with config.data.packing=cut, and here it is best_fit'
  ):
    store.prepare(dataclasses.replace(plain, packing='best_fit'))


def test_a_mixture_packs_conversations_alone(tmp_path, source):
  text = tmp_path / 'text.txt'
  text.write_text('some words and more\n' * 200)
  sources = {
    'chat': SourceConfig(source=f'files:{source}', rows='chat', weight=0.5),
    'text': SourceConfig(source=f'files:{text}', weight=0.5),
  }
  config = dataclasses.replace(_config(tmp_path, source, rows='text'), mixture=Sources(sources))
  stores = open_sources(config, 0).stores
  packed = {name: 'packing' in one.index.made_from for name, one in stores.items()}
  assert packed == {'chat': True, 'text': False}
  assert stores['chat'].digest == store.prepare(_config(tmp_path, source)).digest


def _pack(documents, size: int) -> list[list[int]]:
  rows = packing.pack(documents, size, tokenizers.ByteTokenizer())
  return [row.tolist() for row in rows]


def _random(*sizes: int) -> list[np.ndarray]:
  rng = np.random.default_rng(1)
  return [np.append(rng.integers(0, 200, size - 1), END).astype(np.int32) for size in sizes]


LEAD = marks.flip(END)


def test_the_best_fit_is_taken():
  three, six, five, four, nine = _random(3, 6, 5, 4, 9)
  rows = _pack([three, six, five, four, nine], 10)
  assert rows == [[LEAD, *nine], [LEAD, *six, *three], [LEAD, *five, *four]]


def test_a_long_document_is_cut_into_rows_of_which_the_last_is_filled_up():
  short, long, other = _random(3, 24, 2)
  rows = _pack([short, long, other], 10)
  led = [LEAD, *long]
  assert rows == [led[:10], led[10:20], [*led[20:], *short, *other]]
  assert _pack([short], 6) == [[LEAD, *short, LEAD, LEAD]], 'the rest is not filled up'


def test_blocks_bound_the_memory_and_lose_nothing(monkeypatch):
  monkeypatch.setattr(packing, 'BLOCK', 1000)
  tokenizer, file = tokenizers.ByteTokenizer(), io.BytesIO()
  writer = SplitWriter(file, np.dtype(np.uint16), tokenizer, row=10)
  documents = _random(*np.random.default_rng(2).integers(2, 30, 300))
  for ids in documents:
    writer.add(Piece('train', '', answers=()), ids)
    assert sum(map(len, writer._waiting)) < 1000
  counts = writer.result()
  tokens = marks.unpack(np.frombuffer(file.getvalue(), np.uint16))
  assert counts.tokens == len(tokens) and len(tokens) % 10 == 0
  assert sorted(_documents(tokens)) == sorted(tuple(one.tolist()) for one in documents)
