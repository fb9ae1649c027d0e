"""Conversations become tokens of which only the answers carry loss.

`tests/golden/chat.json` has what `transformers` makes of some of them: see its key `from`.
"""

import dataclasses
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
import tiny_run
import tokenizers as hf
from byte_text import byte_config, total
from pyarrow import parquet

from tokenformer_jax.config import DataConfig, TextConfig
from tokenformer_jax.data import (
  chat_rows,
  chat_template,
  marks,
  order,
  shards,
  store,
  tokenizers,
)
from tokenformer_jax.data.chat_template import Template, find_template
from tokenformer_jax.decoding import chats
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.errors import UserError

GOLDEN = json.loads((tiny_run.ROOT / 'tests/golden/chat.json').read_text('utf-8'))
ROWS = [
  {'prompt': f'What is {i} + {i}?', 'response': f'It is {2 * i}.{"!" * (i % 3)}'} for i in range(60)
]


def _chat(row) -> list[dict[str, str]]:
  return [
    {'role': 'user', 'content': row['prompt']},
    {'role': 'assistant', 'content': row['response']},
  ]


QUESTION = _chat(ROWS[0])[:1]
MESSAGES = [{'id': i, 'messages': _chat(row)} for i, row in enumerate(ROWS)]


def _write(path, rows=MESSAGES) -> str:
  path.write_text('\n'.join(map(json.dumps, rows)), 'utf-8')
  return f'files:{path}'


def _config(tmp_path, source, **changes) -> DataConfig:
  sizes = {'sequence_length': 32, 'batch_size': 4}
  return byte_config(tmp_path, source, **{'rows': 'chat', **sizes, **changes})


def _prepare(tmp_path, source, **changes) -> store.Store:
  return store.prepare(_config(tmp_path, source, **changes))


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """The tokenizer.json of the golden values, and its folder."""
  path = tmp_path_factory.mktemp('hf') / 'tokenizer.json'
  path.write_text(json.dumps(GOLDEN['tokenizer']))
  return path


@pytest.mark.parametrize('name', GOLDEN['templates'])
def test_text_and_marks_are_those_of_transformers(name, tokenizer):
  golden = GOLDEN['templates'][name]
  template = Template(name, golden['template'], GOLDEN['tokens'])
  loaded = tokenizers.load(str(tokenizer))
  for messages, expected in zip(GOLDEN['chats'], golden['rows'], strict=True):
    rendered = template.render(messages)
    assert rendered.text == expected['text'], 'another text'
    (ids,) = loaded.encode_chats([rendered])
    assert marks.plain(ids).tolist() == expected['ids'], 'other tokens'
    assert (ids >= 0).astype(int).tolist() == expected['mask'], 'the loss is on other tokens'
    assert template.render(messages[:-1], ask=True).text == expected['ask'], 'another question'


def test_the_template_is_that_of_the_config_the_tokenizer_or_the_package(tmp_path, tokenizer):
  golden = GOLDEN['templates']
  mine = tmp_path / 'mine.jinja'
  mine.write_text(golden['inline']['template'])
  (tmp_path / 'tokenizer.json').write_text(tokenizer.read_text())
  entry = {'chat_template': golden['chatml']['template'], 'bos_token': {'content': '<s>'}}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(entry))
  own = str(tmp_path / 'tokenizer.json')
  template = find_template(TextConfig(tokenizer=own))
  assert template.source == golden['chatml']['template']
  assert template.tokens == GOLDEN['tokens'], 'the end of document is missing'
  assert template.end_of_turn(QUESTION) == '<|im_end|>'
  template = find_template(TextConfig(tokenizer=own, chat_template=str(mine)))
  assert template.source == mine.read_text() and template.end_of_turn(QUESTION) == '<|endoftext|>'
  (tmp_path / 'chat_template.jinja').write_text(golden['inline']['template'])
  assert find_template(TextConfig(tokenizer=own)).source == golden['inline']['template']
  built_in = find_template(TextConfig(tokenizer='bpe:300'))
  assert built_in.source == chat_template.OURS and built_in.end_of_turn(QUESTION) == '<|end|>'
  assert pickle.loads(pickle.dumps(built_in)) == built_in, 'processes cannot have it'


PLAIN = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
NAMED = {'default': PLAIN, 'rag': '{{ documents }}', 'tool_use': f'{{{{ tools | tojson }}}}{PLAIN}'}
TOOLS = [{'type': 'function', 'function': {'name': 'f', 'parameters': {}}}]


def _folder(tmp_path, tokenizer, entry, **files: str) -> TextConfig:
  """A tokenizer with templates in tokenizer_config.json, and in files of their names."""
  (tmp_path / 'additional_chat_templates').mkdir(exist_ok=True)
  for name, source in files.items():
    (tmp_path / f'{name.replace("__", "/")}.jinja').write_text(source)
  (tmp_path / 'tokenizer.json').write_text(tokenizer.read_text())
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'chat_template': entry}))
  return TextConfig(tokenizer=str(tmp_path / 'tokenizer.json'))


@pytest.mark.parametrize('form', ['list', 'dict', 'files'])
def test_rows_with_tools_take_the_template_of_that_name(tmp_path, tokenizer, form):
  """As `get_chat_template` of transformers."""
  entry, files = [{'name': k, 'template': v} for k, v in NAMED.items()], {}
  if form == 'dict':
    entry = NAMED
  if form == 'files':  # which win
    entry = 'other'
    files = {'chat_template': PLAIN, 'additional_chat_templates__tool_use': NAMED['tool_use']}
  template = find_template(_folder(tmp_path, tokenizer, entry, **files), to_learn=False)
  assert template.render(QUESTION, ask=True).text == '<user>What is 0 + 0?'
  asked = template.render(QUESTION, TOOLS, ask=True).text
  assert asked == f'{json.dumps(TOOLS)}<user>What is 0 + 0?'
  assert Template(**template.to_json()) == template
  alone = Template(template.name, PLAIN, template.tokens)
  assert alone.fingerprint != template.fingerprint, 'a store of other texts would be used'
  other = dataclasses.replace(template, named={'tool_use': NAMED['tool_use']})
  assert other.fingerprint == template.fingerprint, 'the text of no row is another one'


@pytest.mark.parametrize(
  ('entry', 'sentence'),
  [
    ([{'name': 'tool_use', 'template': PLAIN}], 'has no template named default, only tool_use; na'),
    (
      [{'name': 'default'}],
      r"tokenizer_config.json is \[{'name': 'default'}\]; it must be a templ",
    ),
    (['a'], r"is \['a'\]; it must be a template, or a list of"),
    (3, 'is 3; it must be a template'),
  ],
)
def test_templates_without_a_name_or_a_text_are_refused(tmp_path, tokenizer, entry, sentence):
  with pytest.raises(UserError, match=sentence):
    find_template(_folder(tmp_path, tokenizer, entry), to_learn=False)


def test_a_question_names_arguments_that_its_template_reads():
  template = Template('T', '{{ 1 if enable_thinking is false else 2 }}', {}, {'tool_use': '3'})
  assert template.render(QUESTION, None, {'enable_thinking': False}, ask=True).text == '1'
  assert template.render(QUESTION, None, {'enable_thinkin': None}, ask=True).text == '2'
  for tools, name in ((None, 'enable_thinkin'), (TOOLS, 'enable_thinking')):
    with pytest.raises(UserError, match=f"has '{name}' in chat_template_kwargs, which T does not"):
      template.render(QUESTION, tools, {name: False}, ask=True)


@pytest.mark.parametrize('key', ['reasoning', 'thinking', 'reasoning_content'])
def test_reasoning_has_the_names_that_templates_read(key):
  messages = [*QUESTION, {'role': 'assistant', 'content': 'Four.', key: 'two and two'}]
  source = WITH_NAMES.replace('{{ m.name }}: ', '').replace('m.content', "(m.get('NAME') or '')")
  for name in ('thinking', 'reasoning_content'):
    assert 'two and two' in _learned(messages, source.replace('NAME', name))
  earlier = '{% for m in messages[3:] %}{{ m.reasoning_content }}{% endfor %}'
  asked = Template('T', earlier, {}).render([*messages, *QUESTION], ask=True)
  assert asked.text == '', 'the reasoning of earlier turns is refused where the template drops it'
  with pytest.raises(UserError, match=f'{key!r} in a message, of which T makes no text'):
    _learned(messages)


# What a row says, and what a template makes of it

TURNS = [*_chat(ROWS[1]), *_chat(ROWS[2])]
WITH_NAMES = (
  '{% for m in messages %}{{ m.name }}: {% generation %}{{ m.content }}{% endgeneration %}'
  '{% endfor %}'
)


def _learned(messages, source=chat_template.OURS, **row) -> list[str]:
  """The texts that a row teaches."""
  document = chat_rows.conversation({'messages': messages, **row}, 'a.jsonl, line 3,')
  chat = chat_rows.parse_document(document)
  rendered = Template('T', source, {}).render(*chat, label=document.label)
  return [rendered.text[slice(*span)] for span in rendered.answers]


def _with(number: int, **keys) -> list[dict]:
  return [{**turn, **keys} if i == number else turn for i, turn in enumerate(TURNS)]


@pytest.mark.parametrize('key', ['weight', 'train', 'loss_weight'])
def test_answers_of_weight_0_carry_no_loss(key):
  both = [f'{turn["content"]}<|end|>' for turn in TURNS[1::2]]
  for nothing, one in ((0, 1), (False, True), (0.0, 1.0)):
    assert _learned(_with(1, **{key: nothing})) == both[1:], 'it is learned'
    assert _learned(_with(3, **{key: nothing})) == both[:1], 'another answer is left out'
    assert _learned(_with(1, **{key: one}), label=True, weight=1, id=5) == both
  assert _learned(_with(0, **{key: 0})) == both


@pytest.mark.parametrize(
  ('messages', 'row', 'sentence'),
  [
    (_with(1, weight=0.5), {}, "begins with 'What.* has weight 0.5 in message 2; it must be 0 or"),
    (_with(0, train=True), {}, 'train True in message 1; .* not 1 in a message that is no answer'),
    (_with(1, tool_calls=[{'id': 'c'}]), {}, "has 'tool_calls' in a message, of which T makes no"),
    (_with(0, name='Bo'), {}, "a.jsonl, line 3, a conversation .* has 'name' in a message"),
    (TURNS, {'label': False}, 'line 3, has label False, .* leave the row or the key out'),
    (TURNS, {'weight': 0}, 'line 3, has weight 0'),
    (TURNS, {'train': 'no'}, "has train 'no'"),
    (TURNS, {'completion': 'Five.'}, 'has completion .Five.., which its messages do not say'),
    (TURNS, {'history': [['q', 'a']]}, 'line 3, has history .* would be lost; write it into mess'),
    (TURNS, {'tools': [{'name': 'f'}]}, 'line 3, a conversation .* has tools, of which T makes no'),
    (_with(3, weight=0)[2:], {}, 'line 3, a conversation .* has no answer to learn'),
    (QUESTION, {}, 'a.jsonl, line 3, a conversation that begins with .* has no answer to learn'),
  ],
)
def test_a_key_that_decides_is_obeyed_or_refused(messages, row, sentence):
  with pytest.raises(UserError, match=sentence):
    _learned(messages, **row)


def test_keys_that_are_used_or_empty_are_no_mistake():
  row = {'prompt': TURNS[0]['content'], 'tools': [], 'label': 'sums', 'place': 'b'}
  assert len(_learned(_with(1, tool_calls=[], weight=None, id='a'), **row)) == 2
  named = [{**turn, 'name': 'Bo'} for turn in TURNS]
  assert len(_learned(named, WITH_NAMES)) == 4, 'a key that the template writes is refused'
  own = WITH_NAMES.replace('{{ m.name }}', '{{ m.weight }}')
  weights = [{**turn, 'weight': 0.5} for turn in TURNS]
  assert len(_learned(weights, own)) == 4, "the template's own weights are refused"


def test_tables_have_the_columns_that_decide(tmp_path):
  rows = [{**row, 'label': i % 2 == 0} for i, row in enumerate(ROWS)]
  parquet.write_table(pa.Table.from_pylist(rows), tmp_path / 'a.parquet')
  config = _config(tmp_path, f'parquet:{tmp_path}/a.parquet')
  with pytest.raises(UserError, match=r'a\.parquet, row 2, has label False'):
    store.prepare(config)


def test_a_name_without_a_value_is_not_learned_as_nothing():
  absent = (
    r"cannot be written by T: it writes a value that is not there \(.*attribute 'name'\); add"
  )
  with pytest.raises(UserError, match=absent):
    _learned(TURNS, WITH_NAMES)
  with pytest.raises(
    UserError, match='by T: it fails on these values with TypeError: can only con'
  ):
    _learned(TURNS, "{{ 'a' + 1 }}")
  asked = Template('T', WITH_NAMES, {}).render(QUESTION, ask=True)
  assert asked.text == f': {QUESTION[0]["content"]}', 'a folder answers otherwise than transformers'
  tests = "{{ tools is none and documents is none }}{{ bos_token }}{{ '!' if more is defined }}"
  template = Template('T', f'{tests}{WITH_NAMES}'.replace('{{ m.name }}', ''), {})
  assert template.render(TURNS).text.startswith('True: What is')


def _template(tmp_path, source: str) -> Template:
  (tmp_path / 'T.jinja').write_text(source)
  return find_template(TextConfig(rows='chat', chat_template=str(tmp_path / 'T.jinja')))


def test_a_template_asks_for_what_it_teaches(tmp_path):
  silent = chat_template.OURS.replace('add_generation_prompt', 'false')
  with pytest.raises(UserError, match=r"T.jinja writes '<\|assistant\|>' before an answer, which"):
    _template(tmp_path, silent)
  _template(tmp_path, silent.replace("{{- '<|' ~ message.role ~ '|>\\n' }}", ''))


def test_only_answers_carry_loss_in_a_store(tmp_path):
  made = _prepare(tmp_path, _write(tmp_path / 'a.jsonl'), validation_fraction=0.2)
  tokens = np.concatenate([made.train[:], made.validation[:]])
  text = tokenizers.ByteTokenizer()
  assert text.decode(marks.plain(tokens)).count('<|user|>\n') == len(ROWS)
  answers = text.decode(tokens[tokens >= 0]).split('<|end|>')[:-1]
  assert sorted(answers) == sorted(row['response'] for row in ROWS)
  size = sum(len(f'{row["response"]}<|end|>') for row in ROWS)
  assert total(made, 'answers') == size == (tokens >= 0).sum()
  assert total(made, 'bytes') == size, 'other bytes than those of answers'
  assert made.bytes_per_token('train') == 1
  shards.verify(made.path)
  batch = next(order.validation_batches(made, _config(tmp_path, ''), range(4)))
  np.testing.assert_array_equal(batch.ravel()[:32], made.validation[:32])


def test_the_end_of_a_document_carries_the_loss_of_the_token_before(tmp_path, tokenizer):
  open_end = tmp_path / 'open.jinja'
  open_end.write_text(
    '{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}'
    '{% endgeneration %}{% endfor %}'
  )
  source = _write(tmp_path / 'a.jsonl')
  made = _prepare(tmp_path, source, chat_template=str(open_end))
  assert (made.train[:] == 0xFF).sum() == made.index.total('train', 'documents'), (
    'nothing teaches to stop'
  )
  golden = tmp_path / 'inline.jinja'
  golden.write_text(GOLDEN['templates']['inline']['template'])
  made = _prepare(tmp_path, source, chat_template=str(golden), tokenizer=str(tokenizer))
  ends = marks.plain(made.train[:]) == tokenizers.load(str(tokenizer)).end_of_document
  assert ends.sum() == made.index.total('train', 'documents'), (
    'a conversation that ends itself has two ends'
  )


@pytest.mark.parametrize('writes', ['the first token', 'no first token', 'as the built-in one'])
def test_a_conversation_begins_as_its_template_writes_it(tmp_path, writes, tokenizer):
  """The tokenizer begins texts with <s>, which only the built-in template leaves to it."""
  (tmp_path / 'hub').mkdir()
  values = json.loads(tokenizer.read_text('utf-8'))
  adds = hf.processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 3)])
  begun = hf.Tokenizer.from_str(json.dumps(values))
  begun.post_processor = adds
  begun.save(str(tmp_path / 'hub' / 'tokenizer.json'))
  (tmp_path / 'hub' / 'special_tokens_map.json').write_text(json.dumps(GOLDEN['tokens']))
  source = GOLDEN['templates']['chatml']['template']
  if writes != 'as the built-in one':
    source = source if writes == 'the first token' else source.replace('{{- bos_token }}', '')
    (tmp_path / 'hub' / 'chat_template.jinja').write_text(source)
  spec = str(tmp_path / 'hub' / 'tokenizer.json')
  made = _prepare(tmp_path, _write(tmp_path / 'a.jsonl'), tokenizer=spec)
  tokens = made.train[:]
  begins = np.flatnonzero(marks.plain(tokens) == 3)
  ends = np.flatnonzero(marks.plain(tokens) == 0)
  wanted = [] if writes == 'no first token' else [0, *(ends[:-1] + 1)]
  assert begins.tolist() == wanted, 'a conversation has no beginning or two'
  assert (tokens[begins] < 0).all(), 'the beginning carries loss'
  template = find_template(_config(tmp_path, '', tokenizer=spec))
  row = chats.ask(template, chats.question(QUESTION), TextRequest('')).ids(made.tokenizer).tolist()
  first = [i for i, id_ in enumerate(row) if id_ == 3]
  assert first == wanted[:1], 'an answer is asked for otherwise'


def _tables(tmp_path):
  messages = [{'messages': row['messages']} for row in MESSAGES]
  (tmp_path / 'array.json').write_text(json.dumps(MESSAGES))
  completions = [{'prompt': r['prompt'], 'completion': r['response']} for r in ROWS]
  parquet.write_table(pa.Table.from_pylist(MESSAGES), tmp_path / 'messages.parquet')
  parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / 'rows.parquet', row_group_size=7)
  (tmp_path / 'hub').mkdir()
  _write(tmp_path / 'hub' / 'train.jsonl', messages)
  return [
    f'files:{tmp_path}/array.json',
    _write(tmp_path / 'rows.jsonl', completions),
    f'parquet:{tmp_path}/messages.parquet',
    f'parquet:{tmp_path}/rows.parquet',
    f'hf:{tmp_path}/hub',
  ]


@pytest.mark.slow
def test_every_source_of_rows_gives_the_same_tokens(tmp_path):
  expected = _prepare(tmp_path, _write(tmp_path / 'a.jsonl'))
  for source in _tables(tmp_path):
    assert _prepare(tmp_path, source).digest == expected.digest, source


def test_a_store_is_found_again_by_its_rows_and_template_only(tmp_path):
  source, out = _write(tmp_path / 'a.jsonl'), str(tmp_path / 'store')
  config = _config(tmp_path, source, store=out)
  made = store.make(config, workers=1)
  assert store.prepare(config).digest == made.digest
  with pytest.raises(UserError, match=r'was made with conversations by the built-in .* is plain'):
    store.prepare(dataclasses.replace(config, rows='text'))
  other = tmp_path / 'other.jinja'
  other.write_text(GOLDEN['templates']['inline']['template'])
  with pytest.raises(UserError, match=r'here it is conversations by .*chat_template=.*other'):
    store.prepare(dataclasses.replace(config, chat_template=str(other)))
  cached = {
    store.store_folder(_config(tmp_path, source, **changes))
    for changes in ({}, {'rows': 'text', 'text_field': 'id'}, {'chat_template': str(other)})
  }
  assert len(cached) == 3, 'two texts have one store'


@pytest.mark.parametrize('packing', ['cut', 'best_fit'])
def test_conversations_that_are_longer_than_a_sequence_are_counted_and_the_longest_named(
  tmp_path, packing
):
  rows = [*ROWS, *({'prompt': 'q', 'response': 'a' * n} for n in (200, 300))]
  source = _write(tmp_path / 'a.jsonl', rows)
  made = _prepare(tmp_path, source, sequence_length=150, packing=packing, validation_fraction=0.1)
  tokens = 300 + len('<|user|>\nq<|end|>\n<|assistant|>\n<|end|>\n') + 1
  assert order.describe_store(made, 150).endswith(
    f'; 2 conversations cut by config.data.sequence_length=150, the longest is {tmp_path}/a.jsonl, '
    f'line 62, with {tokens} tokens'
  )
  assert 'cut by' not in order.describe_store(made, tokens)


@pytest.mark.parametrize('split', ['training', 'validation'])
def test_a_split_whose_sequences_have_only_prompts_is_refused(tmp_path, split):
  """Its loss would be 0 / 0."""
  source, prompts = (
    _write(tmp_path / f'{name}.jsonl', [{'prompt': prompt, 'response': 'a'}])
    for name, prompt in (('short', 'q'), ('long', 'q' * 60))
  )
  named = (source, prompts) if split == 'validation' else (prompts, source)
  config = _config(tmp_path, named[0], validation_source=named[1], sequence_length=40)
  message = rf'the {split} split has no answer in its sequences of .*sequence_length=40 tokens'
  with pytest.raises(UserError, match=message):
    order.check_store(store.prepare(config), config)
  packed = dataclasses.replace(config, packing='best_fit')
  order.check_store(store.prepare(packed), packed)


def test_bad_rows_are_counted_and_left_out(tmp_path):
  bad = [{'messages': [{'content': 'x'}]}, {'prompt': 'p', 'response': ' '}]
  wrong_role = {'messages': [{'role': 'cat', 'content': 'meow'}, *_chat(ROWS[0])]}
  source = _write(tmp_path / 'a.jsonl', [*MESSAGES, *bad, wrong_role])
  made = store.make(_config(tmp_path, source), skip_bad=True)
  assert total(made, 'documents') == len(ROWS)
  assert sum(shard.bad_documents for shard in made.index.shards) == 3


@pytest.mark.parametrize('size', [200, 2**15, 2**15 + 1, 2**16, 2**16 + 1])
def test_marks_in_files_and_arrays_are_the_same(size):
  ids = np.array([0, size - 1, 5, 0, size - 1], np.int32)
  ids[2:] = marks.flip(ids[2:])
  dtype = shards.token_dtype(size, marked=True)
  np.testing.assert_array_equal(marks.unpack(marks.pack(ids, dtype)), ids)
  assert dtype.itemsize == (2 if size <= 2**15 else 4), 'a store is larger than needed'
  assert shards.token_dtype(size, marked=False).itemsize == (2 if size <= 2**16 else 4)
