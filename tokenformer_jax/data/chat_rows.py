"""Read conversations from rows: the forms that rows have, and what is wrong with them.

`_FORMS` has the forms by their keys, and `parse_row` makes messages of each as `transformers` takes
them: `role` and `content`, with `tool_calls` in a message and `tools` in a row. The document of a
row is its messages as JSON, from which a template makes text. `row_columns` checks the rest.
"""

import itertools
import json
from typing import Any, NamedTuple

from tokenformer_jax.data import row_columns
from tokenformer_jax.data.chat_jinja import MARKS
from tokenformer_jax.data.row_columns import EMPTY, WEIGHTS
from tokenformer_jax.errors import UserError

ANSWER_ROLE = 'assistant'
# Further values for the template, by their names: the key of TRL and of the server vLLM.
ARGUMENTS = 'chat_template_kwargs'
_PLAIN = ('role', 'content', 'id', 'tool_call_id')  # The last two are no text.
# A list of messages; or what is asked and what is answered: texts, or lists of messages.
_FORMS = (
  *((key,) for key in row_columns.CHATS),
  *(('prompt', 'response'), ('prompt', 'completion')),
  *itertools.product(row_columns.QUESTIONS, row_columns.ANSWERS),
)
_SHAPES = (
  'messages (a list of {"role", "content"}), conversations (of {"from", "value"}), or prompt, '
  'instruction, question, query or input with response, completion or output'
)
# The roles of ShareGPT, which a message is `from`.
_ROLES = {
  **{'human': 'user', 'gpt': ANSWER_ROLE, 'system': 'system', 'tool': 'tool'},
  **{'user': 'user', 'assistant': ANSWER_ROLE, 'chatgpt': ANSWER_ROLE, 'model': ANSWER_ROLE},
  **{'function_call': ANSWER_ROLE, 'observation': 'tool'},
}


class Conversation(str):
  """The messages of a row as JSON. `label` names the row in errors."""

  label = ''


class Chat(NamedTuple):
  """The messages that a template renders, the tools that they may call, and further values."""

  messages: list[dict[str, Any]]
  tools: list[dict[str, Any]] | None = None
  arguments: dict[str, Any] | None = None  # see `Template.render`


def more_keys(message: dict[str, Any]) -> list[str]:
  """Return the keys of a message, besides role and content, that have text of a template."""
  plain = (*_PLAIN, 'name') if message['role'] == 'tool' else _PLAIN
  more = [key for key, value in message.items() if key not in plain and value not in EMPTY]
  return [key for key in more if not row_columns.is_fact(key)]


def conversation(row: dict[str, Any], label: str) -> Conversation:
  """Return the messages of a row as JSON, in an object if there are tools or arguments."""
  chat = parse_row(row, label)
  values = {key: value for key, value in chat._asdict().items() if value}
  text = _json(values if len(values) > 1 else chat.messages)
  # JSON can hold lone surrogates.
  document = Conversation(text.encode('utf-8', errors='replace').decode())
  document.label = label
  return document


def _json(values: Any) -> str:
  return json.dumps(values, ensure_ascii=False, default=str)  # Tables have dates.


def parse_document(document: str) -> Chat:
  """Return what `conversation` wrote."""
  values = json.loads(document)
  return Chat(**values) if isinstance(values, dict) else Chat(values)


def parse_row(row: dict[str, Any], label: str) -> Chat:
  """Return the messages and the tools of a row of any form; `label` names it in errors."""
  chat, rest = read_form(row, _find_form(row, label), label)
  row_columns.check(rest, chat.messages, label)
  return chat


def read_form(
  row: dict[str, Any], form: tuple[str, ...], label: str
) -> tuple[Chat, dict[str, Any]]:
  """Return the messages and the tools in columns of a row, and its other columns.

  A form is a column of messages, or one of a question and one of its answer, each a text or
  messages. Answers inside of a question have the weight 0, unless they have one: a prompt is not
  learned.
  """
  used = {*form, 'tools', ARGUMENTS}
  if len(form) == 1:
    messages = read_messages(row[form[0]], label)
  else:
    asked, more = row[form[0]], next((key for key in ('input', 'context') if row.get(key)), '')
    if form[0] == 'instruction' and isinstance(asked, str) and isinstance(row.get(more), str):
      asked, used = f'{asked}\n\n{row[more]}', used | {more}
    prompt = as_turns(asked, 'user')
    messages = read_messages([*prompt, *as_turns(row[form[1]], ANSWER_ROLE)], label)
    for message in messages[: len(prompt)]:
      if message['role'] == ANSWER_ROLE and not {*WEIGHTS} & {*message}:
        message['weight'] = 0
  system = next((key for key in row_columns.SYSTEM if row.get(key)), None)
  if system and messages[0]['role'] != 'system':
    messages = read_messages([{'role': 'system', 'content': row[system]}, *messages], label)
    used.add(system)
  for message in messages:
    is_answer = message['role'] == ANSWER_ROLE and not message.get('tool_calls')
    if is_answer and not (content := message['content']).strip():
      raise UserError(f'{label} has an empty answer ({content!r}); leave the row out')
  tools, arguments = read_tools(row.get('tools'), label), read_arguments(row.get(ARGUMENTS), label)
  return Chat(messages, tools, arguments), {key: row[key] for key in row if key not in used}


def read_tools(values: Any, label: str, name: str = 'tools') -> list[dict[str, Any]] | None:
  """Return the tools of a list of objects, or of JSON text of one; None: there are none."""
  tools = read_objects(values)
  if tools in EMPTY:
    return None
  if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
    raise UserError(f'{label} has {tools!r:.60} as its {name}; it must be a list of JSON objects')
  _check_marks(tools, f'{label} {name}:')
  return [*tools]


def read_arguments(values: Any, label: str) -> dict[str, Any] | None:
  """Return the arguments of a template (`ARGUMENTS`), or of JSON text of them; None: none."""
  arguments = read_objects(values, of_lists=False)
  if arguments in EMPTY:
    return None
  if not isinstance(arguments, dict):
    raise UserError(f'{label} has {ARGUMENTS} {arguments!r:.60}; it must be a JSON object')
  _check_marks(arguments, f'{label} {ARGUMENTS}:')
  return arguments


def read_messages(values: Any, label: str) -> list[dict[str, Any]]:
  """Return the messages of a list of objects, of an object of lists, or of JSON text of either."""
  messages = read_objects(values)
  if not isinstance(messages, list | tuple) or not messages:
    value = f'{values!r:.100}' if values else 'none'
    raise UserError(
      f'{label} has no list of messages ({value}); it must be a list of {{"role", "content"}}'
    )
  return [_message(one, f'{label} message {i}') for i, one in enumerate(messages, start=1)]


def without_nulls(value: Any, *, inside: bool = False) -> Any:
  """Return a row of an Arrow table without null keys inside: there, all rows have all keys."""
  if isinstance(value, dict):
    kept = {key: one for key, one in value.items() if not inside or one is not None}
    return {key: without_nulls(one, inside=True) for key, one in kept.items()}
  return [without_nulls(one, inside=True) for one in value] if isinstance(value, list) else value


def _find_form(row: dict[str, Any], label: str) -> tuple[str, ...]:
  """Return the keys of the form of a row: of several forms, the first that is filled."""
  forms = [form for form in _FORMS if all(key in row for key in form)]
  if not forms:
    listed = ', '.join(row) or 'nothing'
    is_pair = any(name in listed for name in ('chosen', 'rejected', 'preferred'))
    pairs = '; for pairs set config.data.rows=preference' if is_pair else ''
    raise UserError(
      f'{label} is no conversation (config.data.rows=chat): it needs {_SHAPES}, and has '
      f'{listed:.200}{pairs}'
    )
  return next((form for form in forms if all(row[key] not in EMPTY for key in form)), forms[0])


def read_objects(values: Any, *, of_lists: bool = True) -> Any:
  """Return a list of objects that is given as JSON text or as an object of lists, or the value."""
  if isinstance(values, str) and values.strip()[:1] in ('[', '{'):
    try:
      values = json.loads(values)
    except (ValueError, RecursionError):
      return values
  if of_lists and isinstance(values, dict) and values:
    lists = [*values.values()]
    if all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists):
      return [dict(zip(values, one, strict=True)) for one in zip(*lists, strict=True)]
  return values


def _check_marks(value: Any, label: str) -> None:
  """Check that no text in a value has the marks of what is learned."""
  if any(mark in _json(value) for mark in MARKS):
    wrong = 'characters U+FDD0 or U+FDD1, which are no text'
    raise UserError(f'{label} has {wrong}; correct the row, or leave it out')


def as_turns(value: Any, role: str) -> list[Any]:
  """Return messages, a message, or JSON text of either as a list; a text as a message of a role."""
  turns = read_objects(value)
  turns = [turns] if isinstance(turns, dict) else turns
  is_list = isinstance(turns, list) and bool(turns)
  if is_list and all(isinstance(one, dict) and {'role', 'from'} & {*one} for one in turns):
    return turns
  return [{'role': role, 'content': value}]


def _message(values: Any, label: str) -> dict[str, Any]:
  """Return a message with the keys that a template reads, checked."""
  if not isinstance(values, dict):
    raise UserError(f'{label} is {values!r:.100}; it must be an object with role and content')
  message = {key: value for key, value in values.items() if value is not None}
  if {'from', 'value'} & {*message}:
    message = _from_sharegpt(message, label)
  if message.get('tool_calls') not in EMPTY:
    message['tool_calls'] = read_tools(message['tool_calls'], label, 'tool_calls')
  if isinstance(message.get('content'), list | dict):
    message['content'] = _join_parts(message['content'], label)
  for key in _PLAIN[: 1 if message.get('tool_calls') and 'content' not in message else 2]:
    if not isinstance(message.get(key), str):
      has = f'{message[key]!r:.60} as its {key}' if key in message else f'no {key}'
      raise UserError(f'{label} has {has}; {key} must be text')
  if not message['role']:
    raise UserError(f'{label} has no role; correct the row, or leave it out')
  _check_marks(message, label)
  return message


def _from_sharegpt(message: dict[str, Any], label: str) -> dict[str, Any]:
  """Return a message of `from` and `value` as one of `role` and `content`."""
  if {'role', 'content'} & {*message}:
    raise UserError(
      f'{label} has {", ".join(message)}; it must have either role and content, or from and value'
    )
  given, value = message.pop('from', None), message.pop('value', None)
  if str(given) not in _ROLES:
    raise UserError(f'{label} is from {given!r:.60}; it must be from one of {", ".join(_ROLES)}')
  if given == 'function_call':
    call = read_objects(value, of_lists=False)
    calls = read_tools(call if isinstance(call, list) else [call], label, 'function_call')
    message['tool_calls'] = [{'type': 'function', 'function': one} for one in calls or []]
    value = ''
  return {'role': _ROLES[given], 'content': value, **message}


def _join_parts(content: Any, label: str) -> str:
  parts = read_objects(content)
  parts = [parts] if isinstance(parts, dict) else parts
  for part in [part if isinstance(part, dict) else {'type': part} for part in parts]:
    if part.get('type') != 'text' or not isinstance(part.get('text'), str):
      raise UserError(
        f'{label} has a part of the type {part.get("type")!r:.60}; only {{"type": "text", "text": '
        '…} is read; leave the row out'
      )
  return ''.join(part['text'] for part in parts)
