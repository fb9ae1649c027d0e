"""Measure how well a model answers: the loss of answers, and the share that it gives exactly."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tokenformer_jax.data import marks
from tokenformer_jax.data.chat_rows import conversation, parse_document
from tokenformer_jax.data.chat_template import Template
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.data.text import CHAT
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.decoding.score import Row, Scorer
from tokenformer_jax.errors import UserError

_ROWS = 4096  # answers to score together


def open_chats(chats: str | Iterable[dict[str, Any]], setting: str) -> Iterable[str]:
  """Return the conversations of rows, or of a source as in `data.source`, which are read later."""
  if isinstance(chats, str):
    return open_source(chats, CHAT, setting).documents()
  return [conversation(row, f'{setting}, row {i},') for i, row in enumerate(chats, start=1)]


def measure(
  scorer: Scorer,
  tokenizer: Tokenizer,
  template: Template,
  chats: Iterable[str],
  progress: Callable[[int], Any] = lambda done: None,
) -> dict[str, float]:
  """Score each answer after the turns before it; the conversations come from `open_chats`.

  `progress` gets the number of answers done since its last call.

  Returns:
    conversations and answers: how many; an answer is what a template marks in one piece.
    answer_tokens: predicted tokens: those of answers, with what ends them.
    answer_loss: nats per token.
    exact: the share of answers that greedy decoding after the turns before writes, token by token.
  """
  template.check(to_learn=True)

  def rows() -> Iterator[Row]:
    for counts['conversations'], one in enumerate(chats, start=1):
      rendered = template.render(*parse_document(one), label=getattr(one, 'label', ''))
      (ids,) = tokenizer.encode_chats([rendered])
      ids = tokenizer.conversation(ids, tokenizer.begin or (tokenizer.end_of_document,))
      edges = np.flatnonzero(np.diff(np.concatenate([[-1], ids, [-1]]) >= 0))
      for start, stop in edges.reshape(-1, 2):
        yield Row(marks.plain(ids[:start]), ids[start:stop])

  counts = dict.fromkeys(('conversations', 'answers', 'answer_tokens'), 0)
  nats, exact, left = 0.0, 0, rows()
  while batch := list(itertools.islice(left, _ROWS)):
    scores = scorer(batch, progress)
    nats -= math.fsum(score.log_prob for score in scores)
    exact += sum(score.is_greedy for score in scores)
    counts['answers'] += len(batch)
    counts['answer_tokens'] += sum(len(row.continuation) for row in batch)
  if not counts['answers']:
    raise UserError('there are no conversations to evaluate on')
  loss, share = nats / counts['answer_tokens'], exact / counts['answers']
  return {**counts, 'answer_loss': loss, 'exact': share}
