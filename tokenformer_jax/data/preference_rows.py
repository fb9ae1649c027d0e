"""Read pairs of a chosen and a rejected answer from rows, in the forms that the library TRL has.

A row has `chosen` and `rejected`: both answer a `prompt`, or both begin with it. Each is a list of
messages or a text. Two texts without a `prompt` are plain text, and no template writes them.
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenformer_jax.data import chat_rows
from tokenformer_jax.data.chat_rows import ANSWER_ROLE, Conversation
from tokenformer_jax.data.chat_template import Rendered, Template
from tokenformer_jax.errors import UserError

_PAIR = ('chosen', 'rejected')
# Columns of rows that are conversations as well.
_IGNORED = ('messages', 'conversations', 'conversation', 'response', 'completion', 'output')


class Pair(Conversation):
  """Both conversations of a row as JSON: see `render`."""


def columns(names: Iterable[str], label: str) -> list[str]:
  """Return those of some columns that are read: `conversation` uses or refuses each."""
  names = list(names)
  if not set(_PAIR) <= {*names}:
    raise UserError(
      f'{label} is no pair (config.data.rows=preference): it needs chosen and rejected, each a '
      f'list of messages or a text, and has {", ".join(names) or "nothing":.200}'
    )
  known = chat_rows.columns([*names, 'messages'], label)
  return [*_PAIR, *(name for name in known if name not in _IGNORED)]


def conversation(row: dict[str, Any], label: str) -> Pair:
  """Return the pair of a row."""
  rest = {name: row[name] for name in columns(row, label) if name not in (*_PAIR, 'prompt')}
  answers, prompt = [chat_rows.read_objects(row[name]) for name in _PAIR], row.get('prompt')
  if not prompt and all(isinstance(one, str) for one in answers):
    shared = re.match(r'(?s)(.*\S)\s', answers[0][: _shared(answers)])  # whole words
    length = shared.end(1) if shared else 0
    _check(all(length and one[length:].strip() for one in answers), answers, label)
    pair = [(one, length) for one in answers]
  else:
    # Conversations may have the prompt that is given as a text beside them.
    is_inside = isinstance(prompt, str) and not isinstance(answers[0], str) and _shared(answers)
    has_prompt = bool(prompt) and not is_inside
    forms = [
      {'prompt': prompt, 'completion': x} if has_prompt else {'messages': x} for x in answers
    ]
    pair = [chat_rows.parse_row({**form, **rest}, label) for form in forms]
    messages = [chat.messages for chat in pair]
    shared = _shared(messages)
    _check(0 < shared < min(map(len, messages)), messages, label)
    for message in itertools.chain(*(one[:shared] for one in messages)):
      if message['role'] == ANSWER_ROLE:
        message['weight'] = 0  # as a part of the prompt
    pair = [chat if chat.arguments else chat[:2] for chat in pair]
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
