"""A store says where its documents begin, whatever tokens are inside them."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import short_chats
import tokenizers as hf
from byte_text import byte_config

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.data import SourceConfig, Sources
from tokenformer_jax.config.mixture import source_configs
from tokenformer_jax.data import marks, mixture, shards, store
from tokenformer_jax.data.tokenizers import HuggingFaceTokenizer
from tokenformer_jax.errors import UserError

LENGTH, BATCH = 48, 4
NEWLINE, END = 1, 2
# As ChatML: each turn ends with the tokenizer's end of document, and a line end follows it.
_TURNS = (
  '{% for m in messages %}{% if m.role == "user" %}q{{ m.content }}</s>n{% else %}'
  '{% generation %}{{ m.content }}</s>{% endgeneration %}n{% endif %}{% endfor %}'
)


def _tokenizer(split: str, begin: tuple[int, ...] | None = None) -> HuggingFaceTokenizer:
  """Return a tokenizer of words between matches of `split`, which begins its texts with `begin`."""
  words = ('<unk>', 'n', '</s>', '<s>', *'qabcdefghij ')
  tokenizer = hf.Tokenizer(hf.models.WordLevel({w: i for i, w in enumerate(words)}, '<unk>'))
  tokenizer.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(split), 'isolated')
  tokenizer.add_special_tokens(['<s>', '</s>'])
  return HuggingFaceTokenizer(tokenizer, named={'eos_token': '</s>'}, begin=begin)


@pytest.fixture(scope='module')
def chats(tmp_path_factory):
  """Return the keys of `data` of conversations of two questions and two answers."""
  root, rng = tmp_path_factory.mktemp('chats'), np.random.default_rng(0)

  def turn(role: str) -> dict[str, str]:
    return {'role': role, 'content': ''.join(rng.choice(list('bcdefghij'), rng.integers(1, 6)))}

  rows = [{'messages': [turn(role) for role in ('user', 'assistant') * 2]} for _ in range(120)]
  (root / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  (root / 'turns.jinja').write_text(_TURNS)
  template = str(root / 'turns.jinja')
  return {'source': f'files:{root}/rows.jsonl', 'rows': 'chat', 'chat_template': template}


def _config(folder: Path, **changes) -> TextConfig:
  sizes = {'sequence_length': LENGTH, 'batch_size': BATCH, 'documents': 'separate'}
  return byte_config(folder, **{**sizes, **changes})


def _rows(config: TextConfig, tokenizer=None, length: int = LENGTH) -> np.ndarray:
  """Return some rows of training, in a stage of this length."""
  size = config.batch_size * config.sequence_length // length
  stage = dataclasses.replace(config, sequence_length=length, batch_size=size)
  opened = mixture.open_sources(config, 0, tokenizer).at_stage(stage)
  return np.concatenate([*opened.train_batches(range(size), 0, 3)])


def _firsts(row: np.ndarray, first: int = -1) -> list[int]:
  """Return the inputs of a row that begin a document, as the step finds them."""
  ids = np.where(row < -1, marks.flip(row), row)[None, :-1]
  return np.flatnonzero(marks.begins(ids, first)).tolist()


@pytest.mark.parametrize('packing', ['cut', 'best_fit'])
@pytest.mark.parametrize('begin', [None, (), (3,)], ids=['its end', 'nothing', '<s>'])
def test_a_conversation_is_one_document_whatever_ends_its_turns(tmp_path, chats, packing, begin):
  config = _config(tmp_path, **chats, packing=packing)
  rows = _rows(config, _tokenizer('.', begin))
  firsts = [_firsts(row) for row in rows]
  assert sum(map(len, firsts)) > 1.3 * len(rows), 'rows have one document'
  for row, found in zip(rows, firsts, strict=True):
    ids = marks.plain(row)
    expected = {0}
    if packing == 'best_fit' and ids[0] == END:
      expected.add(int(begin == ()))  # A packed row begins with the end of a document.
    for before, end, after in zip(range(LENGTH - 1), range(1, LENGTH), ids[2:], strict=True):
      # A line end follows the end of a turn, and the end of a document follows a line end.
      if (ids[before], ids[end]) == (NEWLINE, END) and after != marks.NO_TOKEN:
        expected.add(end + (begin is not None))
    assert found == sorted(expected - {LENGTH}), ids
  ends = (marks.plain(rows) == END).sum()
  assert ends > 2 * sum(map(len, firsts)), 'no turn ends with the end of a document'


def _text(folder: Path, documents: list[str]) -> str:
  (folder / 'text.jsonl').write_text('\n'.join(json.dumps({'text': one}) for one in documents))
  return f'files:{folder}/text.jsonl'


def _older(config: TextConfig, tokenizer=None, divided: int = 0) -> store.Store:
  """Make a store as earlier versions did, which counted conversations with an end inside."""
  build = store.StoreSpec.shard_builds
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(store.StoreSpec, 'shard_builds', functools.partialmethod(build, bounds=False))
    made = store.prepare(dataclasses.replace(config, documents='joined'), tokenizer)
  (one,) = made.index.shards
  splits = one.splits | {'train': dataclasses.replace(one.splits['train'], divided=divided)}
  old = dataclasses.replace(made.index, shards=(dataclasses.replace(one, splits=splits),))
  shards.put_json(made.path, 'meta.json', dataclasses.asdict(old))
  assert shards.verify(made.path) == len(made.train) + len(made.validation)
  return made


def test_the_first_id_parts_documents_where_nothing_else_is_recorded(tmp_path):
  """Text needs no record; nor do stores of before, nor rows that are no batch of a store."""
  rng = np.random.default_rng(0)
  source = _text(tmp_path, ['x' * n for n in rng.integers(1, 30, 200)])
  keys = short_chats.write(tmp_path)
  template = keys.pop('chat_template')
  sources = {
    'chat': SourceConfig(**keys, weight=0.5),
    'text': SourceConfig(source=source, weight=0.5),
  }
  config = _config(tmp_path, mixture=Sources(sources), chat_template=template)
  for length in (LENGTH, LENGTH // 2):
    rows = _rows(config, length=length)
    assert (rows[:, 0] >= 0).any() and (rows[:, 0] < 0).any(), 'a source is missing'
    plain = marks.plain(rows)
    by_id = [_firsts(row, 0xFF) for row in plain]
    assert [_firsts(row) for row in rows] == [sorted({0, *one}) for one in by_id]
    joined = _rows(dataclasses.replace(config, documents='joined'), length=length)
    np.testing.assert_array_equal(marks.plain(joined), plain)
    assert abs(joined).max() < 300, 'a run of joined documents reads marks'
  opened = mixture.open_sources(config, 0).stores
  assert [one.index.bounds for one in opened.values()] == [True, False]
  shutil.rmtree(opened['chat'].path)
  _older(source_configs(config)['chat'])
  older = [_firsts(row) for row in _rows(config, length=length)]
  assert older == [_firsts(row) for row in rows], 'an older store reads otherwise'


def test_text_that_has_the_end_of_documents_in_its_vocabulary_is_not_parted_there(tmp_path):
  source = _text(tmp_path, [f'a{" b" * n} </s> c' for n in range(60)])
  config, tokenizer = _config(tmp_path, source=source), _tokenizer(' ')
  rows = _rows(config, tokenizer)
  ids = marks.plain(rows)
  inside = (ids[:, :-1] == END) & (ids[:, 1:] == tokenizer.encode(' ')[0])
  assert inside.sum() > 5, 'the text has no end inside'
  for row, ends in zip(rows, (ids[:, :-1] == END) & ~inside, strict=True):
    assert _firsts(row) == sorted({0, *np.flatnonzero(ends).tolist()})
  shards.verify(store.prepare(config, tokenizer).path)


def test_a_store_of_before_that_cannot_part_conversations_is_made_again(tmp_path, chats, capsys):
  config, tokenizer = _config(tmp_path, **chats), _tokenizer('.')
  old = _older(config, tokenizer, divided=7)
  named = dataclasses.replace(config, store=str(tmp_path / 'named'))
  shutil.copytree(old.path, named.store)
  with pytest.raises(UserError, match=r'documents is separate, and the token store .*/named is of'):
    mixture.open_sources(named, 0, tokenizer)
  mixture.open_sources(dataclasses.replace(named, documents='joined'), 0, tokenizer)
  joined = store.prepare(dataclasses.replace(config, documents='joined'), tokenizer)
  assert not joined.index.bounds, 'a store is built again without need'
  before = joined.train[:]
  capsys.readouterr()
  made = store.prepare(config, tokenizer)
  assert 'is of an earlier version and has no bounds' in capsys.readouterr().err
  assert made.index.bounds and made.digest == old.digest, 'a run cannot go on'
  np.testing.assert_array_equal(made.train[:], before)
  shards.verify(made.path)
