"""Rows of every form that people have give the text and the marks of their conversation."""

import csv
import datetime
import json

import numpy as np
import pyarrow as pa
import pytest
import tiny_run
from pyarrow import parquet

from tokenformer_jax.data import chat_rows, chat_template, marks, tokenizers
from tokenformer_jax.data.chat_template import Template
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.data.text import CHAT
from tokenformer_jax.errors import UserError

LABEL = 'a.jsonl, line 3,'
QUESTION = {'role': 'user', 'content': 'What is 2 + 2?'}
ANSWER = {'role': 'assistant', 'content': 'Four.'}
MORE = [{'role': 'user', 'content': 'And 3 + 3?'}, {'role': 'assistant', 'content': 'Six.'}]
SYSTEM = {'role': 'system', 'content': 'Be brief.'}
TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': 'weather',
      'description': 'The weather <of> a town & its "region".',
      'parameters': {'type': 'object', 'properties': {'town': {'type': 'string'}}},
    },
  }
]
CALL = {'type': 'function', 'function': {'name': 'weather', 'arguments': {'town': 'Köln'}}}
CALLED = [
  {'role': 'user', 'content': 'Is it wet in Köln?'},
  {'role': 'assistant', 'tool_calls': [CALL]},
  {'role': 'tool', 'name': 'weather', 'content': 'rain'},
  {'role': 'assistant', 'content': 'Yes.'},
]
# In the manner of Qwen 2.5, with marks.
WITH_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}
{{- '\\n' }}{{- tool | tojson }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' ~ message.content ~ '</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def _sharegpt(messages, **roles) -> list[dict]:
  names = {'user': 'human', 'assistant': 'gpt', **roles}
  return [{'from': names.get(m['role'], m['role']), 'value': m['content']} for m in messages]


def _parts(message) -> dict:
  content = message['content']
  halves = (content[:3], content[3:])
  return {**message, 'content': [{'type': 'text', 'text': half} for half in halves]}


def _lists(messages) -> dict:
  return {key: [message[key] for message in messages] for key in messages[0]}


PAIR = [QUESTION, ANSWER]
CHAT_ROW = [SYSTEM, *PAIR, *MORE]
UNLEARNED = [QUESTION, {**ANSWER, 'weight': 0}, *MORE]
FORMS = {
  'sharegpt': ({'conversations': _sharegpt(CHAT_ROW)}, CHAT_ROW),
  'sharegpt, other names': (
    {'conversation': _sharegpt(PAIR, user='user', assistant='model')},
    PAIR,
  ),
  'sharegpt with system': ({'conversations': _sharegpt(PAIR), 'system': 'Be brief.'}, CHAT_ROW[:3]),
  'conversations of roles': ({'conversations': CHAT_ROW}, CHAT_ROW),
  'messages of from and value': ({'messages': _sharegpt(CHAT_ROW)}, CHAT_ROW),
  'lists of a struct': ({'messages': _lists(CHAT_ROW)}, CHAT_ROW),
  'lists of from and value': ({'conversations': _lists(_sharegpt(CHAT_ROW))}, CHAT_ROW),
  'json text': ({'messages': json.dumps(CHAT_ROW)}, CHAT_ROW),
  'a part': (
    {'messages': [QUESTION | {'content': {'type': 'text', 'text': 'Hi'}}, ANSWER]},
    [QUESTION | {'content': 'Hi'}, ANSWER],
  ),
  'parts': ({'messages': [*map(_parts, CHAT_ROW)]}, CHAT_ROW),
  'lists of parts': (
    {'messages': [_parts(m) | {'content': _lists(_parts(m)['content'])} for m in PAIR]},
    PAIR,
  ),
  'alpaca': ({'instruction': 'What is 2 + 2?', 'input': '', 'output': 'Four.', 'text': 'x'}, PAIR),
  'alpaca with input': (
    {'instruction': 'Add.', 'input': '2, 2', 'output': 'Four.'},
    [{'role': 'user', 'content': 'Add.\n\n2, 2'}, ANSWER],
  ),
  'alpaca with system': (
    {'instruction': 'What is 2 + 2?', 'output': 'Four.', 'system_prompt': 'Be brief.'},
    CHAT_ROW[:3],
  ),
  'a question and its response': ({'question': 'What is 2 + 2?', 'response': 'Four.'}, PAIR),
  'a query and its output': ({'query': 'What is 2 + 2?', 'output': 'Four.'}, PAIR),
  'an instruction with context': (
    {'instruction': 'Add.', 'context': '2, 2', 'response': 'Four.', 'category': 'closed_qa'},
    [{'role': 'user', 'content': 'Add.\n\n2, 2'}, ANSWER],
  ),
  'prompt and completion': ({'prompt': [SYSTEM, QUESTION], 'completion': [ANSWER]}, CHAT_ROW[:3]),
  'prompt as json text': ({'prompt': json.dumps([QUESTION]), 'response': 'Four.'}, PAIR),
  'a prompt with an answer': ({'prompt': [*PAIR, MORE[0]], 'completion': MORE[1:]}, UNLEARNED),
  'a prompt of brackets': (
    {'prompt': '[{"a": 1}]', 'response': '[2]'},
    [{'role': 'user', 'content': '[{"a": 1}]'}, {'role': 'assistant', 'content': '[2]'}],
  ),
  'several answers': ({'prompt': [QUESTION], 'completion': [ANSWER, MORE[1]]}, [*PAIR, MORE[1]]),
  'the filled one of two forms': ({'messages': None, 'conversations': _sharegpt(PAIR)}, PAIR),
  'two forms that agree': ({'messages': PAIR, 'prompt': 'What is 2 + 2?'}, PAIR),
}
WITH_CALLS = {
  'tools': {'messages': CALLED, 'tools': TOOLS},
  'tools as json text': {'messages': json.dumps(CALLED), 'tools': json.dumps(TOOLS)},
  'calls as json text': {
    'messages': [
      m | ({'tool_calls': json.dumps([CALL])} if 'tool_calls' in m else {}) for m in CALLED
    ],
    'tools': TOOLS,
  },
  'sharegpt with calls': {
    'conversations': [
      {'from': 'human', 'value': 'Is it wet in Köln?'},
      {'from': 'function_call', 'value': json.dumps(CALL['function'])},
      {'from': 'observation', 'value': 'rain'},
      {'from': 'gpt', 'value': 'Yes.'},
    ],
    'tools': TOOLS,
  },
}


@pytest.mark.parametrize('name', FORMS)
def test_a_row_of_each_form_is_its_conversation(name):
  row, messages = FORMS[name]
  chat = chat_rows.parse_row(row, LABEL)
  assert chat == chat_rows.Chat(messages)
  expected = chat_rows.conversation({'messages': messages}, LABEL)
  assert chat_rows.conversation(row, LABEL) == expected, 'another document, so another split'


@pytest.mark.parametrize('name', WITH_CALLS)
def test_tools_and_calls_reach_the_template(name):
  document = chat_rows.conversation(WITH_CALLS[name], LABEL)
  rendered = Template('T', WITH_TOOLS, {}).render(*chat_rows.parse_document(document))
  learned = [rendered.text[slice(*span)] for span in rendered.answers]
  call = json.dumps(CALL['function'], ensure_ascii=False)
  assert learned == [f'<tool_call>{call}</tool_call><|im_end|>', 'Yes.<|im_end|>']
  assert json.dumps(TOOLS[0], ensure_ascii=False) in rendered.text


# In the manner of SmolLM3, whose names are set in one branch only.
WITH_ARGUMENTS = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- if messages[0].role == 'system' -%}{%- set note = messages[0].content -%}{%- endif -%}
{{- note -}}{%- for one in documents or [] -%}[{{ one.text }}]{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- '' if enable_thinking else '<think></think>' -}}{{- message.content -}}
{%- endgeneration -%}
{%- endif -%}
{%- endfor -%}
"""


def _rendered(arguments, source=WITH_ARGUMENTS, **row) -> str:
  row = {'messages': PAIR, 'chat_template_kwargs': arguments, **row}
  document = chat_rows.conversation(row, LABEL)
  template = Template('T', source, {'eos_token': '</s>', 'image_token': '<i>'})
  return template.render(*chat_rows.parse_document(document), label=LABEL).text


@pytest.mark.parametrize(
  ('arguments', 'text'),
  [
    ({'enable_thinking': False}, '<think></think>Four.'),
    ('{"enable_thinking": false, "note": "Be brief. "}', 'Be brief. <think></think>Four.'),
    ({'enable_thinking': True, 'documents': [{'text': 'a'}]}, '[a]Four.'),
    ({'other': False, 'third': [], 'fourth': None}, 'Four.'),
    (None, 'Four.'),
  ],
)
def test_arguments_of_a_row_reach_the_template(arguments, text):
  assert _rendered(arguments, WITH_ARGUMENTS.replace('{{- note', '{{- note or ""')) == text


@pytest.mark.parametrize(
  ('arguments', 'sentence'),
  [
    *(
      ({name: [1]}, f"has '{name}' in chat_template_kwargs, which T does not")
      for name in ('messages', 'tools', 'add_generation_prompt', 'bos_token', 'image_token')
    ),
    (
      {'effort': 'low'},
      "begins with 'What.* has 'effort' in chat_template_kwargs, which T does no",
    ),
    ('thinking', r"line 3, has chat_template_kwargs 'thinking'; it must be a JSON object"),
    ([1], r'line 3, has chat_template_kwargs \[1\]; it must be a JSON object'),
    ({'note': '\ufdd0'}, r'line 3, chat_template_kwargs: has characters U\+FDD0'),
  ],
)
def test_arguments_that_a_template_cannot_have_are_refused(arguments, sentence):
  with pytest.raises(UserError, match=sentence):
    _rendered(arguments)


@pytest.mark.parametrize('key', ['description', 'na\ufdd1me'])
def test_marks_of_what_is_learned_are_refused_in_tools(key):
  with pytest.raises(UserError, match=r'line 3, tools: has characters U\+FDD0 or U\+FDD1'):
    chat_rows.parse_row({'messages': PAIR, 'tools': [{key: 'a\ufdd0b'}]}, LABEL)


REFUSED = {
  'an unknown role': (
    {'conversations': [{'from': 'cat', 'value': 'meow'}]},
    r"line 3, message 1 is from 'cat'; it must be from one of human, gpt, system",
  ),
  'a list of roles': (
    {'conversations': [{'from': ['gpt'], 'value': 'x'}]},
    r"is from \['gpt'\]; it",
  ),
  'a part of no type': (
    {'messages': [{'role': 'user', 'content': {'image': 'x.png'}}, ANSWER]},
    'line 3, message 1 has a part of the type None',
  ),
  'parts of texts': (
    {'messages': [{'role': 'user', 'content': ['What?']}, ANSWER]},
    "line 3, message 1 has a part of the type 'What",
  ),
  'an input beside messages': (
    {'instruction': [QUESTION], 'input': 'x', 'output': 'Four.'},
    "line 3, has input 'x', which its messages do not say",
  ),
  'both names of a role': (
    {'messages': [{'role': 'user', 'from': 'human', 'value': 'x'}]},
    'line 3, message 1 has role, from, value; it must have either role and content, or from and',
  ),
  'a picture': (
    {'messages': [{'role': 'user', 'content': [{'type': 'image', 'image': 'x.png'}]}, ANSWER]},
    "line 3, message 1 has a part of the type 'image'; only",
  ),
  'two forms that differ': (
    {'messages': PAIR, 'conversations': _sharegpt(MORE)},
    r'line 3, has conversations .* which its messages do not say',
  ),
  'two systems': ({'messages': CHAT_ROW, 'system': 'Be long.'}, "has system 'Be long.'"),
  'an empty answer': (
    {'instruction': 'Add.', 'input': '2, 2', 'output': ''},
    r"line 3, has an empty answer \(''\); leave the row out",
  ),
  'an answer of nothing': (
    {'messages': [QUESTION, {'role': 'assistant', 'tool_calls': []}]},
    'line 3, message 2 has no content; content must be text',
  ),
  'lists of two lengths': (
    {'messages': {'role': ['user', 'assistant'], 'content': ['x']}},
    r"line 3, has no list of messages \({'role'",
  ),
  'a repr': ({'messages': str(PAIR)}, r'line 3, has no list of messages \("\[{\'role\''),
  'tools of text': ({'messages': PAIR, 'tools': 'weather'}, "line 3, has 'weather' as its tools"),
  'a call that is no JSON': (
    {'conversations': [_sharegpt(PAIR)[0], {'from': 'function_call', 'value': 'add(2, 2)'}]},
    r"line 3, message 2 has \['add\(2, 2\)'\] as its function_call; it must be a list of JSON",
  ),
  'calls that are no objects': (
    {'messages': [QUESTION, {**ANSWER, 'tool_calls': ['add']}]},
    r"line 3, message 2 has \['add'\] as its tool_calls; it must be a list of JSON objects",
  ),
  'a pair': (
    {'prompt': 'x', 'chosen': 'y', 'rejected': 'z'},
    'for pairs set config.data.rows=pref',
  ),
  'no form': ({'problem': 'x', 'answer': 'y'}, 'has problem, answer'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_another_row_is_refused_in_a_sentence(name):
  row, sentence = REFUSED[name]
  with pytest.raises(UserError, match=sentence):
    chat_rows.parse_row(row, LABEL)


def test_a_value_that_json_lacks_is_text():
  dated = {'messages': [QUESTION | {'at': datetime.date(2026, 1, 2)}, ANSWER]}
  assert '"at": "2026-01-02"' in chat_rows.conversation(dated, LABEL)


def test_tools_without_text_are_refused():
  with pytest.raises(UserError, match=r'line 3, a conversation .* has tools, of which T makes no'):
    Template('T', chat_template.OURS, {}).render(PAIR, TOOLS, label=LABEL)


def _documents(source: str) -> list[chat_rows.Chat]:
  return [chat_rows.parse_document(one) for one in open_source(source, CHAT).documents()]


def test_tables_have_conversations_as_lists_of_objects_and_as_json_text(tmp_path):
  """Arrow gives all messages and all arguments of a column the same keys, with nulls."""
  other = [{'function': {'name': 'time', 'arguments': {'zone': 'CET'}}}]
  late = [CALLED[0], {'role': 'assistant', 'tool_calls': other}]
  rows = [{'messages': CALLED, 'tools': TOOLS}, {'messages': late, 'tools': TOOLS}]
  expected = [chat_rows.Chat(**row) for row in rows]
  parquet.write_table(pa.Table.from_pylist(rows), tmp_path / 'a.parquet')
  assert _documents(f'parquet:{tmp_path}/a.parquet') == expected
  with open(tmp_path / 'a.csv', 'w', newline='') as file:
    writer = csv.DictWriter(file, ['messages', 'tools'])
    writer.writeheader()
    writer.writerows({key: json.dumps(value) for key, value in row.items()} for row in rows)
  assert _documents(f'files:{tmp_path}/a.csv') == expected


@pytest.mark.slow
def test_forms_have_the_ids_and_marks_of_transformers(tmp_path):
  """By the installed transformers, with the tokenizer of the golden values."""
  transformers = pytest.importorskip('transformers')
  golden = json.loads((tiny_run.ROOT / 'tests/golden/chat.json').read_text('utf-8'))
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(golden['tokenizer']))
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **golden['tokens'])
  ours, template = tokenizers.load(str(path)), Template('T', WITH_TOOLS, golden['tokens'])
  cases = [(row, messages, None) for row, messages in FORMS.values()]
  cases += [(row, CALLED, TOOLS) for row in [*WITH_CALLS.values()][:3]]
  for row, messages, tools in cases:
    expected = theirs.apply_chat_template(
      messages,
      tools,
      chat_template=WITH_TOOLS,
      return_dict=True,
      return_assistant_tokens_mask=True,
    )
    chat = chat_rows.parse_row(row, LABEL)
    (ids,) = ours.encode_chats([template.render(*chat)])
    assert marks.plain(ids).tolist() == expected['input_ids'], row
    mask = np.array(expected['assistant_masks'])
    if messages is UNLEARNED:  # The library has no weights.
      first = int(np.flatnonzero(mask)[0])
      mask[: first + int(np.argmin(mask[first:]))] = 0
    assert (ids >= 0).astype(int).tolist() == mask.tolist(), row
    asked = template.render(*chat, ask=True).text
    assert asked == theirs.apply_chat_template(
      messages, tools, chat_template=WITH_TOOLS, tokenize=False, add_generation_prompt=True
    )
  arguments = {'enable_thinking': False, 'documents': [{'title': 'A', 'text': 'a'}]}
  expected = theirs.apply_chat_template(
    PAIR, chat_template=WITH_ARGUMENTS, tokenize=False, **arguments
  )
  assert Template('T', WITH_ARGUMENTS, {}).render(PAIR, None, arguments, ask=True).text == expected
