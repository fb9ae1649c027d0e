"""Measure how well a model answers: the loss of answers, and the share that it gives exactly."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tokenformer_jax.data import marks
from tokenformer_jax.data.chat_rows import Chat, Conversation, conversation
from tokenformer_jax.data.chat_template import Template
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.data.text import CHAT
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.decoding.score import Row, Scorer
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs.metrics import perplexity

_ROWS = 4096  # answers to score together


@dataclasses.dataclass(frozen=True)
class Figures:
  """The figures of conversations.

  Attributes:
    conversations, answers: how many; an answer is what a template marks in one piece.
    answer_tokens: predicted tokens: those of answers, with what ends them.
    answer_loss: nats per token.
    answer_perplexity: exp of that.
    answer_bits_per_byte: all bits divided by all bytes of answers.
    exact: the share of answers of which greedy decoding, after the turns before, writes each token.
  """

  conversations: int
  answers: int
  answer_tokens: int
  answer_loss: float
  answer_perplexity: float
  answer_bits_per_byte: float
  exact: float


def open_chats(chats: str | Iterable[dict[str, Any]], setting: str) -> Iterable[Conversation]:
  """Return the conversations of rows, or of a source as in `data.source`, which are read later."""
  if isinstance(chats, str):
    documents: Any = open_source(chats, CHAT, setting).documents()
    return documents
  return [conversation(row, f'{setting}, row {i},') for i, row in enumerate(chats, start=1)]


def measure(
  scorer: Scorer,
  tokenizer: Tokenizer,
  template: Template,
  chats: Iterable[Conversation],
  progress: Callable[[int], Any] = lambda done: None,
) -> Figures:
  """Score each answer after the turns before it, as `open_chats` gives them.

  `progress` gets the number of answers done since its last call.
  """
  template.check(to_learn=True)
  conversations = size = 0

  def rows() -> Iterator[Row]:
    nonlocal conversations, size
    for one in chats:
      rendered = template.render(*Chat.from_json(one), label=one.label)
      conversations += 1
      size += sum(len(rendered.text[start:stop].encode()) for start, stop in rendered.answers)
      (ids,) = tokenizer.encode_chats([rendered])
      ids = tokenizer.conversation(ids, tokenizer.begin or (tokenizer.end_of_document,))
      edges = np.flatnonzero(np.diff(np.concatenate([[-1], ids, [-1]]) >= 0))  # of answers
      for start, stop in edges.reshape(-1, 2):
        yield Row(marks.plain(ids[:start]), ids[start:stop])

  nats, tokens, answers, exact = 0.0, 0, 0, 0
  left = rows()
  while batch := list(itertools.islice(left, _ROWS)):
    scores = scorer(batch, progress)
    nats -= math.fsum(score.log_prob for score in scores)
    exact += sum(score.is_greedy for score in scores)
    tokens += sum(len(row.continuation) for row in batch)
    answers += len(batch)
  if not answers:
    raise UserError('there are no conversations to evaluate on')
  loss, bits = nats / tokens, nats / math.log(2) / size
  return Figures(conversations, answers, tokens, loss, perplexity(loss), bits, exact / answers)
