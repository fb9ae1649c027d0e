"""Read conversations from rows: their columns, their shapes, and what is wrong with them.

A row has `messages`, a list of objects with `role` and `content`, or a `prompt` with its `response`
or `completion`. The document of a row is its messages as JSON, from which a template makes text.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenformer_jax.errors import UserError

ANSWER_ROLE = 'assistant'
# The marks of a template in its text (`chat_template`); Unicode keeps both out of any text.
MARKS = ('\ufdd0', '\ufdd1')

_LONGEST = 2**24  # characters; a longer text would be cut into pieces
_ANSWERS = ('response', 'completion')
_SHAPES = 'messages (a list of {"role", "content"}), or prompt with response or completion'


def columns(names: Iterable[str], place: str) -> list[str]:
  """Return those of some columns of which a conversation is made.

  Raises:
    UserError: there are none.
  """
  names = list(names)
  answer = next((name for name in _ANSWERS if name in names), None)
  if 'messages' in names:
    return ['messages']
  if 'prompt' in names and answer:
    return ['prompt', answer]
  found = ', '.join(names) or 'nothing'
  raise UserError(
    f'{place} is no conversation (config.data.rows=chat): it needs {_SHAPES}, and has {found:.200}'
  )


def conversation(row: dict[str, Any], place: str) -> str:
  """Return the messages of a row as JSON.

  Raises:
    UserError: the row has another shape, a message without role or content, or no answer.
  """
  first, *answer = columns(row, place)
  messages = row[first]
  if answer:
    messages = [
      {'role': 'user', 'content': row[first]},
      {'role': ANSWER_ROLE, 'content': row[answer[0]]},
    ]
  check_messages(messages, place)
  if blank := [m for m in messages if m['role'] == ANSWER_ROLE and not m['content'].strip()]:
    raise UserError(f'{place} has an empty answer ({blank[0]["content"]!r}); leave the row out')
  kept = [{key: value for key, value in m.items() if value is not None} for m in messages]
  text = json.dumps(kept, ensure_ascii=False)
  if len(text) > _LONGEST:
    raise UserError(
      f'{place} has a conversation of more than {_LONGEST >> 20} Mi characters; divide it, or '
      'leave the row out'
    )
  return text.encode('utf-8', errors='replace').decode()  # JSON can hold lone surrogates.


def check_messages(messages: Any, place: str) -> None:
  """Check the form of messages.

  Raises:
    UserError: they are no list of objects with `role` and `content`, or there are none.
  """
  if not isinstance(messages, list | tuple) or not messages:
    found = f'{messages!r:.100}' if messages else 'none'
    raise UserError(
      f'{place} has no list of messages ({found}); it must be a list of {{"role", "content"}}'
    )
  for number, message in enumerate(messages, start=1):
    if not isinstance(message, dict):
      raise UserError(
        f'{place} message {number} is {message!r:.100}; it must be an object with role and content'
      )
    for key in ('role', 'content'):
      if not isinstance(message.get(key), str):
        has = f'{message[key]!r:.60} as its {key}' if message.get(key) is not None else f'no {key}'
        raise UserError(f'{place} message {number} has {has}; {key} must be text')
    if not message['role'] or any(mark in message['content'] for mark in MARKS):
      wrong = 'characters U+FDD0 or U+FDD1, which are no text' if message['role'] else 'no role'
      raise UserError(f'{place} message {number} has {wrong}; correct the row, or leave it out')
