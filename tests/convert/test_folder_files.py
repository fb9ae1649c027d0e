"""The files beside the weights of a folder go out as they came, but for what a run changed."""

import base64
import dataclasses
import itertools
import json
import zlib

import hub_folders
import pytest

from tokenformer_jax.convert import (
  export,
  families,
  folder_files,
  hub_generation,
  hub_tokenizer,
)
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.chat_template import Template
from tokenformer_jax.decoding import chats
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import checkpoint

DRAWS = {'do_sample': True, 'temperature': 0.6, 'top_k': 20, 'top_p': 0.9, 'eos_token_id': [7, 0]}
NAMED = [
  {'name': name, 'template': f'{name} {{{{ messages }}}}'} for name in ('default', 'tool_use')
]
BESIDE = {
  'generation_config.json': json.dumps({**DRAWS, 'repetition_penalty': 1.1}),
  'tokenizer_config.json': json.dumps({'chat_template': NAMED, 'padding_side': 'right'}),
  'special_tokens_map.json': '{"eos_token":   "A"}\r\n',
  'tokenizer.model': '\x00\xff',
  'additional_chat_templates/rag.jinja': 'of documents',
  'LICENSE': 'a licence',
}


def _write(folder, beside=BESIDE, **changes):
  source = hub_folders.write(folder, initializer_range=0.3, eos_token_id=7, **changes)
  for name, text in beside.items():
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(text.encode('latin-1'))
  return source


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
  """The tokenizer in a run of a folder with all kinds of files."""
  root = tmp_path_factory.mktemp('stored')
  to_jax(_write(root / 'source'), root / 'run')
  return checkpoint.open_source(root / 'run', None)[1].tokenizer


def test_every_file_but_the_weights_goes_out_as_it_came(tmp_path):
  source = _write(tmp_path / 'source', dtype='float32')
  to_jax(source, tmp_path / 'run')
  export.to_hf(str(tmp_path / 'run'), tmp_path / 'out')
  names = {path.relative_to(source) for path in source.rglob('*') if path.is_file()}
  out = {path.relative_to(tmp_path / 'out') for path in (tmp_path / 'out').rglob('*.*')}
  assert {str(path) for path in out - names} == {'README.md'}
  for name in {str(name) for name in names} - {'model.safetensors'}:
    assert (tmp_path / 'out' / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.parametrize('name', ['../LICENSE', '/tmp/LICENSE', 'a/LICENSE', 'x.py', 'LICENSE/..'])
def test_a_checkpoint_of_a_stranger_chooses_no_other_names(name):
  packed = base64.b64encode(zlib.compress(b'text')).decode()
  assert folder_files.unpack({'files': {'LICENSE': packed}}) == {'LICENSE': b'text'}
  with pytest.raises(UserError, match='which is none of a folder of the hub'):
    folder_files.unpack({'files': {name: packed}})


def test_a_config_changes_where_the_model_did_alone(stored):
  came = folder_files.read(stored, 'config.json')
  model, family = hub_folders.model('llama'), families.FAMILIES['llama']
  written = {'num_hidden_layers': 9, 'dtype': 'bfloat16', 'eos_token_id': 0, 'unheard_of': 1}
  same = folder_files.config(stored, family, model, {'dtype': 'float32'})
  assert same == folder_files.unpack(stored)['config.json']
  deeper = dataclasses.replace(model, pattern='layer*9')
  made = folder_files.config(stored, family, deeper, written)
  kept = {'initializer_range': came['initializer_range'], 'eos_token_id': 7}
  assert made.items() >= {**written, **kept}.items() and 'rope_scaling' not in made


def test_the_draws_of_the_folder_are_known_to_its_run(stored):
  assert hub_generation.stored_draws(stored) == {'temperature': 0.6, 'top_k': 20, 'top_p': 0.9}
  assert not hub_generation.stored_draws({'kind': 'bytes'})


def test_ends_go_out_with_the_end_of_turn_of_a_template_that_the_run_learned_from(stored):
  known = hub_generation.to_file(stored, {})
  assert known == {'generation_config.json': BESIDE['generation_config.json'].encode()}
  learned = {**stored, 'chat': _chat("{% for m in messages %}{{ m.content + 'Z' }}{% endfor %}")}
  made = hub_generation.to_file(learned, {})['generation_config.json']
  ends = [7, 0, ord('Z') - 32]
  assert made == {**DRAWS, 'repetition_penalty': 1.1, 'eos_token_id': ends}
  neither = {k: v for k, v in stored.items() if k not in ('files', 'chat')}
  made = hub_generation.to_file(neither, {'pad_token_id': 3})['generation_config.json']
  assert made['pad_token_id'] == 3 and 7 in made['eos_token_id']
  config = {**neither, 'files': {'config.json': stored['files']['config.json']}}
  assert hub_generation.to_file(config, {}) == {}, 'config.json has the end, and no file came'


def _chat(source, **tokens):
  return Template('the test', source, tokens).to_json()


def test_a_template_that_the_run_learned_from_takes_the_place_of_the_folder_s(stored):
  came = {**stored, 'chat': _chat(NAMED[0]['template'])}
  settings = 'tokenizer_config.json'
  assert hub_tokenizer.to_files(came, 32)[settings] == BESIDE[settings].encode()
  learned = {**stored, 'chat': _chat('new {{ messages }}')}
  made = hub_tokenizer.to_files(learned, 32)[settings]
  assert made['padding_side'] == 'right', 'what the folder says of padding is lost'
  assert made['chat_template'] == 'new {{ messages }}', 'or rows with tools are written as before'
  assert not any(name.endswith('.jinja') for name in hub_tokenizer.to_files(learned, 32))


TEMPLATES = {
  'the first token as text': '<|endoftext|>{{ messages[0].content }}',  # which is none in bytes
  'a first token that the tokenizer lacks': '{{ bos_token }}{{ messages[0].content }}',
  'a padding that the tokenizer lacks': '{{ messages[0].content }}{{ pad_token }}{{ eos_token }}',
}


@pytest.mark.parametrize(('kind', 'name'), [*itertools.product(('bytes', 'bpe'), TEMPLATES)][1:])
def test_a_conversation_begins_outside_as_it_does_here(name, kind, tmp_path):
  transformers = pytest.importorskip('transformers')
  bpe = tokenizers.train_bpe(['some text to learn from'] * 9, 280)
  tokens = {'bytes': {}, 'bpe': {'eos_token': '<|endoftext|>'}}[kind]
  stored = (bpe if kind == 'bpe' else tokenizers.ByteTokenizer()).to_json()
  stored['chat'] = _chat(TEMPLATES[name], **tokens)
  for file, content in hub_tokenizer.to_files(stored, 32).items():
    (tmp_path / file).write_text(json.dumps(content))
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  messages = [{'role': 'user', 'content': 'to learn'}]
  asked = chats.ask(Template(**stored['chat']), chats.question(messages), TextRequest(''))
  wanted = list(asked.tokens(tokenizers.from_json(stored)).prompt)
  text = theirs.apply_chat_template(messages, tokenize=False)
  assert theirs(text, add_special_tokens=False)['input_ids'] == wanted
