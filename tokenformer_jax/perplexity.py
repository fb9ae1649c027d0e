"""How well a model predicts a text: loss, perplexity and bits per byte, by windows that slide."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.metrics import perplexity
from tokenformer_jax.score import Row, Scorer

_ROWS = 4096  # that are scored together


@dataclasses.dataclass(frozen=True)
class Figures:
  """Of one text.

  Attributes:
    documents, words, bytes: of the text; words are what white space separates, bytes are UTF-8.
    tokens: that were predicted: those of the text, and an end of document for each document.
    loss: nats a token.
    perplexity, word_perplexity: exp of the nats a token, and a word.
    bits_per_byte: all bits over all bytes.
    window, stride: tokens that a window holds, and of which it scores the last.
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


def windows(
  documents: Iterable[np.ndarray], end_of_document: int, length: int, stride: int
) -> Iterator[Row]:
  """Every token of a text once, with what is before it.

  As in training, documents follow each other with an end of document after each, and windows do
  not stop at it. The first window begins after an end of document, which is not scored.

  Args:
    documents: token ids of each.
    end_of_document: the id that ends a document.
    length: of the window, in tokens of input.
    stride: tokens that a window scores; the first one scores `length`. So a token has at least
      `length − stride` tokens before it, if there are so many in the text.
  """
  context, pending = np.array([end_of_document]), np.array([], np.int32)
  size = length
  for document in documents:
    pending = np.concatenate([pending, document, [end_of_document]])
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
  progress: Callable[[int], None] = lambda done: None,
) -> Figures:
  """Scores a text in windows as long as the scorer allows.

  Args:
    scorer: of the model.
    tokenizer: of the model.
    documents: the text.
    stride: see `windows`. None: windows that do not overlap, as in training.
    progress: called with the number of windows done since the last call.

  Raises:
    UserError: the stride is longer than a window, or there is no text.
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
      yield tokenizer.encode(text)

  nats, tokens = 0.0, 0
  rows = windows(encoded(), tokenizer.end_of_document, length, stride)
  while part := list(itertools.islice(rows, _ROWS)):
    nats -= math.fsum(score.log_prob for score in scorer(part, progress))
    tokens += sum(len(row.continuation) for row in part)
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
