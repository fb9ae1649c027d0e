"""Measure how well a model predicts a text: loss, perplexity and bits per byte; or answers."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tokenformer_jax.data import marks
from tokenformer_jax.data.chat_rows import parse_document
from tokenformer_jax.data.chat_template import Template
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.decoding.score import Row, Scorer
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs.metrics import perplexity

_ROWS = 4096  # rows to score together


@dataclasses.dataclass(frozen=True)
class Figures:
  """The figures of one text.

  Attributes:
    documents, words, bytes: counts of the text; white space separates words, bytes are UTF-8.
    tokens: predicted tokens: those of the text, and those that begin and end its documents.
    loss: nats per token.
    perplexity, word_perplexity: exp of the nats per token, and per word.
    bits_per_byte: all bits divided by all bytes.
    window, stride: the tokens of a window, and the number of them, at its end, that it scores.
  """

  documents: int
  tokens: int
  words: int
  bytes: int
  loss: float
  perplexity: float
  word_perplexity: float
  bits_per_byte: float
  window: int
  stride: int


def windows(documents: Iterable[np.ndarray], length: int, stride: int, begin: int) -> Iterator[Row]:
  """Yield windows that score every token of a text once, after the tokens before it.

  As in training, documents (token ids with those that begin and end them) are concatenated, and
  windows of `length` tokens of input span document boundaries, which the scorer may heed. The first
  window begins after the id `begin`, which is not scored, and scores `length` tokens; each
  other scores `stride`. A token therefore has at least `length − stride` tokens before it in its
  window, if the text has as many.
  """
  context, pending = np.array([begin]), np.array([], np.int32)
  size = length
  for document in documents:
    pending = np.concatenate([pending, document])
    while len(pending) >= size:
      yield Row(context, pending[:size])
      context = np.concatenate([context, pending[:size]])[-length:]
      pending, size = pending[size:], stride
  if len(pending):
    yield Row(context, pending)


def measure(
  scorer: Scorer,
  tokenizer: Tokenizer,
  documents: Iterable[str],
  stride: int | None = None,
  progress: Callable[[int], Any] = lambda done: None,
) -> Figures:
  """Score a text in windows of the scorer's maximum length.

  For `stride` see `windows`; None: windows that do not overlap, as in training. `progress` gets the
  number of windows done since its last call.
  """
  length = scorer.max_length
  stride = length if stride is None else stride
  if not 1 <= stride <= length:
    raise UserError(
      f'the stride is {stride}; it must be at least 1 and at most the window, {length} tokens'
    )
  counts = {'documents': 0, 'words': 0, 'bytes': 0}

  def encoded() -> Iterator[np.ndarray]:
    for text in documents:
      counts['documents'] += 1
      counts['words'] += len(text.split())
      counts['bytes'] += len(text.encode())
      # The beginning of the first document is not scored.
      yield tokenizer.document(tokenizer.encode(text), begins=counts['documents'] > 1)

  nats, tokens = 0.0, 0
  begin = int(tokenizer.start(np.array([], np.int32))[-1])
  rows = windows(encoded(), length, stride, begin)
  while batch := list(itertools.islice(rows, _ROWS)):
    nats -= math.fsum(score.log_prob for score in scorer(batch, progress))
    tokens += sum(len(row.continuation) for row in batch)
  if not counts['bytes']:
    raise UserError('the text has no documents, or only empty ones')
  return Figures(
    **counts,
    tokens=tokens,
    loss=nats / tokens,
    perplexity=perplexity(nats / tokens),
    word_perplexity=perplexity(nats / max(1, counts['words'])),
    bits_per_byte=nats / math.log(2) / counts['bytes'],
    window=length,
    stride=stride,
  )


def measure_answers(
  scorer: Scorer,
  tokenizer: Tokenizer,
  template: Template,
  chats: Iterable[str],
  progress: Callable[[int], Any] = lambda done: None,
) -> dict[str, float]:
  """Score each answer of conversations (see `chat_rows.conversation`) after the turns before it.

  `progress` gets the number of answers done since its last call.

  Returns:
    conversations and answers: how many; an answer is what a template marks in one piece.
    answer_tokens: predicted tokens: those of answers, with what ends them.
    answer_loss: nats per token.
    exact: the share of answers that greedy decoding after the turns before writes, token by token.
  """
  template.check(to_learn=True)
  counts = dict.fromkeys(('conversations', 'answers', 'answer_tokens'), 0)
  nats, exact = 0.0, 0

  most = scorer.max_length
  too_long: list[tuple[int, str]] = []  # the tokens of a conversation up to an answer, and its name

  def rows() -> Iterator[Row]:
    for counts['conversations'], one in enumerate(chats, start=1):
      rendered = template.render(*parse_document(one), label=getattr(one, 'label', ''))
      (ids,) = tokenizer.encode_chats([rendered])
      ids = tokenizer.conversation(ids, template.begin(tokenizer))
      edges = np.flatnonzero(np.diff(np.concatenate([[-1], ids, [-1]]) >= 0))
      name = getattr(one, 'label', '') or f'conversation {counts["conversations"]},'
      for start, stop in np.maximum(edges, 1).reshape(-1, 2):  # A first token follows nothing.
        if stop - start > most:
          raise UserError(
            f'{name} has an answer of {stop - start} tokens, and at most {most} are evaluated; '
            'leave the row out, or raise max_length if the positions of the model allow it'
          )
        yield Row(marks.plain(ids[:start]), ids[start:stop])
      if edges.max(initial=0) - 1 > most:
        too_long.append((int(edges[-1]), name))

  left = rows()
  while batch := list(itertools.islice(left, _ROWS)):
    scores = scorer(batch, progress)
    nats -= math.fsum(score.log_prob for score in scores)
    exact += sum(score.is_greedy for score in scores)
    counts['answers'] += len(batch)
    counts['answer_tokens'] += sum(len(row.continuation) for row in batch)
  if too_long:
    tokens, name = max(too_long)
    messages.say(
      f'{len(too_long)} of {counted(counts["conversations"], "conversation")} cut at the beginning '
      f'to the {most} tokens of max_length; the longest is {name} with {tokens} tokens'
    )
  if not counts['answer_tokens']:
    raise UserError('there are no conversations to evaluate on')
  loss, share = nats / counts['answer_tokens'], exact / counts['answers']
  return {**counts, 'answer_loss': loss, 'exact': share}
