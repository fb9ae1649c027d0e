"""Text comes out as it was drawn: cut at no character, ended by its stop strings, in order."""

import dataclasses
import functools
import itertools
import json

import pytest
import tokenizers as hf
from hypothesis import assume, given
from hypothesis import strategies as st

from tokenformer_jax.cli.generate import read_requests
from tokenformer_jax.data.chat_rows import Chat
from tokenformer_jax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from tokenformer_jax.decoding.sampling import Sampling
from tokenformer_jax.decoding.texts import TextRequest, decode_text, stream_text, until
from tokenformer_jax.errors import UserError

BYTES = ByteTokenizer()
# Not st.text(), which first builds tables for seconds.
CHARACTERS = st.integers(0, 127) | st.integers(0x80, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
TEXT = st.lists(CHARACTERS.map(chr), max_size=20).map(''.join)


def _stream(ids) -> list[str]:
  return list(stream_text(BYTES, iter(ids)))


@given(text=TEXT)
def test_streaming_writes_every_character_whole_with_its_last_byte(text):
  ids = BYTES.encode(text).tolist()
  fed = 0

  def feed():
    nonlocal fed
    for token in ids:
      fed += 1
      yield token

  ends = list(itertools.accumulate(len(c.encode()) for c in text))
  written = ''
  for piece in stream_text(BYTES, feed()):
    written += piece
    assert fed in (ends[len(written) - 1] if written else 0, len(ids)), 'a character waits'
  assert written == text, 'the pieces are not the text, or half a character is written'


@given(ids=st.lists(st.integers(0, 254), max_size=20))
def test_streaming_ends_with_what_all_the_ids_say(ids):
  assert ''.join(_stream(ids)) == BYTES.decode(ids), 'text that is no UTF-8 comes out otherwise'


def test_streaming_ends_at_the_end_of_the_document():
  ids = iter([*b'ab', BYTES.end_of_document, *b'cd'])
  assert ''.join(_stream(ids)) == 'ab', 'the next document is written'
  assert bytes(ids) == b'cd', 'tokens that nobody reads are computed'
  assert ''.join(_stream([])) == '', 'a text of no tokens is not empty'


# After a prompt


@functools.cache
def _like_llama_2() -> HuggingFaceTokenizer:
  """Words carry the space before them, and the first space of a text is not in its text."""
  letters = ['<s>', '</s>', *(f'<0x{i:02X}>' for i in range(256)), *'▁abcé']
  words = [('▁', 'a'), ('▁', 'b'), ('▁a', 'b')]
  ids = {token: i for i, token in enumerate([*letters, *map(''.join, words)])}
  tokenizer = hf.Tokenizer(hf.models.BPE(ids, words, byte_fallback=True))
  spaced = (hf.normalizers.Prepend('▁'), hf.normalizers.Replace(' ', '▁'))
  tokenizer.normalizer = hf.normalizers.Sequence([*spaced])
  parts = (hf.decoders.Replace('▁', ' '), hf.decoders.ByteFallback(), hf.decoders.Fuse())
  tokenizer.decoder = hf.decoders.Sequence([*parts, hf.decoders.Strip(' ', 1, 0)])
  return HuggingFaceTokenizer(tokenizer, begin=[0])


@given(text=st.text('abé ☃🙂', max_size=12), cut=st.integers(0, 12))
def test_a_text_is_decoded_with_the_tokens_before_it(text, cut):
  tokenizer = _like_llama_2()
  ids = tokenizer.encode(text).tolist()
  prompt, written = [0, *ids[:cut]], ids[cut:]
  before = tokenizer.decode(ids[:cut])
  assume('\N{REPLACEMENT CHARACTER}' not in before)
  found = before + ''.join(stream_text(tokenizer, iter(written), prompt))
  assert found == tokenizer.decode(ids) == text, 'the space between prompt and text is lost'


def test_a_stop_string_may_begin_with_the_space_after_the_prompt():
  tokenizer = _like_llama_2()
  request = TextRequest('a', 9, stop=(' b',)).tokens(tokenizer)
  written = tokenizer.encode('b').tolist()
  assert request.ended(written), 'the text goes on after its stop string'
  assert decode_text(tokenizer, written, [' b'], request.prompt) == ''
  assert decode_text(tokenizer, written, prompt=request.prompt) == ' b'
  assert decode_text(tokenizer, written, prompt=[0]) == 'b', 'a text without a prompt has a space'


# Stop strings


@given(
  pieces=st.lists(st.text('abc', max_size=3)), stop=st.lists(st.text('abc', min_size=1), max_size=3)
)
def test_text_ends_before_the_stop_string_that_is_complete_first(pieces, stop):
  text = ''.join(pieces)
  ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(string) for string in stop)]
  longest = max((s for s in stop if ends and text[: ends[0]].endswith(s)), key=len, default='')
  want = text[: ends[0] - len(longest)] if ends else text
  assert ''.join(until(pieces, stop)) == want, 'cut elsewhere, or in another place by other pieces'


def test_text_of_tokens_has_no_stop_string_and_no_next_document():
  ids = [*b'one, two', BYTES.end_of_document, *b'three']
  assert decode_text(BYTES, ids) == 'one, two'
  assert decode_text(BYTES, ids, [', t', 'z']) == 'one'


def test_a_request_ends_with_the_document_or_a_stop_string():
  request = TextRequest('ab', 10, stop=('xy',)).tokens(BYTES)
  assert request.prompt == [BYTES.end_of_document, *b'ab'], 'not the beginning of a document'
  assert request.stop == (BYTES.end_of_document,)
  assert not request.ended([*b'..x']) and request.ended([*b'..xy.']), 'stop strings are not seen'


# Files of requests

DEFAULT = TextRequest('', 7, Sampling(0.5, 3, 0.8, 1), ('#',))


def _read(tmp_path, *lines: str) -> list[TextRequest]:
  (tmp_path / 'requests.jsonl').write_text('\n'.join(lines))
  return read_requests(tmp_path / 'requests.jsonl', DEFAULT)


def test_a_line_says_what_differs_from_the_flags(tmp_path):
  own = {
    'prompt': 'b',
    'length': 2,
    'temperature': 0,
    'top_k': 0,
    'top_p': 1,
    'seed': 9,
    'stop': [],
  }
  found = _read(tmp_path, '{"prompt": "a\u2028"}', '', json.dumps(own))
  want = [
    dataclasses.replace(DEFAULT, prompt='a\u2028'),
    TextRequest('b', 2, Sampling(0, 0, 1, 9), ()),
  ]
  assert found == want
  nothing = dict.fromkeys(('length', 'temperature', 'top_k', 'top_p'))
  assert _read(tmp_path, json.dumps({'prompt': '', **nothing})) == [DEFAULT]


def test_a_line_of_messages_adds_to_the_arguments_of_the_template(tmp_path):
  line = {'messages': [{'role': 'user', 'content': 'x'}], 'chat_template_kwargs': {'a': 1}}
  (tmp_path / 'requests.jsonl').write_text(f'{json.dumps(line)}\n{{"prompt": "y"}}')
  default = dataclasses.replace(DEFAULT, chat=Chat([], arguments={'a': 0, 'b': 2}))
  chat, text = read_requests(tmp_path / 'requests.jsonl', default)
  assert chat.chat.arguments == {'a': 1, 'b': 2} and text.chat is None


@pytest.mark.parametrize(
  ('line', 'sentence'),
  [
    ('{"prompt": "a"', 'line 2 of .* is not a request: Expecting'),
    ('["a"]', 'it must be an object with either a "prompt" or "messages"'),
    (
      '{"prompt": "a", "messages": []}',
      'it must be an object with either a "prompt" or "messages"',
    ),
    ('{"messages": null}', r'line 2 .* messages: has no list of messages \(none\)'),
    ('{"prompt": "a", "tools": [{}]}', 'tools has an effect only with messages; leave it out'),
    (
      '{"prompt": "a", "chat_template_kwargs": {"enable_thinking": false}}',
      'chat_template_kwargs has an effect only with messages; leave it out',
    ),
    (
      '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 3}',
      'it has chat_template_kwargs 3; it must be a JSON object',
    ),
    ('{"messages": "a"}', "line 2 .* messages: has no list of messages \\('a'\\)"),
    ('{"messages": [{"from": "cat", "value": "x"}]}', "messages: message 1 is from 'cat'; it must"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', 'messages end with an answer of the'),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": "f"}', "request has 'f' as its to"),
    ('{"prompt": 3}', 'prompt is 3; it must be a valid string'),
    ('{"prompt": "a", "lenght": 3}', "the key 'lenght' is unknown; did you mean 'length'"),
    ('{"prompt": "a", "length": 0}', 'length is 0; it must be greater than or equal to 1'),
    ('{"prompt": "a", "top_k": true}', 'top_k is True; it must be a valid integer'),
    ('{"prompt": "a", "top_p": 2}', 'top_p is 2; it must be less than or equal to 1'),
    ('{"prompt": "\\ud800"}', 'line 2 .*the prompt is not UTF-8 text'),
    ('{"prompt": "a", "stop": [""]}', 'it must not be empty'),
  ],
)
def test_a_line_that_is_no_request_is_refused(tmp_path, line, sentence):
  with pytest.raises(UserError, match=sentence):
    _read(tmp_path, '{"prompt": "a"}', line)


def test_a_file_without_requests_is_refused(tmp_path):
  with pytest.raises(UserError, match='has no requests; write lines like'):
    _read(tmp_path, '')
  with pytest.raises(UserError, match='cannot be read'):
    read_requests(tmp_path / 'nothing', DEFAULT)
