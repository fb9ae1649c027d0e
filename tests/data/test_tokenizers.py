"""Tokenizers lose no text, keep documents apart, and survive being stored."""

import json

import numpy as np
import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenformer_jax.data import marks, tokenizers
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.layer import Context

TEXTS = ['the cat sat on the mat', 'def f(x):\n  return x + 1\n', 'naïve 日本語 🙂'] * 20
# Any code points but surrogates. Not st.text(), which first builds tables for seconds.
CODE_POINTS = st.integers(0, 127) | st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
ANY_TEXT = st.lists(CODE_POINTS.map(chr)).map(''.join)
BPE = tokenizers.train_bpe(TEXTS, 300)
BOTH = pytest.mark.parametrize('tokenizer', [tokenizers.ByteTokenizer(), BPE], ids=['bytes', 'bpe'])


def _save(tokenizer: hf.Tokenizer, tmp_path) -> str:
  path = tmp_path / 'tokenizer.json'
  tokenizer.save(str(path))
  return str(path)


def _words(*extra: str) -> hf.Tokenizer:
  vocabulary = {word: i for i, word in enumerate(['[UNK]', 'a', 'b', *extra])}
  tokenizer = hf.Tokenizer(hf.models.WordLevel(vocabulary, unk_token='[UNK]'))
  tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(list(extra))
  return tokenizer


@BOTH
@settings(max_examples=40, deadline=None)
@given(text=ANY_TEXT)
def test_decoding_undoes_encoding_and_text_has_no_end_of_document(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text, 'the tokenizer changes text'
  assert tokenizer.end_of_document not in ids, 'a document looks like two'


@BOTH
def test_any_ids_decode(tokenizer):
  assert isinstance(tokenizer.decode(range(-1, 400)), str), 'an untrained model writes no text'


def test_a_spelled_out_end_of_document_is_text():
  ids = BPE.encode('a<|endoftext|>b')
  assert BPE.end_of_document not in ids, 'text can end a document'
  assert BPE.decode(ids) == 'a<|endoftext|>b', 'the spelling of a special token is lost'


@BOTH
def test_json_rebuilds_the_tokenizer(tokenizer):
  rebuilt = tokenizers.from_json(json.loads(json.dumps(tokenizer.to_json())))
  assert rebuilt.fingerprint == tokenizer.fingerprint, 'the rebuilt tokenizer has other content'
  assert rebuilt.size == tokenizer.size, 'the rebuilt tokenizer has another size'
  np.testing.assert_array_equal(
    rebuilt.encode(TEXTS[1] + '<|endoftext|>'),
    tokenizer.encode(TEXTS[1] + '<|endoftext|>'),
    'a tokenizer from a checkpoint encodes differently',
  )


def test_bpe_training_is_deterministic():
  assert tokenizers.train_bpe(TEXTS, 300).to_json() == BPE.to_json(), 'hosts train other tokenizers'
  assert (BPE.size, BPE.end_of_document) == (300, 0), 'the vocabulary is not what was asked for'


def test_bpe_training_reads_a_bounded_part_of_the_text(monkeypatch):
  monkeypatch.setattr(tokenizers, 'BPE_TRAINING_BYTES', 100)
  read = []
  tokenizers.train_bpe((read.append(i) or 'x' * 40 for i in range(1000)), 257)
  assert len(read) == 3, 'training a tokenizer reads all of a large corpus'


def test_a_file_is_loaded_without_truncation_and_padding(tmp_path):
  tokenizer = _words('[SEP]')
  tokenizer.enable_truncation(2)
  tokenizer.enable_padding(length=8)
  ids = tokenizers.load(_save(tokenizer, tmp_path)).encode('a b a b a')
  assert ids.tolist() == [1, 2, 1, 2, 1], 'documents are cut or padded as the file asks'


def test_the_size_covers_gaps_in_the_vocabulary(tmp_path):
  tokenizer = hf.Tokenizer(hf.models.WordLevel({'[UNK]': 0, '</s>': 90}, unk_token='[UNK]'))
  loaded = tokenizers.load(_save(tokenizer, tmp_path))
  assert (loaded.size, loaded.end_of_document) == (91, 90), 'an id lies beyond the embedding'


def test_no_end_of_document_is_an_error(tmp_path):
  with pytest.raises(UserError, match='no token that ends a document'):
    tokenizers.load(_save(_words(), tmp_path))


def test_a_broken_file_is_an_error(tmp_path):
  path = tmp_path / 'tokenizer.json'
  path.write_text('{"model": 1}')
  with pytest.raises(UserError, match=r'tokenizer\.json'):
    tokenizers.load(str(path))


def test_a_missing_file_is_an_error():
  with pytest.raises(UserError, match=r'not a file.*GPT-NeoX-20B; .* offers its weights'):
    tokenizers.load('nowhere/tokenizer.json')


@pytest.mark.parametrize(
  ('spec', 'size'), [('bytes', None), ('x.json', None), ('bpe:257', 257), ('bpe:65536', 65536)]
)
def test_the_size_of_bpe_is_read_from_the_name_of_a_tokenizer(spec, size):
  assert tokenizers.bpe_size(spec) == size, f'{spec} is misread'


@pytest.mark.parametrize('spec', ['bpe:x', 'bpe:256', 'bpe:65537'])
def test_a_bad_bpe_size_is_an_error(spec):
  with pytest.raises(UserError, match='from 257 to 65536'):
    tokenizers.bpe_size(spec)


def _folder(tmp_path, files, *tokens, begin='') -> str:
  """Writes a tokenizer.json of words and other files of a folder; returns its path."""
  tokenizer = _words(*tokens)
  if begin:
    tokenizer.post_processor = hf.processors.TemplateProcessing(
      single=f'{begin} $A', special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
  for name, values in files.items():
    (tmp_path / f'{name}.json').write_text(json.dumps(values))
  return _save(tokenizer, tmp_path)


_TABLE = {'content': '<e>', 'lstrip': False, 'normalized': True}
STATED = {
  'the settings': ({'tokenizer_config': {'eos_token': '<e>'}}, '<e>'),
  'a token as a table': ({'tokenizer_config': {'eos_token': _TABLE}}, '<e>'),
  'the map alone': ({'special_tokens_map': {'eos_token': _TABLE}}, '<e>'),
  'the map before old settings': (
    {'tokenizer_config': {'eos_token': '<f>'}, 'special_tokens_map': {'eos_token': '<e>'}},
    '<e>',
  ),
  'new settings before the map': (
    {
      'tokenizer_config': {'eos_token': '<f>', 'added_tokens_decoder': {}},
      'special_tokens_map': {'eos_token': '<e>'},
    },
    '<f>',
  ),
  'the class': ({'tokenizer_config': {'tokenizer_class': 'GemmaTokenizerFast'}}, '<eos>'),
  'the class of a kind': ({'config': {'model_type': 'gemma'}}, '<eos>'),
  'settings before the class': (
    {'tokenizer_config': {'eos_token': '<e>'}, 'config': {'model_type': 'gemma'}},
    '<e>',
  ),
  'null before the class': (
    {'tokenizer_config': {'eos_token': None}, 'config': {'model_type': 'gemma', 'eos_token_id': 6}},
    '<f>',
  ),
  'the model': ({'config': {'eos_token_id': 5}, 'generation_config': {'eos_token_id': 6}}, '<e>'),
  'the settings of texts': ({'generation_config': {'eos_token_id': [6, 5]}}, '<f>'),
  'a usual one of several': ({'generation_config': {'eos_token_id': [5, 3]}}, '</s>'),
  'ids that are not there': ({'config': {'eos_token_id': [-1, 99, None]}}, '</s>'),
  'nothing': ({'tokenizer_config': {'tokenizer_class': 'PreTrainedTokenizerFast'}}, '</s>'),
}


@pytest.mark.parametrize('name', STATED)
def test_a_document_ends_as_the_folder_says(tmp_path, name):
  files, end = STATED[name]
  path = _folder(tmp_path, files, '</s>', '<eos>', '<e>', '<f>')
  tokenizer = tokenizers.load(path)
  assert tokenizer.decode([tokenizer.end_of_document]) == end
  again = tokenizers.from_json(json.loads(json.dumps(tokenizer.to_json())))
  assert again.end_of_document == tokenizer.end_of_document, 'a checkpoint forgets it'
  assert again.document_fingerprint == tokenizer.document_fingerprint


@pytest.mark.parametrize('file', ['tokenizer_config', 'special_tokens_map'])
def test_an_end_that_is_no_token_is_refused(tmp_path, file):
  path = _folder(tmp_path, {file: {'eos_token': '<g>'}, 'config': {'eos_token_id': 3}}, '</s>')
  with pytest.raises(UserError, match=r"the eos_token '<g>' .* is no token of its tokenizer\.json"):
    tokenizers.load(path)


_NEW = {'content': '<g>', 'special': True, 'lstrip': True}
ADDED = {
  'settings': ({'tokenizer_config': {'eos_token': '<g>', 'added_tokens_decoder': {'4': _NEW}}}, 1),
  'an older file': (
    {'added_tokens': {'<g>': 4}, 'special_tokens_map': {'eos_token': '<g>'}},
    2,
  ),
  'a name alone': ({'tokenizer_config': {'pad_token': _NEW}}, 1),
  'a list': ({'tokenizer_config': {'additional_special_tokens': ['<g>']}}, 2),
}


@pytest.mark.parametrize('name', ADDED)
def test_tokens_of_the_files_beside_a_tokenizer_are_added_with_their_flags(tmp_path, name):
  """A space before a token with `lstrip` is in it."""
  files, spaces = ADDED[name]
  tokenizer = tokenizers.load(_folder(tmp_path, files, '</s>'))
  assert tokenizer.size == 5
  again = tokenizers.from_json(json.loads(json.dumps(tokenizer.to_json())))
  (ids,) = again.encode_chats([('a <g>', ((0, 5),))])
  assert ids.tolist() == [1, 4], 'the token is not known'
  decoder = again._tokenizer.get_added_tokens_decoder()
  assert decoder[4].special and decoder[4].lstrip == (spaces == 1)


BAD = {
  'another id': ({'9': _NEW}, r"adds the token '<g>' with the id 9, but the next free id is 4"),
  'no tokens': ({'4': '<g>'}, 'lists added tokens in another form'),
  'no table': ([_NEW], 'lists added tokens in another form'),
}


@pytest.mark.parametrize('name', BAD)
def test_added_tokens_that_do_not_fit_are_refused(tmp_path, name):
  table, sentence = BAD[name]
  path = _folder(tmp_path, {'tokenizer_config': {'added_tokens_decoder': table}}, '</s>')
  with pytest.raises(UserError, match=sentence):
    tokenizers.load(path)


def test_a_run_of_before_keeps_its_tokenizer_without_the_added_tokens(tmp_path):
  before = tokenizers.load(path := _folder(tmp_path, {}, '</s>'))
  _folder(tmp_path, {'tokenizer_config': {'added_tokens_decoder': {'4': _NEW}}}, '</s>')
  assert tokenizers.load(path).fingerprint != before.fingerprint
  assert tokenizers.names_same(path, path, before)


def test_a_token_that_the_embedding_lacks_is_refused_in_a_text(tmp_path):
  """As the token of images of Gemma 3, which its text models have no row for."""
  loaded = tokenizers.load(_folder(tmp_path, {}, '</s>', '<image>')).of_folder((), 4)
  again = tokenizers.from_json(json.loads(json.dumps(loaded.to_json())))
  assert (again.size, again.encode('a b').tolist()) == (4, [1, 2])
  with pytest.raises(UserError, match=r"token '<image>' of the id 4, and the embedding .* 4 rows"):
    again.encode_chats([('a <image>', ())])
  with pytest.raises(UserError, match=r"token '</s>' of the id 3"):
    loaded.of_folder((), 3)


@pytest.mark.parametrize(
  ('content', 'sentence'),
  [
    ('{', r'is not valid JSON \(Expecting'),
    ('[' * 10**5, 'is not valid JSON'),
    ('[]', 'holds a JSON list, not an object; download it again'),
    (' ' * (2**24 + 1), r'cannot be read \(more than 16,777,216 bytes\)'),
  ],
  ids=['cut short', 'nested', 'a list', 'too large'],
)
def test_a_broken_file_beside_the_tokenizer_is_an_error(tmp_path, content, sentence):
  path = _folder(tmp_path, {}, '</s>')
  (tmp_path / 'tokenizer_config.json').write_text(content)
  with pytest.raises(UserError, match=rf'tokenizer_config\.json {sentence}'):
    tokenizers.load(path)


def test_a_spelled_out_end_is_text_if_the_file_does_not_mark_it_as_special(tmp_path):
  tokenizer = hf.Tokenizer(hf.models.BPE({'[UNK]': 0, 'a': 1, '<': 2, 'e': 3, '>': 4}, []))
  tokenizer.add_tokens([hf.AddedToken(token, special=False) for token in ('<e>', '<a>', '<ea>')])
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "<e>", "bos_token": "<a>"}')
  loaded = tokenizers.load(_save(tokenizer, tmp_path))
  for one in (loaded, tokenizers.from_json(loaded.to_json())):
    ids = one.encode('a<e>a<a><ea>').tolist()
    assert one.end_of_document == 5 and ids == [1, 2, 3, 4, 1, 2, 1, 4, 7]


def test_a_document_begins_as_the_tokenizer_does_and_with_its_end_only_once(tmp_path):
  def load_beginning(begin):
    return tokenizers.load(_folder(tmp_path, {}, '</s>', '<b>', begin=begin))

  none, begun, ended = map(load_beginning, ('', '<b>', '</s>'))
  documents = [
    marks.plain(one.document(one.encode('a b'))).tolist() for one in (none, begun, ended)
  ]
  assert documents == [[1, 2, 3], [4, 1, 2, 3], [1, 2, 3]]
  assert begun.document(np.array([1]), begins=False, ends=False).tolist() == [1]
  assert [one.start(one.encode('a')).tolist() for one in (none, begun, ended)] == [
    [3, 1],
    [4, 1],
    [3, 1],
  ], 'a text that is continued begins otherwise than in training'
  assert begun.start(marks.plain(begun.document([1]))).tolist() == [4, 1, 3], (
    'held-out text begins twice'
  )
  assert [one.boundary for one in (none, begun, ended)] == [3, 4, 3]
  row = np.concatenate([begun.document(np.array([1, 2])), begun.document(np.array([1]))])
  context = Context.from_ids(row[None], marks.begins(row[None], -1), 'separate')
  assert context.positions(len(row)).tolist() == [[0, 1, 2, 3, 0, 1, 2]], 'masks cut elsewhere'
  assert begun.document_fingerprint != begun.fingerprint, 'a store without beginnings is reused'
  assert none.document_fingerprint == none.fingerprint, 'stores of before are built again'
  old = {key: value for key, value in begun.to_json().items() if key != 'begin'}
  assert not tokenizers.from_json(old).opening, 'a run of before continues on other documents'
