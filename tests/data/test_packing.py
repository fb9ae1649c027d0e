"""Conversations are packed whole into sequences, the same ones on every host and in every run."""

import dataclasses
import itertools

import numpy as np
import pytest
import short_chats
from byte_text import byte_config

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.data import SourceConfig, Sources
from tokenformer_jax.data import marks, order, shard_writer, shards, store, tokenizers
from tokenformer_jax.data.mixture import open_sources
from tokenformer_jax.data.order import TrainBatches, window_count
from tokenformer_jax.errors import UserError

LENGTH = 64
END = tokenizers.ByteTokenizer.end_of_document
LEAD = np.array([marks.flip(END)], np.int32)


@pytest.fixture(scope='module')
def chats(tmp_path_factory):
  long = {'prompt': 'long', 'response': 'x' * 200}
  return short_chats.write(tmp_path_factory.mktemp('rows'), long)


def _config(tmp_path, chats, **changes) -> TextConfig:
  values = {'packing': 'best_fit', 'sequence_length': LENGTH, 'batch_size': 4}
  return byte_config(tmp_path, **{**values, **chats, **changes})


def _documents(tokens) -> list[list[int]]:
  """The documents of rows, with marks; a cut one in pieces."""
  found = []
  for row in tokens[:].reshape(-1, LENGTH + 1):
    ids = row[row != marks.NO_TOKEN]
    assert (row[: len(ids)] == ids).all(), 'padding inside'
    ids = ids[1:]  # the lead, or the last token of the row before
    ends = np.flatnonzero(marks.plain(ids) == END) + 1
    found += [part.tolist() for part in np.split(ids, ends) if len(part)]
  return found


def test_rows_have_every_conversation_once_and_whole(tmp_path, chats):
  made = store.prepare(_config(tmp_path, chats))
  cut = store.prepare(_config(tmp_path, chats, packing='cut'))
  for split in ('train', 'validation'):
    packed, plain = getattr(made, split), getattr(cut, split)[:]
    ends = np.flatnonzero(marks.plain(plain) == END) + 1
    whole = [part.tolist() for part in np.split(plain, ends) if len(part)]
    documents = _documents(packed)
    fits = sorted(one for one in whole if len(one) <= LENGTH)
    assert sorted(one for one in documents if one in fits) == fits, 'a document is cut'
    (rest,) = [one for one in whole if len(one) > LENGTH] or [[]]
    pieces = [one for one in documents if one not in fits]
    assert sorted(itertools.chain(*pieces)) == sorted(rest), 'a long document is not all there'
    assert sum(map(len, documents)) == len(plain)
  filled = (made.train[:] != marks.NO_TOKEN).mean()
  assert filled > 0.97, filled
  shards.verify(made.path)
  assert (made.train[:] >= 0).sum() >= made.index.total('train', 'answers')


def test_batches_are_rows_by_the_step_whoever_reads_them(tmp_path, chats):
  config = _config(tmp_path, chats)
  made = store.prepare(config)
  rows = made.train[:].reshape(-1, LENGTH + 1)
  assert window_count(made.train, LENGTH) == len(rows)

  sizes = {'batch_size': 4, 'sequence_length': LENGTH, 'seed': 7}
  batches = TrainBatches(sources=[made.train], rows=range(1, 4), **sizes)
  for step in (0, 5, 10**9):
    expected = rows[[order.sample_index(7, step * 4 + r, len(rows)) for r in range(1, 4)]]
    np.testing.assert_array_equal(batches[step], expected)
  validation = np.concatenate([*order.validation_batches(made, config, range(4))])
  kept = validation[(validation != marks.NO_TOKEN).any(axis=1)]
  np.testing.assert_array_equal(kept.ravel(), made.validation[:])


def test_a_store_of_rows_is_for_their_length_and_other_stores_stay(tmp_path, chats):
  config = _config(tmp_path, chats)
  made = store.make(dataclasses.replace(config, store=str(tmp_path / 'rows')), workers=2)
  assert made.digest == store.prepare(config).digest
  named = dataclasses.replace(config, store=str(tmp_path / 'rows'))
  plain = dataclasses.replace(named, packing='cut', store=str(tmp_path / 'plain'))
  assert 'sequence_length' not in store.make(plain).index.made_from
  for made, changes, sentence in (
    (named, {'sequence_length': 32}, 'sequence_length=64, and here it is 32'),
    (named, {'packing': 'cut'}, 'packing=best_fit, and here it is cut'),
    (plain, {'packing': 'best_fit'}, 'packing=cut, and here it is best_fit'),
  ):
    with pytest.raises(UserError, match=f'made with config.data.{sentence}'):
      store.prepare(dataclasses.replace(made, **changes))


def test_a_mixture_packs_its_conversations(tmp_path, chats):
  text = tmp_path / 'text.txt'
  text.write_text('some words and more\n' * 200)
  sources = {
    'chat': SourceConfig(source=chats['source'], rows='chat', weight=0.5),
    'text': SourceConfig(source=f'files:{text}', weight=0.5),
  }
  config = dataclasses.replace(_config(tmp_path, chats, rows='text'), mixture=Sources(sources))
  mixture = open_sources(config, 0)
  assert [one.index.packed for one in mixture.stores.values()] == [True, False]


def _random(sizes) -> list[np.ndarray]:
  rng = np.random.default_rng(1)
  return [np.append(rng.integers(0, 200, size - 1), END).astype(np.int32) for size in sizes]


def _pack(*arguments) -> list[np.ndarray]:
  return [*shard_writer.pack_rows(*arguments)]


def test_the_best_fit_is_taken(tmp_path):
  documents = _random([3, 6, 5, 4, 9])  # in rows of nine and a lead: 9, 6 + 3, 5 + 4
  rows = _pack(documents, 10, LEAD)
  assert [*map(len, rows)] == [10] * 3 and all((row != marks.NO_TOKEN).all() for row in rows)
  expected = [np.concatenate(p) for p in ([documents[4]], documents[1::-1], documents[2:4])]
  np.testing.assert_array_equal([row[1:] for row in rows], expected)


def test_a_long_document_is_cut_into_rows_that_share_a_token_and_the_rest_is_filled_up():
  long, short = _random([24, 3])
  rows = _pack([long, short], 10, LEAD)
  led = np.concatenate([LEAD, long])
  for start, row in zip((0, 9), rows, strict=False):
    np.testing.assert_array_equal(row, led[start : start + 10])
  assert rows[2].tolist() == [*led[18:], *short], 'the rest is not filled up'
  assert len(rows) == 3


def test_documents_with_a_beginning_fill_a_row_from_its_start():
  documents = _random([10, 6, 4])
  rows = _pack(documents, 10, LEAD[:0])
  assert [row.tolist() for row in rows] == [
    documents[0].tolist(),
    [*documents[1].tolist(), *documents[2].tolist()],
  ]


def test_blocks_bound_the_memory_and_lose_nothing(monkeypatch):
  monkeypatch.setattr(shard_writer, '_BLOCK_TOKENS', 100)
  monkeypatch.setattr(shard_writer, '_BLOCK_ROWS', 1)
  documents, rows = _random(np.random.default_rng(2).integers(2, 30, 200)), []
  packer = shard_writer.Packer(33, LEAD, rows.append)
  for document in documents:
    packer.add(document)
    assert packer._waiting < 100 + 30
  packer.flush()
  ids = np.concatenate([row[1:] for row in rows])
  expected = np.concatenate(documents)
  assert sorted(ids[ids != marks.NO_TOKEN]) == sorted(expected)


@pytest.mark.parametrize('size', [2**15 - 1, 2**15])
def test_padding_is_no_id_of_the_tokenizer(size):
  dtype = shards.token_dtype(size + 1, marked=True)
  ids = np.array([0, size - 1, marks.flip(size - 1), marks.NO_TOKEN], np.int32)
  np.testing.assert_array_equal(marks.unpack(marks.pack(ids, dtype), padded=True), ids)
