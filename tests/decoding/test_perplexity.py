"""Every token of a text counts once, with the context that the stride leaves it."""

import functools
import json
import math

import numpy as np
import pytest
from tiny_trained import LENGTH, log_probs, trained

from tokenformer_jax.data import chat_rows, marks
from tokenformer_jax.data.chat_template import OURS, Template
from tokenformer_jax.data.tokenizers import ByteTokenizer
from tokenformer_jax.decoding import chats, perplexity
from tokenformer_jax.decoding.score import Score, Scorer
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.errors import UserError

END = 0xFF
BYTES = ByteTokenizer()
DOCUMENTS = ['Beautiful is better than ugly. ' * 5, 'naïve', 'Now is better\n than never.  ' * 3]
STREAM = [byte for text in DOCUMENTS for byte in [*text.encode(), END]]


@functools.cache
def _scorer() -> Scorer:
  model = trained()
  return Scorer(model.definition, model.params, model.mesh, max_length=LENGTH, batch_size=4)


def _measure(
  documents: list[str], stride: int | None, tokenizer: ByteTokenizer = BYTES
) -> perplexity.Figures:
  return perplexity.measure(_scorer(), tokenizer, documents, stride)


def _nats(stride: int, stream: list[int] = STREAM, begin: int = END) -> float:
  """By one window after the other: the first scores all, the others what is new in them."""
  before, total, done, end = [begin, *stream], 0.0, 0, LENGTH
  while done < len(stream):
    end = min(end, len(stream))
    start = max(0, end - LENGTH)
    found = log_probs(before[start:end], LENGTH)
    total -= sum(found[i - start][stream[i]] for i in range(done, end))
    done, end = end, end + stride
  return total


@pytest.mark.parametrize('stride', [7, LENGTH])
def test_the_loss_is_that_of_one_window_after_the_other(stride):
  found = _measure(DOCUMENTS, stride)
  assert found.loss == pytest.approx(_nats(stride) / len(STREAM), abs=1e-5)


def test_the_rest_follows_from_the_loss():
  found = _measure(DOCUMENTS, None)
  text = ''.join(DOCUMENTS)
  counts = (found.documents, found.tokens, found.words, found.bytes)
  assert counts == (3, len(STREAM), len(' '.join(DOCUMENTS).split()), len(text.encode()))
  nats = found.loss * found.tokens
  assert found.perplexity == pytest.approx(math.exp(found.loss))
  assert found.word_perplexity == pytest.approx(math.exp(nats / found.words))
  assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes)


def test_documents_begin_as_in_training():
  """The first one begins before the text: a token is predicted after others only."""
  begun = type('Begun', (ByteTokenizer,), {'begin': (1,)})()
  found = _measure(DOCUMENTS, LENGTH, begun)
  _, *stream = (
    int(id_) for text in DOCUMENTS for id_ in marks.plain(begun.document(begun.encode(text)))
  )
  assert found.tokens == len(stream) == len(STREAM) + len(DOCUMENTS) - 1
  assert found.loss == pytest.approx(_nats(LENGTH, stream, 1) / len(stream), abs=1e-5)


class _Recorder:
  """A scorer that keeps its rows, of which each has one nat a token."""

  max_length = 12

  def __call__(self, rows, progress):
    self.rows = rows
    return [Score(-float(len(row.continuation)), True) for row in rows]


CHAT = '{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}'
ROW = (
  '{% for m in messages %}{% if m.role == "user" %}{{ m.content }}{% else %}'
  '{% generation %}{{ m.content }}{% endgeneration %}!{% endif %}{% endfor %}'
)


@pytest.mark.parametrize(
  ('begin', 'source', 'contexts'),
  [
    ((END,), ROW, [[END, *b'ab']]),
    ((), ROW, [[*b'ab']]),
    ((1,), ROW, [[*b'ab']]),  # A template writes all, as in transformers.
    ((1,), OURS, [[1, *b'<|user|>\nab<|end|>\n<|assistant|>\n']]),
    (
      (),
      ROW.replace('{% if m.role == "user" %}{{ m.content }}', '{% if m.role == "user" %}'),
      [[*b'c']],
    ),
  ],
)
def test_answers_follow_what_generate_writes_before_them(begin, source, contexts):
  tokenizer = type('Begun', (ByteTokenizer,), {'begin': begin})()
  scorer, template = _Recorder(), Template('T', source, {})
  scorer.max_length = 64
  messages = json.loads(CHAT)['messages']
  figures = perplexity.measure_answers(
    scorer, tokenizer, template, [chat_rows.conversation({'messages': messages}, 'row 1')]
  )
  assert [[*row.context] for row in scorer.rows] == contexts
  request = chats.ask(template, chats.question(messages[:1]), TextRequest(''))
  if source == OURS:
    assert request.ids(tokenizer).tolist() == contexts[0], 'generate asks otherwise'
  assert figures['answer_loss'] == 1 and figures['exact'] == 1


def test_conversations_that_are_too_long_are_counted_and_named(capsys):
  def rows(*sizes):
    return [
      chat_rows.conversation({'prompt': 'q' * n, 'response': 'a' * m}, f'a.jsonl, line {i},')
      for i, (n, m) in enumerate(sizes, start=1)
    ]

  template, scorer = Template('T', ROW, {}), _Recorder()
  perplexity.measure_answers(scorer, BYTES, template, rows((2, 2), (20, 2), (40, 2)))
  assert '2 of 3 conversations cut at the beginning to the 12 tokens' in (
    text := capsys.readouterr().err
  )
  assert 'the longest is a.jsonl, line 3, with 43 tokens' in text
  with pytest.raises(
    UserError, match=r'a\.jsonl, line 2, has an answer of 13 tokens, and at most 12'
  ):
    perplexity.measure_answers(scorer, BYTES, template, rows((2, 2), (2, 13)))


@pytest.mark.parametrize('stride', [1, 7, 10])
def test_every_token_is_scored_once_with_enough_before_it(stride):
  documents = [np.append(np.arange(i, i + 9), 99) for i in range(0, 60, 10)]
  tokens = np.concatenate(documents).tolist()
  rows = list(perplexity.windows(iter(documents), 10, stride, 99))
  assert [token for row in rows for token in row.continuation] == tokens, 'not each token once'
  for first, row in zip(np.cumsum([0] + [len(r.continuation) for r in rows]), rows, strict=False):
    before = ([99, *tokens])[: first + 1]
    assert list(row.context) == before[-len(row.context) :], 'the context is another one'
    assert len(row.context) >= min(len(before), 10 - stride + 1), 'too little context'


def test_a_text_in_parts_is_the_same_text(monkeypatch):
  whole = _measure(DOCUMENTS, 5)
  monkeypatch.setattr(perplexity, '_ROWS', 7)
  assert _measure(DOCUMENTS, 5).loss == pytest.approx(whole.loss, abs=1e-6)


@pytest.mark.parametrize(
  ('documents', 'stride', 'sentence'),
  [
    ([], None, 'the text has no documents'),
    ([''], None, 'the text has no documents, or only empty ones'),
    (DOCUMENTS, LENGTH + 1, f'the stride is {LENGTH + 1}; .* at most the window, {LENGTH} tokens'),
    (DOCUMENTS, 0, 'the stride is 0; it must be at least 1'),
  ],
)
def test_texts_that_cannot_be_measured_are_refused(documents, stride, sentence):
  with pytest.raises(UserError, match=sentence):
    _measure(documents, stride)
