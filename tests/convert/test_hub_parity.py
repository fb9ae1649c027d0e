"""Models of transformers as runs: the same logits and texts, and back bit for bit."""

import copy
import dataclasses
import json

import hub_folders
import jax
import numpy as np
import pytest
import tokenizers as hf
from seeds import take

from tokenformer_jax.convert import export, families, hub, tensor_files
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.data import marks, special_tokens, tokenizers
from tokenformer_jax.decoding import chats, decode
from tokenformer_jax.decoding.texts import TextRequest
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.execution import DEFAULT
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs import checkpoint

pytestmark = pytest.mark.slow

MODELS = {  # the family, and changes of its tiny model
  **{kind: (kind, {}) for kind in hub_folders.KEYS},
  'llama, other options': (
    'llama',
    {
      'attention_bias': True,
      'mlp_bias': True,
      'tie_word_embeddings': True,
      'hidden_act': 'gelu_pytorch_tanh',
      'num_key_value_heads': 4,
      'rope_scaling': {'rope_type': 'linear', 'rope_theta': 5e5, 'factor': 2.0},
    },
  ),
  'mixtral': ('mixtral', {'sliding_window': 6}),
  'smollm3, other options': (
    'smollm3',
    {
      'num_hidden_layers': 4,
      'no_rope_layers': [1, 0, 0, 1],
      'use_sliding_window': True,
      'sliding_window': 5,
      'layer_types': ['sliding_attention', 'full_attention'] * 2,
      'mlp_bias': True,
      'head_dim': 6,
      'tie_word_embeddings': False,
      'rope_scaling': {'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 2.0},
    },
  ),
  'gemma2, other options': (
    'gemma2',
    {
      'hidden_activation': 'gelu',
      'layer_types': ['full_attention', 'sliding_attention'],
      'attn_logit_softcapping': None,
      'final_logit_softcapping': None,
      'attention_bias': True,
      'tie_word_embeddings': False,
      'query_pre_attn_scalar': 6,
      'rope_scaling': {'rope_type': 'linear', 'rope_theta': 5e5, 'factor': 2.0},
    },
  ),
  'gemma3_text, other options': (
    'gemma3_text',
    {
      'layer_types': ['full_attention', 'sliding_attention', 'sliding_attention'],
      'num_hidden_layers': 3,
      'final_logit_softcapping': 1.5,
      'attention_bias': True,
      'rope_scaling': None,
      'rope_parameters': {
        'full_attention': {
          'rope_type': 'yarn',
          'rope_theta': 1e4,
          'factor': 8.0,
          'original_max_position_embeddings': 16,
        },
        'sliding_attention': {'rope_type': 'linear', 'rope_theta': 50.0, 'factor': 2.0},
      },
    },
  ),
  'gpt2, other options': (
    'gpt2',
    {'n_inner': 24, 'activation_function': 'relu', 'tie_word_embeddings': False},
  ),
  'gpt_neox, other options': (
    'gpt_neox',
    {'use_parallel_residual': False, 'attention_bias': False, 'rotary_pct': 1.0},
  ),
}


# Imported by the tests that run: collecting them takes seconds less so.
@pytest.fixture(scope='module')
def torch():
  return pytest.importorskip('torch')


@pytest.fixture(scope='module')
def transformers():
  return pytest.importorskip('transformers')


_SIZES = {
  'vocab_size': 96,
  'hidden_size': 4096,
  'intermediate_size': 48,
  'moe_intermediate_size': 24,
  'shared_expert_intermediate_size': 24,
  'num_experts': 16,
  'num_hidden_layers': 40,
  'num_attention_heads': 32,
}
_LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}


@pytest.mark.parametrize(
  ('kind', 'changes'),
  [
    *((kind, {}) for kind in families.FAMILIES),
    *((kind, {'use_sliding_window': True}) for kind in ('qwen2', 'qwen3')),
    ('llama', {'rope_scaling': {'type': 'yarn', 'factor': 4.0}}),
    ('llama', {'rope_scaling': _LLAMA3}),
    ('qwen3', {'rope_parameters': {**_LLAMA3, 'rope_theta': 5e5}, 'rope_scaling': None}),
    ('gemma3_text', {'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'beta_fast': None}}),
  ],
)
def test_absent_keys_have_the_values_of_transformers(kind, changes, transformers):
  family, given = families.FAMILIES[kind], {} if kind == 'gpt2' else _SIZES | changes
  theirs = transformers.AutoConfig.for_model(kind, **given).to_dict()
  ours = family.to_model(Keys(given, 'some keys', family.defaults))
  assert ours == family.to_model(Keys(theirs, 'all keys'))


@pytest.mark.parametrize('kind', families.FAMILIES)
def test_nulls_that_transformers_refuses_are_refused(kind, transformers, tmp_path):
  """Two that it refuses in some families only have one meaning in all."""
  family, taken = families.FAMILIES[kind], []
  keys = Keys(hub_folders.KEYS[kind], 'the test', family.defaults)
  family.to_model(keys)
  meant = {'num_key_value_heads', 'partial_rotary_factor'}
  for name in sorted(keys.read - meant):
    values = {'model_type': kind, **hub_folders.KEYS[kind], name: None}
    (tmp_path / 'config.json').write_text(json.dumps(values))
    try:
      transformers.AutoConfig.from_pretrained(tmp_path)
    except Exception:  # of a type that the library does not name
      with pytest.raises(UserError, match=f'{name}=None|has no {name}'):
        hub.find_model(tmp_path)
    else:
      taken.append(name)
  assert taken and len(taken) < len(keys.read) / 2


# Those that compile what another one compiles as well are for the longer suite.
_LIKE = ('qwen3_moe', 'gpt2, other options', 'gpt_neox, other options')


@pytest.fixture(
  scope='module',
  params=[
    pytest.param(name, marks=[pytest.mark.full_size] * (name in _LIKE), id=name) for name in MODELS
  ],
)
def both(request, tmp_path_factory, torch, transformers):
  """A model of transformers, its folder, and our model and parameters."""
  kind, changes = MODELS[request.param]
  torch.manual_seed(0)
  ids = {'bos_token_id': 0, 'eos_token_id': None, 'pad_token_id': 0}
  keys = copy.deepcopy(hub_folders.KEYS[kind] | changes | ids)
  config = transformers.AutoConfig.for_model(kind, **keys)
  theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():  # Biases and scales other than at the start.
      parameter.add_(0.1 * torch.randn_like(parameter))
  directory = tmp_path_factory.mktemp('hub')
  theirs.save_pretrained(directory, max_shard_size='20KB')
  folder = hub.find(directory)
  params = hub_folders.made(folder.params())
  return theirs, directory, folder, params


def test_logits(both, torch):
  theirs, _, folder, params = both
  ids = np.random.default_rng(0).integers(0, 64, (2, 24))
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids)).logits.numpy()
  definition = define_lm(folder.model)
  got = jax.jit(lambda params, ids: definition.bind(params)(ids)[0])(params, ids)
  assert np.std(wanted) > 0.1, 'the model computes almost nothing'
  np.testing.assert_allclose(got, wanted, atol=1e-5, err_msg='the converted model is another one')


# Learned positions, layers without rotation, rotation in part, a cap of scores, and two rotations,
# each with and without windows.
_CACHES = ('gpt2', 'smollm3, other options', 'phi3', 'gemma2', 'gemma3_text')


@pytest.mark.parametrize('both', take(MODELS, _CACHES), indirect=True)
def test_texts_of_a_batch_with_left_padding(both, torch):
  theirs, _, folder, params = both
  rng = np.random.default_rng(1)
  prompts = [rng.integers(1, 64, length).tolist() for length in (3, 11, 7)]
  padded = [[0] * (11 - len(prompt)) + prompt for prompt in prompts]
  mask = [[0] * (11 - len(prompt)) + [1] * len(prompt) for prompt in prompts]
  how = {'max_new_tokens': 12, 'do_sample': False}
  with torch.no_grad():
    wanted = theirs.generate(torch.tensor(padded), attention_mask=torch.tensor(mask), **how)
  decoder = decode.Decoder(folder.model, dataclasses.replace(DEFAULT, dtype='float32'))
  greedy = dataclasses.replace(decode.sampling.DEFAULT, temperature=0.0)
  requests = [decode.Request(prompt, 12, greedy) for prompt in prompts]
  got = decoder(decoder.prepare(params), requests)
  for ours, row in zip(got, wanted[:, 11:].tolist(), strict=True):
    assert ours.tolist() == row, 'the cache or the padding changes the text'


def test_back_bit_for_bit(both, tmp_path, torch, transformers):
  theirs, directory, folder, params = both

  def read(path):
    array = params
    for key in path:
      array = array[key]
    return array

  hub_folders.write_model(tmp_path, folder.model, read)
  source, back = (tensor_files.find(path) for path in (directory, tmp_path))
  assert set(source) == set(back), 'names changed'
  for name, tensor in source.items():
    np.testing.assert_array_equal(back[name].read(), tensor.read(), err_msg=name)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
  ids = torch.arange(20)[None]
  with torch.no_grad():
    difference = (loaded.eval()(ids).logits - theirs(ids).logits).abs().max()
  assert difference < 1e-5, 'config.json describes another model'


def test_the_text_model_of_one_for_images(tmp_path, torch, transformers):
  vision = {'hidden_size': 8, 'intermediate_size': 8, 'num_attention_heads': 2, 'image_size': 28}
  config = transformers.Gemma3Config(
    text_config=hub_folders.KEYS['gemma3_text'],
    vision_config=vision | {'num_hidden_layers': 1, 'patch_size': 14},
    mm_tokens_per_image=4,
    image_token_index=63,
  )
  torch.manual_seed(0)
  theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
  theirs.save_pretrained(tmp_path)
  folder = hub.find(tmp_path)
  ids = np.random.default_rng(0).integers(0, 63, (2, 12))
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids)).logits.numpy()
  got, _ = define_lm(folder.model).bind(hub_folders.made(folder.params()))(ids)
  np.testing.assert_allclose(got, wanted, atol=1e-5)
  assert families.match(folder.model)[0].kind == 'gemma3_text'


_MAP = {'bos_token': {'content': '<s>', 'lstrip': False}, 'eos_token': '</s>'}
FOLDERS = {
  'settings': ({'tokenizer_config': {'bos_token': '<s>', 'eos_token': '<e>'}}, 'llama'),
  'the map': ({'tokenizer_config': {'bos_token': '<e>'}, 'special_tokens_map': _MAP}, 'llama'),
  'a map that is not read': (
    {
      'tokenizer_config': {'eos_token': '<e>', 'added_tokens_decoder': {}},
      'special_tokens_map': _MAP,
    },
    'llama',
  ),
  'the class': ({'tokenizer_config': {'tokenizer_class': 'LlamaTokenizer'}}, 'llama'),
  'no class': ({}, 'llama'),
  'null': ({'tokenizer_config': {'tokenizer_class': 'LlamaTokenizer', 'bos_token': None}}, 'llama'),
  'no class of this kind': ({'tokenizer_config': {'tokenizer_class': 'LlamaTokenizer'}}, 'mistral'),
  'no class of phi3': ({'tokenizer_config': {'tokenizer_class': 'LlamaTokenizer'}}, 'phi3'),
  'another class': ({'tokenizer_config': {'tokenizer_class': 'GemmaTokenizerFast'}}, 'qwen3'),
  'tokens of its own': (
    {'tokenizer_config': {'eos_token': '<e>', 'image_token': '<s>', 'add_bos_token': True}},
    'llama',
  ),
  **{kind: ({}, kind) for kind in ('gemma', 'gpt2', 'gpt_neox', 'qwen2', 'qwen3', 'qwen2_moe')},
  **{kind: ({}, kind) for kind in ('olmo2', 'smollm3', 'gemma2', 'gemma3_text')},
}


@pytest.mark.parametrize('first', [None, '<s>'])
@pytest.mark.parametrize('name', FOLDERS)
def test_special_tokens_and_beginnings_of_a_folder(name, first, tmp_path, transformers):
  files, kind = FOLDERS[name]
  for file, values in {**files, 'config': {'model_type': kind}}.items():
    (tmp_path / f'{file}.json').write_text(json.dumps(values))
  tokenizer = hf.Tokenizer(hf.models.BPE({'<unk>': 0, 'a': 1}, [], unk_token='<unk>'))
  tokenizer.add_special_tokens(['<s>', '</s>', '<e>', '<bos>', '<eos>', '<|endoftext|>'])
  if first:
    tokenizer.post_processor = hf.processors.TemplateProcessing(
      single=f'{first} $A', special_tokens=[(first, 2)]
    )
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  tokens = special_tokens.read(tmp_path).named
  names = ('bos_token', 'eos_token', 'unk_token', 'pad_token')
  wanted = {name: str(token) for name, token in theirs.special_tokens_map.items()}
  assert {k: tokens.get(k) for k in names} == {k: wanted.get(k) for k in names}
  ours = tokenizers.load(str(tmp_path / 'tokenizer.json')).of_folder((), 8)
  if kind != 'gpt_neox':  # whose class adds nothing, whatever the file says
    plain = theirs('a', add_special_tokens=False)['input_ids']
    assert [*ours.begin, *plain] == theirs('a')['input_ids']
  if 'eos_token' in wanted:
    assert ours.end_of_document == theirs.eos_token_id


SETTINGS = {
  'listed': {},
  'named': {'pad_token': '<new>', 'extra_special_tokens': ['<strip>']},
  'an older file': {},
  **{f'prefix {asked}': {'add_prefix_space': asked} for asked in (True, False)},
  'legacy': {'legacy': True},
  'first and last': {'bos_token': '<e>', 'add_bos_token': True, 'add_eos_token': True},
}
CLASSES = {
  'llama': ('LlamaTokenizer', 'GPT2Tokenizer', 'PreTrainedTokenizerFast'),
  'qwen3': ('Qwen2Tokenizer', None),
  'gpt_neox': ('GPTNeoXTokenizer',),
  **dict.fromkeys(('mistral', 'phi3', 'olmo2'), ('LlamaTokenizer', 'GPT2Tokenizer')),
}


@pytest.mark.parametrize(('kind', 'named'), [(k, n) for k, names in CLASSES.items() for n in names])
@pytest.mark.parametrize('name', SETTINGS)
def test_tokens_and_spaces_that_the_settings_add(name, kind, named, tmp_path, transformers):
  """A tokenizer of words with spaces, or of the letters of bytes, as its class has it."""
  special = ['<unk>', '<s>', '</s>', '<|endoftext|>', '<e>']
  if named == 'LlamaTokenizer':
    letters = [*special[:3], *(f'<0x{byte:02X}>' for byte in range(256)), *'▁ab12', '▁a', '12']
    merges, how = [('▁', 'a'), ('1', '2')], {'unk_token': '<unk>', 'byte_fallback': True}
  else:
    letters = [*sorted(hf.pre_tokenizers.ByteLevel.alphabet()), 'Ġa', '12']
    merges, how = [('Ġ', 'a'), ('1', '2')], {}
  ids = {letter: id_ for id_, letter in enumerate(letters)}
  tokenizer = hf.Tokenizer(hf.models.BPE(ids, merges, fuse_unk=bool(how), **how))
  if how:
    normalizers = [hf.normalizers.Prepend('▁'), hf.normalizers.Replace(' ', '▁')]
    tokenizer.normalizer = hf.normalizers.Sequence(normalizers)
  else:
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.add_special_tokens(special)
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  size, settings = tokenizer.get_vocab_size(), {'eos_token': '<e>', **SETTINGS[name]}
  known = {str(tokenizer.token_to_id(text)): {'content': text, 'special': True} for text in special}
  new = {'content': '<new>', 'special': True}, {'content': '<strip>', 'lstrip': True}
  listed = known | {str(size + n): token for n, token in enumerate(new)}
  listed[str(tokenizer.token_to_id('<e>'))]['rstrip'] = True
  settings |= {'added_tokens_decoder': listed} if name == 'listed' else {}
  files = {
    'tokenizer_config': {**settings, 'tokenizer_class': named},
    'config': {'model_type': kind},
  }
  files |= {'added_tokens': {'<new>': size + 1, '<strip>': size}} if name == 'an older file' else {}
  for file, values in files.items():
    (tmp_path / f'{file}.json').write_text(json.dumps(values))
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ours = tokenizers.load(str(tmp_path / 'tokenizer.json'))
  for text in ('a b', ' a12', 'a <new> b <strip>a', '<e> a\n<s>b'):
    (got,) = ours.encode_chats([(text, ((0, len(text)),))])
    assert marks.plain(got).tolist() == theirs(text, add_special_tokens=False)['input_ids'], text
  assert ours.end_of_document == theirs.eos_token_id


_TEMPLATE = """{%- for m in messages %}{{- '[' + m.content + ']' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '[' }}{%- endif %}"""


@pytest.mark.parametrize('begin', ['{{ bos_token }}', ''])
def test_texts_and_chats_have_the_same_tokens_here_there_and_after_the_way_back(
  tmp_path, transformers, begin
):
  source = hub_folders.write(tmp_path / 'source')
  tokenizer = hf.Tokenizer.from_file(str(source / 'tokenizer.json'))
  first, end = map(tokenizer.id_to_token, (5, 0))
  tokenizer.add_special_tokens([first, end])
  tokenizer.post_processor = hf.processors.TemplateProcessing(
    single=f'{first} $A', special_tokens=[(first, 5)]
  )
  tokenizer.save(str(source / 'tokenizer.json'))
  settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': first, 'eos_token': end}
  settings['chat_template'] = begin + _TEMPLATE
  (source / 'tokenizer_config.json').write_text(json.dumps(settings))
  to_jax(source, tmp_path / 'run')
  export.to_hf(str(tmp_path / 'run'), tmp_path / 'back')
  _, meta = checkpoint.open_source(tmp_path / 'run', None)
  ours = tokenizers.from_json(meta.tokenizer)
  question = [{'role': 'user', 'content': 'HM'}]
  asked = chats.ask(chats.find_template(meta, tmp_path), chats.question(question), TextRequest(''))
  for folder in (source, tmp_path / 'back'):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs('AB')['input_ids'] == list(TextRequest('AB').tokens(ours).prompt)
    text = theirs.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    wanted = theirs(text, add_special_tokens=False)['input_ids']
    assert wanted == list(asked.tokens(ours).prompt)
