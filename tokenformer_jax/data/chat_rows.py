"""Read conversations from rows: their columns, their shapes, and what is wrong with them.

A row has `messages`, a list of objects with `role` and `content`, or a `prompt` with its `response`
or `completion`. The document of a row is its messages as JSON, from which a template makes text.
A row with more that decides what is learned, or that belongs to the text, is refused. Columns of
other names are ignored.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenformer_jax.data.chat_jinja import MARKS
from tokenformer_jax.errors import UserError

ANSWER_ROLE = 'assistant'
# The keys of a message that say whether it is learned: 1 or 0.
WEIGHTS = ('weight', 'loss_weight', 'train')

_PLAIN = ('role', 'content', 'id', 'tool_call_id')  # The last two are no text.
_FLAGS = {'0': False, '0.0': False, 'false': False, '1': True, '1.0': True, 'true': True}
_EMPTY = (None, '', [], {})
# The columns of a row, besides those that are read, that say what is learned or belong to the text.
_OF_CONVERSATIONS = (
  *(*WEIGHTS, 'label', 'messages', 'prompt', 'response', 'completion', 'conversations', 'system'),
  *('system_prompt', 'history', 'context', 'instruction', 'input', 'tools', 'tool_calls'),
  *('functions', 'function_call', 'documents', 'mask', 'loss_mask', 'completion_mask'),
)
_ANSWERS = ('response', 'completion')
_SHAPES = 'messages (a list of {"role", "content"}), or prompt with response or completion'


class Conversation(str):
  """The messages of a row as JSON. `label` names the row in errors."""

  label = ''


def columns(names: Iterable[str], label: str) -> list[str]:
  """Return those of some columns that are read: `conversation` uses or refuses each."""
  names = list(names)
  used = _used_names(names, label)
  return used + [name for name in names if name in _OF_CONVERSATIONS and name not in used]


def _used_names(names: Iterable[str], label: str) -> list[str]:
  """Return the names that a conversation is made of."""
  answer = next((name for name in _ANSWERS if name in names), None)
  if 'messages' in names:
    return ['messages']
  if 'prompt' in names and answer:
    return ['prompt', answer]
  listed = ', '.join(names) or 'nothing'
  raise UserError(
    f'{label} is no conversation (config.data.rows=chat): it needs {_SHAPES}, and has {listed:.200}'
  )


def is_learned(weight: Any) -> bool | None:
  """Return whether a weight says that a text is learned; None: it is neither 0 nor 1."""
  return _FLAGS.get(str(weight).lower())


def more_keys(message: dict[str, Any]) -> list[str]:
  """Return the keys of a message, besides role and content, that have a value."""
  return [key for key, value in message.items() if key not in _PLAIN and value not in _EMPTY]


def conversation(row: dict[str, Any], label: str) -> Conversation:
  """Return the messages of a row as JSON."""
  first, *answer = used = _used_names(list(row), label)
  messages = row[first]
  if answer:
    messages = [
      {'role': 'user', 'content': row[first]},
      {'role': ANSWER_ROLE, 'content': row[answer[0]]},
    ]
  check_messages(messages, label)
  if blank := [m for m in messages if m['role'] == ANSWER_ROLE and not m['content'].strip()]:
    raise UserError(f'{label} has an empty answer ({blank[0]["content"]!r}); leave the row out')
  _check_rest({key: row[key] for key in row if key not in used}, messages, label)
  kept = [{key: value for key, value in m.items() if value is not None} for m in messages]
  text = json.dumps(kept, ensure_ascii=False)
  # JSON can hold lone surrogates.
  document = Conversation(text.encode('utf-8', errors='replace').decode())
  document.label = label
  return document


def _check_rest(rest: dict[str, Any], messages: list[dict[str, Any]], label: str) -> None:
  """Check that the rest of a row takes nothing from its messages, and adds nothing to them."""
  texts = [message['content'] for message in messages]
  for key, value in rest.items():
    learned = is_learned(value)
    is_topic = key == 'label' and learned is None
    if key in _OF_CONVERSATIONS and not (value in _EMPTY or learned or is_topic or value in texts):
      raise UserError(
        f'{label} has {key} {value!r:.40}, which its messages do not say and would be lost; write '
        'it into messages, or leave the row or the key out'
      )


def check_messages(messages: Any, label: str) -> None:
  """Check the form of messages."""
  if not isinstance(messages, list | tuple) or not messages:
    value = f'{messages!r:.100}' if messages else 'none'
    raise UserError(
      f'{label} has no list of messages ({value}); it must be a list of {{"role", "content"}}'
    )
  for number, message in enumerate(messages, start=1):
    if not isinstance(message, dict):
      raise UserError(
        f'{label} message {number} is {message!r:.100}; it must be an object with role and content'
      )
    for key in ('role', 'content'):
      if not isinstance(message.get(key), str):
        has = f'{message[key]!r:.60} as its {key}' if message.get(key) is not None else f'no {key}'
        raise UserError(f'{label} message {number} has {has}; {key} must be text')
    if not message['role'] or any(mark in message['content'] for mark in MARKS):
      wrong = 'characters U+FDD0 or U+FDD1, which are no text' if message['role'] else 'no role'
      raise UserError(f'{label} message {number} has {wrong}; correct the row, or leave it out')
