"""Check the columns of a row that its form does not read, so that none is lost.

A column is text of the conversation, a verdict on its answers, or a fact about the row. Text must
be in the messages as well. A verdict is a column of true and false, or of 0 and 1 if its name says
so; its row is refused unless it is known to be good. Facts are ignored.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenformer_jax.errors import UserError

EMPTY = (None, '', [], {})
# The keys of a message, or of a row, that say whether it is learned: 1 or 0.
WEIGHTS = ('weight', 'loss_weight', 'train')
QUESTIONS = ('instruction', 'question', 'query', 'input', 'prompt')
ANSWERS = ('output', 'response', 'completion')
CHATS = ('messages', 'conversations', 'conversation')
SYSTEM = ('system', 'system_prompt', 'system_message')

_FLAGS = {'0': False, '0.0': False, 'false': False, '1': True, '1.0': True, 'true': True}
_THOUGHTS = ('reasoning', 'reasoning_content', 'thinking', 'thought', 'thoughts', 'think', 'cot')
_TEXTS = {
  *(*QUESTIONS, *ANSWERS, *CHATS, *SYSTEM, *_THOUGHTS, 'history', 'context', 'documents', 'tools'),
  *('tool_calls', 'functions', 'function_call', 'chat_template_kwargs', 'image', 'images', 'audio'),
  *('audios', 'video', 'videos', 'mask', 'loss_mask', 'completion_mask', 'assistant_mask'),
}
_BAD = ('no', 'bad', 'wrong', 'incorrect', 'rejected', 'undesirable', 'dislike', '-1')
_TURN = ('content', 'value', 'input', 'output')
# The words in names of verdicts, and of facts that can be true or false.
_VERDICT = re.compile(
  r'\b(labels?|tag|is|good|bad|(in)?correct|wrong|right|valid|accept(ed)?|reject(ed)?|preferred|'
  r'(un)?desirable|approved|liked?|thumbs|feedback|keep|exclude|learn|verified|pass(ed)?)\b'
)
_FACT = re.compile(
  r'\b(toxic|redacted|synthetic|deleted|formatting|custom instruction|parallel|in|turn|lang|'
  r'language|country|state|timestamp|header|ip|model|source|scores?|ratings?|rewards?)\b'
)


def is_learned(weight: Any) -> bool | None:
  """Return whether a weight says that a text is learned; None: it is neither 0 nor 1."""
  return _FLAGS.get(str(weight).lower())


def is_fact(name: str) -> bool:
  """Return whether a column, or a key of a message, has the name of a fact, not of a verdict."""
  return bool(_FACT.search(re.sub('[_-]', ' ', name.lower())))


def check(columns: dict[str, Any], messages: Sequence[dict[str, Any]], label: str) -> None:
  """Check that columns that are not read take nothing from messages, and add nothing to them."""
  for name, value in columns.items():
    is_text = _is_text(name, value)
    is_lost = not _is_in(name, value, messages) if is_text else _is_bad(name, value)
    if is_lost and value not in EMPTY:
      lost = 'its messages do not say and would be lost' if is_text else 'may mark a bad answer'
      raise UserError(
        f'{label} has {name} {value!r:.40}, which {lost}; write it into messages (as text, or as '
        'weight 0 or 1) or into chat_template_kwargs, or leave the row or the key out'
      )


def _is_text(name: str, value: Any) -> bool:
  """Return whether a column is a part of a conversation: by its name, or messages."""
  if name in _THOUGHTS and isinstance(value, str):
    return len(value.split()) > 1  # `on` is a fact.
  turns = value if isinstance(value, list) and not re.search('chosen|rejected', name) else ['']
  return name in _TEXTS or all(isinstance(one, dict) and {'role', 'from'} & {*one} for one in turns)


def _is_in(name: str, value: Any, messages: Sequence[dict[str, Any]]) -> bool:
  """Return whether messages have the texts of a column; a word may be in another by chance."""
  known = [(message['role'], (message.get('content') or '').strip()) for message in messages]
  for turn in value if isinstance(value, list) else [value]:
    texts = [turn[key] for key in _TURN if key in turn] if isinstance(turn, dict) else [turn]
    if not texts or not all(isinstance(text, str) for text in texts):
      return False
    for text in map(str.strip, texts):
      is_known = any(text == one or (' ' in text and text in one) for _, one in known)
      # A prompt can be the question as the template of another model writes it.
      is_asked = any(role == 'user' and one and one in text for role, one in known)
      if not is_known and not (name == 'prompt' and is_asked):
        return False
  return True


def _is_bad(name: str, value: Any) -> bool:
  """Return whether a column says, or may say, that the answers of its row are not learned."""
  flag = is_learned(value) if str(value).lower() not in _BAD else False
  if name in (*WEIGHTS, 'label', 'kto_tag'):
    return not flag and (flag is False or name != 'label')  # A label may be a topic.
  is_verdict = str(value).lower() in ('true', 'false') or _VERDICT.search(name.replace('_', ' '))
  return flag is not None and bool(is_verdict) and not is_fact(name)
