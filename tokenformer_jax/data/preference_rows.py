"""Read pairs of a chosen and a rejected answer from rows, in the forms that other libraries have.

A row has `chosen` and `rejected`, or the names of `_PAIRS`: both answer a question, or both begin
with it. Each is a text, a message or a list of messages. Two texts without a question are plain
text, and no template writes them.
"""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenformer_jax.data import chat_rows, row_columns
from tokenformer_jax.data.chat_rows import ANSWER_ROLE, Conversation
from tokenformer_jax.data.chat_template import Rendered, Template
from tokenformer_jax.errors import UserError

# The better and the worse answer in TRL and LLaMA-Factory, for Argilla, for OpenAI and in ms-swift.
_PAIRS = (
  *(('chosen', 'rejected'), ('chosen_response', 'rejected_response')),
  ('preferred_output', 'non_preferred_output'),
  *(('messages', 'rejected_messages'), ('messages', 'rejected_response')),
)


PLAIN = '[["'  # begins a pair of plain texts, which no template writes


class Pair(Conversation):
  """Both conversations of a row as JSON: see `render`."""


def conversation(row: dict[str, Any], label: str) -> Pair:
  """Return the pair of a row."""
  if isinstance(nested := chat_rows.read_objects(row.get('input')), dict) and 'messages' in nested:
    row = {**nested, **{key: value for key, value in row.items() if key != 'input'}}  # OpenAI
  names = next((pair for pair in _PAIRS if {*pair} <= {*row}), None)
  if not names:
    raise UserError(
      f'{label} is no pair (config.data.rows=preference): it needs chosen and rejected, each a '
      f'text, a message or a list of messages, and has {", ".join(row) or "nothing":.200}'
    )
  rest = {key: value for key, value in row.items() if key not in names}
  columns = (*row_columns.QUESTIONS, *row_columns.CHATS)
  question = next((key for key in columns if rest.get(key) not in row_columns.EMPTY), None)
  texts = [row[name] for name in names]
  answers = [chat_rows.as_turns(one, ANSWER_ROLE) for one in texts]
  messages = [[{'role': ANSWER_ROLE, 'content': one}] for one in texts]
  if not question and answers == messages and all(isinstance(one, str) for one in texts):
    shared = re.match(r'(?s)(.*\S)\s', texts[0][: _shared(texts)])  # whole words
    length = shared.end(1) if shared else 0
    _check(all(length and one[length:].strip() for one in texts), texts, label)
    pair: list[Any] = [(one, length) for one in texts]
  else:
    if names == ('messages', 'rejected_response'):
      answers[1] = [*answers[0][:-1], *answers[1]]
    first = chat_rows.read_messages(answers[0], f'{label} {names[0]}:')[0]
    is_inside = bool(_shared(answers)) and first['role'] != ANSWER_ROLE
    form = (question,) if question and not is_inside else ()
    pair, unread = [], rest
    for name, answer in zip(names, answers, strict=True):
      chat, unread = chat_rows.read_form({**rest, name: answer}, (*form, name), label)
      pair.append(chat if chat.arguments else chat[:2])
    rest, messages = unread, [chat[0] for chat in pair]
    shared = _shared(messages)
    _check(0 < shared < min(map(len, messages)), messages, label)
    for message in itertools.chain(*(one[:shared] for one in messages)):
      if message['role'] == ANSWER_ROLE:
        message['weight'] = 0  # as a part of the prompt
  row_columns.check(rest, [*itertools.chain(*messages)], label)
  text = json.dumps(pair, ensure_ascii=False).encode('utf-8', errors='replace').decode()
  document = Pair(text)
  document.label = label
  return document


def render(document: Pair, template: Template) -> list[Rendered]:
  """Return the text of the chosen and of the rejected conversation, with the marks of answers."""
  return [
    Rendered(first, ((*rest, len(first)),))
    if isinstance(first, str)
    else template.render(first, *rest, label=document.label)
    for first, *rest in json.loads(document)
  ]


def _shared(pair: Sequence[Any]) -> int:
  """Return the number of characters or messages that both begin with."""
  return sum(
    1 for _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False))
  )


def _check(is_pair: bool, pair: Sequence[Any], label: str) -> None:
  if pair[0] == pair[1] or not is_pair:
    what = (
      'are the same' if pair[0] == pair[1] else 'have no prompt in common, or no answer after it'
    )
    raise UserError(
      f'{label} has chosen and rejected that {what}; correct the row, or leave it out'
    )
