"""Folders in the hub's layout without transformers: there and back, and what is refused."""

import dataclasses
import hashlib
import json
from pathlib import Path

import hub_folders
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import released
import safetensors.numpy
import tokenizers as hf

from tokenformer_jax.config import LMConfig, MeshConfig, PattentionConfig
from tokenformer_jax.config.model import Layers
from tokenformer_jax.convert import export, families, hub, hub_generation, tensor_files
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.data import chat_template, tokenizers
from tokenformer_jax.decoding import chats
from tokenformer_jax.decoding.texts import TextRequest, decode_text
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint, checksum


def _read(folder):
  """The arrays of a folder as our parameters."""
  return hub_folders.made(folder.params())


def _at(params: Params, path):
  for key in path:
    params = params[key]
  return params


@pytest.mark.parametrize('kind', hub_folders.KEYS)
def test_a_model_goes_back_as_it_came(tmp_path, kind, capsys):
  source = hub_folders.write(tmp_path / 'source', kind)
  folder = hub.find(source)
  assert 'not known' not in capsys.readouterr().err
  family, _ = families.match(folder.model)
  assert family.kind == kind, 'the model is taken for one of another family'
  params = _read(folder)
  back = tmp_path / 'back'
  back.mkdir()
  hub_folders.write_model(back, folder.model, lambda path: _at(params, path))
  digests = [
    hashlib.sha256((path / 'model.safetensors').read_bytes()).hexdigest() for path in (source, back)
  ]
  assert digests[0] == digests[1], 'tensors changed'
  assert hub.find(back).model == folder.model, 'config.json describes another model'


GOLDEN = Path(__file__).parents[1] / 'golden' / 'hub_gemma3'


def test_logits_of_a_folder_of_transformers():
  """The folder is the model `gemma3_text` of test_hub_parity.py, by transformers 5.24.0."""
  golden, folder = np.load(GOLDEN / 'logits.npz'), hub.find(GOLDEN)
  definition = define_lm(folder.model)
  got = jax.jit(lambda params, ids: definition.bind(params)(ids)[0])(_read(folder), golden['ids'])
  np.testing.assert_allclose(got, golden['logits'], atol=1e-5)


_LINEAR = {'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}}
PUBLISHED = {  # sizes of config.json, which leave out what `transformers` takes for the family
  '2b': (
    {'architectures': ['Gemma2ForCausalLM'], 'vocab_size': 256000, 'num_attention_heads': 8},
    {'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 26},
    ('(local layer)*13', 2_614_341_888),
  ),
  '1b': (
    {'architectures': ['Gemma3ForCausalLM'], 'vocab_size': 262144, 'num_attention_heads': 4},
    {'hidden_size': 1152, 'intermediate_size': 6912, 'num_hidden_layers': 26}
    | {'num_key_value_heads': 1, 'sliding_window': 512},
    ('(local*5 layer)*4 local*2', 999_885_952),
  ),
  '4b': (
    {'architectures': ['Gemma3ForConditionalGeneration']},
    {'hidden_size': 2560, 'intermediate_size': 10240, 'num_hidden_layers': 34, **_LINEAR},
    ('(local*5 layer)*5 local*4', 3_880_263_168),
  ),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_gemmas_have_their_number_of_parameters(name, tmp_path):
  given, sizes, wanted = PUBLISHED[name]
  values = {**given, 'text_config': sizes} if len(given) == 1 else {**given, **sizes}
  (tmp_path / 'config.json').write_text(json.dumps(values))
  _, model, unread = hub.find_model(tmp_path)
  assert not unread
  assert (model.pattern, define_lm(model).count) == wanted


def test_a_model_of_parameter_tokens_is_of_no_family():
  model = LMConfig(vocab_size=64, max_length=32)
  assert isinstance(model.layer.ffn, PattentionConfig)
  assert families.match(model) is None


def test_names_without_prefix_and_stored_masks(tmp_path):
  """Files of the first GPT-2 have neither a prefix nor a head, and hold masks as bytes."""
  source = hub_folders.write(tmp_path / 'source', 'gpt2')
  wanted = _read(hub.find(source))
  file = source / 'model.safetensors'
  tensors = {n.removeprefix('transformer.'): t.read() for n, t in tensor_files.find(file).items()}
  masks = {'h.0.attn.bias': np.ones((1, 1, 3), np.uint8)}
  safetensors.numpy.save_file(tensors | masks, file)
  jax.tree.map(np.testing.assert_array_equal, _read(hub.find(source)), wanted)


@pytest.mark.parametrize('before', ['language_model.model.', 'model.language_model.'])
def test_both_spellings_of_the_text_model_of_gemma_3(tmp_path, before):
  source = hub_folders.write_images(tmp_path / 'source', before)
  folder = hub.find(source)
  wanted = hub.find(hub_folders.write(tmp_path / 'text', 'gemma3_text'))
  assert folder.model == wanted.model
  jax.tree.map(np.testing.assert_array_equal, _read(folder), _read(wanted))
  in_class = {*folder.in_class.values()}
  assert 'model.vision_tower.embeddings.weight' in in_class
  assert 'model.language_model.layers.2.mlp.up_proj.weight' in in_class


@pytest.mark.parametrize('kind', ['gpt2', 'llama'])
def test_a_pytorch_file_with_a_tied_head_and_tensors_that_are_no_parameters(tmp_path, kind):
  """Files of `torch.save` hold the masks of GPT-2 and the frequencies of the first Llamas."""
  source = hub_folders.write(tmp_path / 'source', kind, tie_word_embeddings=True)
  file = source / 'model.safetensors'
  weights = {name: tensor.read() for name, tensor in tensor_files.find(file).items()}
  wanted = weights['transformer.wte.weight' if kind == 'gpt2' else 'model.embed_tokens.weight']
  file.unlink()
  skipped = 'transformer.h.0.attn.bias' if kind == 'gpt2' else 'model.layers.0.rotary_emb.inv_freq'
  weights |= {'lm_head.weight': wanted, skipped: np.ones(3, np.float32)}
  released.write_pytorch(source / 'pytorch_model.bin', 'float32', weights)
  folder = hub.find(source)
  np.testing.assert_array_equal(_read(folder)['embedding'], wanted)
  assert folder.model.tied_head


@pytest.mark.parametrize('kind', ['gpt2', 'llama'])
def test_a_head_that_is_not_the_embedding_stays(tmp_path, kind, capsys):
  """So transformers does in spite of tie_word_embeddings; and a head alone is the embedding."""
  source = hub_folders.write(tmp_path / 'source', kind, tie_word_embeddings=True)
  file = source / 'model.safetensors'
  tensors = {name: tensor.read() for name, tensor in tensor_files.find(file).items()}
  embedding = 'transformer.wte.weight' if kind == 'gpt2' else 'model.embed_tokens.weight'
  safetensors.numpy.save_file({**tensors, 'lm_head.weight': tensors[embedding] + 1}, file)
  folder = hub.find(source)
  assert 'lm_head.weight is not ' + embedding in capsys.readouterr().err
  assert not folder.model.tied_head
  np.testing.assert_array_equal(_read(folder)['head'], tensors[embedding] + 1)
  assert families.match(folder.model, kind)[1]['tie_word_embeddings'] is False
  tensors['lm_head.weight'] = tensors.pop(embedding)
  safetensors.numpy.save_file(tensors, file)
  folder = hub.find(source)
  np.testing.assert_array_equal(_read(folder)['embedding'], tensors['lm_head.weight'])
  assert folder.model.tied_head


REFUSED = {
  'an unknown architecture': ('llama', {'architectures': ['BertModel']}, "'BertModel'"),
  'no size': ('llama', {'hidden_size': None}, 'has no hidden_size'),
  'a size beyond all': (
    'llama',
    {'vocab_size': 10**12},
    'it must be a positive integer below 2**31',
  ),
  'a size that is text': ('llama', {'num_hidden_layers': '2'}, "num_hidden_layers='2'"),
  'heads that do not fit': ('gpt_neox', {'num_attention_heads': 3}, 'num_attention_heads=3'),
  'code of its author': ('llama', {'auto_map': {'AutoModel': 'x.Y'}}, 'which is never run'),
  "a class of its author with the library's name elsewhere": (
    'phi3',
    {'auto_map': {'AutoModelForCausalLM': 'x.MyPhi3ForCausalLM'}},
    'which is never run',
  ),
  'quantized': ('llama', {'quantization_config': {'bits': 4}}, 'quantization_config='),
  'a rotation that we lack': ('llama', {'rope_scaling': {'type': 'dynamic'}}, "'dynamic'"),
  'a rotation that depends on the length of a text': (
    'phi3',
    {'rope_scaling': {'type': 'longrope', 'short_factor': [1.0], 'long_factor': [2.0]}},
    "rope_scaling has type='longrope', which cannot be converted; it must be default",
  ),
  'a rotation in part that transformers ignores': (
    'llama',
    {'partial_rotary_factor': 0.5},
    'partial_rotary_factor=0.5, which cannot be converted; it must be 1',
  ),
  'a length outside of the table, which transformers prefers': (
    'llama',
    {'original_max_position_embeddings': 8},
    'original_max_position_embeddings=16, which cannot be converted; it must be 8',
  ),
  'an older name that Gemma 3 does not read': (
    'gemma3_text',
    {'rope_scaling': {'type': 'linear', 'factor': 8.0}},
    "rope_scaling has type='linear', which cannot be converted; it must be 'default'",
  ),
  'a Ministral': (
    'mistral',
    {'layer_types': ['full_attention', 'sliding_attention']},
    'which cannot be converted; it must be absent',
  ),
  'attention to later tokens': ('llama', {'is_causal': False}, 'is_causal=False'),
  'half a rotated plane': ('phi3', {'partial_rotary_factor': 0.25}, 'partial_rotary_factor=0.25'),
  'layers without a mark of rotation': ('smollm3', {'no_rope_layers': [1]}, 'no_rope_layers=[1]'),
  'windows that kernels of transformers do not agree about': (
    'smollm3',
    {'layer_types': ['full_attention', 'sliding_attention'], 'sliding_window': 5},
    'it must be full_attention alone without use_sliding_window',
  ),
  'an activation that we lack': ('llama', {'hidden_act': 'mish'}, "hidden_act='mish'"),
  'kinds of layers that we lack': ('qwen2', {'layer_types': ['linear'] * 2}, 'layer_types='),
  'windows in layers that no key names': (
    'qwen2_moe',
    {'use_sliding_window': True},
    'use_sliding_window=True, which cannot be converted; it must be False in a file without',
  ),
  'a cap that transformers ignores': (
    'gemma3_text',
    {'attn_logit_softcapping': 2.0},
    'attn_logit_softcapping=2.0, which cannot be converted; it must be absent',
  ),
  'attention in both directions': (
    'gemma2',
    {'use_bidirectional_attention': True},
    'use_bidirectional_attention=True',
  ),
  'local layers without a window': ('gemma2', {'sliding_window': 0}, 'sliding_window=0'),
  'images without a text model': (
    'gemma3_text',
    {'architectures': ['Gemma3ForConditionalGeneration'], 'model_type': 'gemma3'},
    'has no table text_config',
  ),
  'key heads that do not divide the heads': (
    'llama',
    {'num_key_value_heads': 3},
    'num_key_value_heads=3, which cannot be converted; it must be a divisor of the',
  ),
  'no such rotation': ('gpt_neox', {'rotary_pct': 0.1}, 'rotary_pct=0.1'),
  'more layers than tensors': ('llama', {'num_hidden_layers': 3}, 'layers.2.'),
  'fewer layers than tensors': (
    'llama',
    {'num_hidden_layers': 1},
    'layer too many: a LlamaForCausalLM of this config.json has num_hidden_layers=1, layers 0 to',
  ),
  'fewer layers than tensors of GPT-2': ('gpt2', {'n_layer': 1}, 'has n_layer=1, layers 0 to 0;'),
  'two families': (
    'mistral',
    {'architectures': ['LlamaForCausalLM']},
    "model_type='mistral', by which transformers takes a model, and architectures=['LlamaFor",
  ),
  'layers with keys of their own': ('llama', {'per_layer_config': {'0': {}}}, 'per_layer_config='),
  'numbers that transformers does not load': (
    'llama',
    {'torch_dtype': 'float8_e4m3fn'},
    "torch_dtype='float8_e4m3fn', which cannot be converted; it must be 'float32' or 'float16' or",
  ),
  'another shape': ('llama', {'intermediate_size': 32}, 'it must be [32, 16]'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_refused_with_a_sentence(tmp_path, name):
  kind, changes, sentence = REFUSED[name]
  source = hub_folders.write(tmp_path / 'source', kind, **changes)
  with pytest.raises(UserError) as refused:
    to_jax(source, tmp_path / 'run')
  assert sentence in str(refused.value)
  assert not (tmp_path / 'run').exists()


def _edit(folder, **changes):
  """Changes the keys of a folder's config.json; null is a value."""
  file = folder / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))
  return folder


@pytest.mark.parametrize(
  ('kind', 'name'),
  [('llama', 'hidden_act'), ('llama', 'rope_theta'), ('qwen3', 'head_dim'), ('gpt2', 'n_layer')],
)
def test_null_is_a_value_where_transformers_wants_another(tmp_path, kind, name):
  source = _edit(hub_folders.write(tmp_path / 'source', kind), **{name: None})
  with pytest.raises(UserError, match=f'has {name}=None, .* it must be absent or a value'):
    hub.find_model(source)
  nulls = {'num_key_value_heads': None, 'rope_scaling': None, 'sliding_window': None}
  hub.find_model(_edit(hub_folders.write(tmp_path / 'other', 'mistral'), **nulls))


def test_other_names_of_gpt2_s_keys(tmp_path):
  other = {'n_layer': None, 'n_embd': 32, 'num_hidden_layers': 2, 'hidden_size': 16}
  source = hub_folders.write(tmp_path / 'source', 'gpt2', **other)
  assert hub.find_model(source)[1] == hub_folders.model('gpt2'), 'they win in transformers'


def test_an_option_that_config_json_has(tmp_path):
  source = hub_folders.write(tmp_path / 'source')
  with pytest.raises(UserError, match='heads has no meaning'):
    to_jax(source, tmp_path / 'run', heads=2)


def test_unknown_keys_are_named_and_sizes_fit(tmp_path, capsys):
  scaling = {'type': 'linear', 'factor': 2.0, 'other': 4}
  source = hub_folders.write(tmp_path / 'source', some_new_key=3, rope_scaling=scaling)
  config = to_jax(source, tmp_path / 'run')
  named = 'not read, because not known: rope_scaling.other, some_new_key\n'
  assert named in capsys.readouterr().err
  assert config.data.sequence_length == 32, 'longer than the positions of the model'


def _model(kind, **changes):
  """The model of a folder whose config.json has other keys; `...` drops one."""
  family, values = families.FAMILIES[kind], hub_folders.KEYS[kind] | changes
  given = {name: value for name, value in values.items() if value is not ...}
  return family.to_model(Keys(given, 'the test', family.defaults))


def test_a_key_that_is_absent_is_not_null():
  windows = [
    _model('mistral', sliding_window=window).layer.mixer.window for window in (..., None, 5)
  ]
  assert windows == [4096, 0, 5]


def test_of_two_tables_the_older_one_is_read(tmp_path, capsys):
  scaling, newer = {'rope_type': 'linear', 'factor': 2.0}, {'rope_type': 'linear', 'factor': 4.0}
  keys = {'rope_scaling': scaling, 'rope_parameters': newer}
  folder = hub.find(hub_folders.write(tmp_path / 'source', **keys))
  assert folder.model.layer.mixer.positions.scaling.factor == 2.0
  assert 'not known' not in capsys.readouterr().err


def test_a_class_that_transformers_has_itself_needs_no_code_of_its_author(tmp_path, capsys):
  code = {'AutoConfig': 'configuration_phi3.Phi3Config'}
  code['AutoModelForCausalLM'] = 'modeling_phi3.Phi3ForCausalLM'
  folder = hub.find(hub_folders.write(tmp_path / 'source', 'phi3', auto_map=code))
  assert folder.model.layer.mixer.positions.fraction == 0.5
  assert 'not known' not in capsys.readouterr().err


def test_rows_of_layers_that_repeat_are_one_loop():
  """SmolLM3 has 36 layers, of which each fourth has no rotation; with an odd one at the end."""
  model = _model('smollm3', num_hidden_layers=37, no_rope_layer_interval=4)
  assert model.pattern == '(layer*3 unrotated)*9 layer'
  renamed = model.pattern.replace('unrotated', 'nope')
  other = {'nope': model.variants['unrotated'], 'unused': model.layer}
  model = dataclasses.replace(model, pattern=renamed, variants=Layers(other))
  family, keys = families.match(model)
  assert family.kind == 'smollm3', 'a model depends on the names of its layers'
  assert keys['no_rope_layers'] == [*[1, 1, 1, 0] * 9, 1]


def test_gemma_s_gelu_is_the_other_one():
  """Its first files have hidden_act=gelu, and were trained with the tanh form."""
  tanh = _model('gemma', hidden_act='gelu_pytorch_tanh', hidden_activation='gelu')
  assert _model('gemma', hidden_act='gelu') == tanh
  mlp = dataclasses.replace(tanh.layer.ffn, activation='gelu')
  exact = dataclasses.replace(tanh, layer=dataclasses.replace(tanh.layer, ffn=mlp))
  assert families.match(exact) is None, 'transformers would compute the tanh form'


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'changes', 'architecture'),
  [
    ('qwen3', {}, 'Qwen3ForCausalLM'),
    ('phi3', {'partial_rotary_factor': 1.0}, 'Phi3ForCausalLM'),  # what a Mistral computes
  ],
)
def test_a_model_of_a_family_goes_out_as_it_came(tmp_path, kind, changes, architecture):
  source = hub_folders.write(tmp_path / 'source', kind, **changes)
  to_jax(source, tmp_path / 'run')
  export.to_hf(str(tmp_path / 'run'), tmp_path / 'out')
  wanted, got = (tensor_files.find(path) for path in (source, tmp_path / 'out'))
  assert set(got) == set(wanted), 'names changed'
  for name, tensor in wanted.items():
    np.testing.assert_array_equal(got[name].read(), tensor.read(), err_msg=name)
  assert not list((tmp_path / 'out').glob('*.py')), 'transformers needs no code for it'
  assert f'as a {architecture}' in (tmp_path / 'out' / 'README.md').read_text()
  to_jax(tmp_path / 'out', tmp_path / 'again')


def _params(directory, model):
  source = checkpoint.open_source(directory, None)
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  return jax.device_get(grow_run.read_params(source, mesh, define_lm(model).abstract))


@pytest.mark.slow
def test_parameters_that_stay_in_half_precision(tmp_path):
  source = hub_folders.write(tmp_path / 'source', 'mixtral', dtype='bfloat16')
  for dtype in ('float32', 'bfloat16'):
    to_jax(source, tmp_path / dtype, dtype=dtype)
  model = hub_folders.model('mixtral')
  wide, kept = (_params(tmp_path / dtype, model) for dtype in ('float32', 'bfloat16'))
  assert {a.dtype.name for a in jax.tree.leaves(kept)} == {'float32'}
  jax.tree.map(np.testing.assert_array_equal, kept, wide)
  sizes = [
    sum(file.stat().st_size for file in (tmp_path / dtype).rglob('d/*'))
    for dtype in ('float32', 'bfloat16')
  ]
  count = sum(array.size for array in jax.tree.leaves(kept))
  assert sizes[0] - sizes[1] > 1.9 * count, f'not stored in half precision: {sizes}'
  export.to_hf(str(tmp_path / 'bfloat16'), tmp_path / 'out', dtype='bfloat16')
  got = tensor_files.find(tmp_path / 'out')
  for name, tensor in tensor_files.find(source).items():
    assert got[name].read().tobytes() == tensor.read().tobytes(), f'{name}: other bits'


def test_a_changed_number_in_half_precision_is_seen():
  """Its checksum is that of the float32 which is read."""
  bits = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  assert checksum.of_chunks([bits[:100], bits[100:]]) == int(checksum.on_devices(jnp.array(bits)))
  layers = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
  assert checksum.of_chunks([layers]) == int(checksum.on_devices(jnp.array(layers)))
  numbers = bits[np.arange(2**16) & 0x7F80 != 0x7F80]  # without infinities and NaNs
  assert checksum.of_chunks([numbers]) == checksum.of_chunks([numbers.astype(np.float32)])


def test_sequences_beyond_the_positions_of_a_folder_are_named(tmp_path, capsys):
  source = hub_folders.write(tmp_path / 'source')
  most = json.loads((source / 'config.json').read_text())['max_position_embeddings']
  to_jax(source, tmp_path / 'run', sequence_length=most + 1)
  assert f'sequence_length={most + 1} is above the {most} positions of' in capsys.readouterr().err


def test_numbers_that_are_rounded_are_named(tmp_path, capsys):
  source = hub_folders.write(tmp_path / 'source')
  to_jax(source, tmp_path / 'run', dtype='bfloat16')
  assert 'numbers of float32 are rounded to bfloat16' in capsys.readouterr().err


CHATML = """{%- for m in messages %}{{- '[' + m.role + ']' + m.content + '.\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""


def test_a_chat_template_comes_along_and_without_marks_asks_and_does_not_teach(tmp_path):
  folder = hub_folders.write(tmp_path / 'source')
  (folder / 'chat_template.jinja').write_text(CHATML)
  to_jax(folder, tmp_path / 'run')
  _, meta = checkpoint.open_source(tmp_path / 'run', None)
  assert meta.tokenizer['chat']['source'] == CHATML
  question = [{'role': 'user', 'content': 'HM?'}]
  request = chats.ask(
    chats.find_template(meta, tmp_path), chats.question(question), TextRequest('')
  )
  assert (request.prompt, request.stop) == ('[user]HM?.\n[assistant]', ('.',))
  with pytest.raises(UserError, match=r'generation %}.* a copy that config\.data\.chat_template'):
    chat_template.find_template(meta.config.data)


def test_a_template_that_is_broken_is_named(tmp_path, capsys):
  folder = hub_folders.write(tmp_path / 'source')
  (folder / 'chat_template.jinja').write_text('{% if %}')
  to_jax(folder, tmp_path / 'run')
  assert 'no chat template is taken: ' in capsys.readouterr().err


def _with_first_token(folder):
  """Changes the tokenizer of a folder to one that begins a text with the token of id 5."""
  file = folder / 'tokenizer.json'
  tokenizer = hf.Tokenizer.from_file(str(file))
  (token,) = tokenizer.decode([5])
  tokenizer.post_processor = hf.processors.TemplateProcessing(
    single=f'{token} $A', special_tokens=[(token, 5)]
  )
  tokenizer.save(str(file))


def test_texts_begin_and_end_as_the_folder_says(tmp_path, capsys):
  source = hub_folders.write(tmp_path / 'source')
  _with_first_token(source)
  values = {'eos_token_id': [7, 0], 'do_sample': True, 'temperature': 0.6, 'num_beams': 4}
  (source / 'generation_config.json').write_text(json.dumps(values))
  to_jax(source, tmp_path / 'run')
  assert 'without effect here: num_beams=4' in capsys.readouterr().err
  assert hub_generation.find(source, 64).draws == {'temperature': 0.6, 'top_k': 50, 'top_p': 1.0}
  _, meta = checkpoint.open_source(tmp_path / 'run', None)
  tokenizer = tokenizers.from_json(meta.tokenizer)
  request = TextRequest('AB').tokens(tokenizer)
  assert (request.prompt[0], len(request.prompt), request.stop) == (5, 3, (0, 7))
  assert decode_text(tokenizer, [34, 35, 7, 36]) == tokenizer.decode([34, 35])
  spec = str(source / 'tokenizer.json')
  tokenizers.check_same(spec, spec, tokenizer, 'the run')  # It trains on the same ids.

  export.to_hf(str(tmp_path / 'run'), tmp_path / 'out')
  again = hf.Tokenizer.from_file(str(tmp_path / 'out' / 'tokenizer.json'))
  assert again.encode('AB').ids == request.prompt, 'the tokenizer begins a text in another way'
  assert json.loads((tmp_path / 'out' / 'generation_config.json').read_text()) == values


def test_a_text_may_begin_with_nothing(tmp_path):
  """So it is for GPT-2 and Qwen. The first token of an empty text needs a token before it."""
  source = hub_folders.write(tmp_path / 'source')
  to_jax(source, tmp_path / 'run')
  _, meta = checkpoint.open_source(tmp_path / 'run', None)
  tokenizer = tokenizers.from_json(meta.tokenizer)
  assert TextRequest('AB').tokens(tokenizer).prompt == tokenizer.encode('AB').tolist()
  assert TextRequest('').tokens(tokenizer).prompt == [0]


def test_special_tokens_go_out_as_they_came(tmp_path):
  """A folder states its end and padding, and may state a first token that no text uses."""
  source = hub_folders.write(tmp_path / 'source')
  tokens = {'bos_token': 'B', 'eos_token': 'E', 'pad_token': 'P', 'unk_token': '<none>'}
  (source / 'special_tokens_map.json').write_text(json.dumps(tokens))
  to_jax(source, tmp_path / 'run')
  export.to_hf(str(tmp_path / 'run'), tmp_path / 'out')
  ids = {f'{name}_token_id': ord(name[0].upper()) - 32 for name in ('bos', 'eos', 'pad')}
  out = {file.stem: json.loads(file.read_text()) for file in (tmp_path / 'out').glob('*.json')}
  assert out['generation_config'] == {**ids, 'eos_token_id': [ids['eos_token_id']]}
  assert out['special_tokens_map'] == tokens and 'tokenizer_config' not in out
  assert 'post_processor' not in {k for k, v in out['tokenizer'].items() if v}
  again = tokenizers.load(str(tmp_path / 'out' / 'tokenizer.json'))
  assert again.end_of_document == ids['eos_token_id'] and not again.opening


@pytest.mark.parametrize(
  ('values', 'draws'),
  [
    ({'eos_token_id': 1}, {}),
    ({'do_sample': False, 'temperature': 0.6}, {'temperature': 0.0}),
    ({'temperature': 0.9, 'top_p': 0.6}, {'temperature': 0.9, 'top_p': 0.6}),
    ({'top_k': -1}, {'top_k': 0}),
    (
      {'do_sample': True, 'temperature': 0.0, 'top_k': -1},
      {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0},
    ),
  ],
)
def test_a_folder_states_its_draws(tmp_path, values, draws):
  (tmp_path / 'config.json').write_text('{}')
  (tmp_path / 'generation_config.json').write_text(json.dumps(values))
  generation = hub_generation.find(tmp_path, 64)
  assert (generation.draws, generation.unread) == (draws, [])


@pytest.mark.parametrize('end', [64, 'x', [1, None]])
def test_an_end_that_is_no_token_is_refused(tmp_path, end):
  source = hub_folders.write(tmp_path / 'source')
  (source / 'generation_config.json').write_text(json.dumps({'eos_token_id': end}))
  with pytest.raises(UserError, match=r'eos_token_id=.* one or several ids from 0 to 63'):
    to_jax(source, tmp_path / 'run')
