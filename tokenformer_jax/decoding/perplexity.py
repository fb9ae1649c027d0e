"""Measure how well a model predicts a text: loss, perplexity and bits per byte."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.decoding.score import Row, Scorer
from tokenformer_jax.errors import UserError
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
