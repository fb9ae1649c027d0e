"""Models as folders for transformers: logits, generation, the way back, and what is refused."""

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys

import architectures
import jax
import numpy as np
import pytest
import tokenizers as hf
import written_runs
from seeds import take
from tiny import gated_model, linear, tiny_model, two_kinds, with_mixer

from tokenformer_jax import config
from tokenformer_jax.config import (
  Config,
  ModelConfig,
  PattentionConfig,
  TextConfig,
  mixers,
)
from tokenformer_jax.convert import (
  export,
  hub_folder,
  hub_tokenizer,
  model_card,
  run_tensors,
  tensor_files,
)
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.chat_template import OURS
from tokenformer_jax.decoding.decode import Decoder, Request
from tokenformer_jax.decoding.sampling import GREEDY
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.execution import DEFAULT
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Batches, Seen

BYTES = {'kind': 'bytes'}
IDS = np.random.default_rng(0).integers(0, 64, (3, 12))
PADDING = np.array([0, 5, 2])  # leading slots without a token


def _layer(**changes):
  return dataclasses.replace(tiny_model(norm='rms').layer, **changes)


def _mixer(**changes):
  return dataclasses.replace(tiny_model().layer.mixer, **changes)


def _grown(model):
  """Return the model with two groups of tokens everywhere."""
  groups = {
    name: dataclasses.replace(
      part, tokens=part.tokens + 8, reference=0, groups=f'{part.tokens} 8:5'
    )
    for name, part in config.pattentions(model).items()
  }
  return config.with_pattentions(model, groups)


SHARED = ('skipless, tokens', 'parallel, window', 'skips and norms', 'parallel with skip')
SHARED += ('hybrid', 'few key heads', 'sandwich')
MODELS: dict[str, ModelConfig] = {
  **{name: architectures.MODELS[name] for name in SHARED},
  'grown': _grown(tiny_model(final_norm='affine', gelu='tanh')),
  'scores': tiny_model(
    layer=_layer(
      mixer=_mixer(
        qkv=PattentionConfig(24, 9, config.pattention.GELUL2Norm()),
        proj=PattentionConfig(40, 40, config.pattention.SoftmaxScore()),
        value=PattentionConfig(20, 20, config.pattention.ExpL2Norm()),
      ),
      ffn=PattentionConfig(48, 48, config.pattention.GELUL1Norm()),
    ),
    final_norm='rms_plain',
    norm_epsilon_outside=True,
    scaled_logits=True,
  ),
  'transformer': tiny_model(
    dense=True, bias=True, norm='affine', rotary=0, position_embedding='learned', tied_head=False
  ),
  'beside': tiny_model(
    layer=_layer(
      mixer=_mixer(
        positions=config.RotaryConfig(1.0, scaling=mixers.YarnScalingConfig(4, 1, 0.2, length=16)),
        qkv=config.DenseConfig(True, PattentionConfig(24, 0, groups='16:9 8::linear')),
        proj=config.DenseConfig(False, PattentionConfig(8, 8, config.pattention.GELUScore('tanh'))),
      ),
      ffn=config.ExpertsConfig(
        4,
        config.MLPConfig(16, beside=PattentionConfig(12, 12)),
        config.MLPConfig(
          24, beside=PattentionConfig(20, 0, groups='12:12:gelu 8'), each=PattentionConfig(8, 8)
        ),
        config.RouterConfig(top_k=2),
        shared_gate=True,
      ),
    )
  ),
  'post_norm': tiny_model(
    dense=True,
    layer=_layer(
      mixer=_mixer(
        positions=config.RotaryConfig(1.0, layout='interleaved'),
        length_scale=config.SeenScaleConfig(least=4),
        window=6,
      ),
      ffn=config.MLPConfig(48, activation='silu', gated=True),
      wiring=config.PostNormConfig(),
    ),
    embedding_norm='plain',
  ),
  'switch': tiny_model(
    layer=_layer(
      mixer=_mixer(kv_heads=2, window=6),
      ffn=config.ExpertsConfig(
        4, PattentionConfig(12, 12), dispatch=config.CapacityConfig(least=1)
      ),
    )
  ),
  'deepseek': tiny_model(
    layer=_layer(
      ffn=config.ExpertsConfig(
        4,
        config.MLPConfig(16, gated=True),
        config.MLPConfig(24),
        config.RouterConfig('sigmoid', top_k=2, renormalize=True),
        config.BiasBalanceConfig(),
      )
    )
  ),
}


def _write_run(directory, model, scale=0.3):
  """Write a run of random parameters; return them."""
  abstract = define_lm(model).abstract
  rng = np.random.default_rng(1)
  params = jax.tree.map(
    lambda a: np.asarray(scale * rng.normal(size=a.shape) + (not a.ndim), np.float32), abstract
  )
  settings = Config(model=model, data=TextConfig(tokenizer='bytes', sequence_length=32))
  written_runs.write_params(directory, settings, params)
  return params


@functools.cache
def _load(folder):
  transformers = pytest.importorskip('transformers')
  return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.fixture(scope='module', params=MODELS)
def exported(request, tmp_path_factory):
  """A model of each architecture, its parameters, and its folder."""
  directory = tmp_path_factory.mktemp(request.param)
  model = dataclasses.replace(MODELS[request.param], vocab_size=256)
  params = _write_run(directory / 'run', model)
  export.to_hf(str(directory / 'run'), directory / 'folder')
  return model, params, directory / 'folder'


@pytest.mark.slow
def test_logits_are_ours(exported):
  pytest.importorskip('transformers')
  import torch  # noqa: PLC0415 (from an extra)

  model, params, folder = exported
  assert hub_folder.find(folder).model == model
  loaded, definition = _load(folder), define_lm(model)
  run = jax.jit(lambda p, ids, blank: definition.bind(p)(ids, Context(padding_B=blank))[0])
  wanted = np.asarray(run(params, IDS, PADDING))
  kept = np.arange(IDS.shape[1]) >= PADDING[:, None]
  with torch.no_grad():
    got = loaded(torch.tensor(IDS), attention_mask=torch.tensor(kept).long()).logits.numpy()
    (first,) = loaded(torch.tensor(IDS[:1])).logits.numpy()  # It has no padding, and no mask here.
  scale = max(1, np.abs(wanted[kept]).max())
  np.testing.assert_allclose(got[kept] / scale, wanted[kept] / scale, rtol=0, atol=1e-5)
  np.testing.assert_allclose(first / scale, wanted[0] / scale, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('exported', take(MODELS, ('switch',)), indirect=True)
def test_generate_writes_our_tokens_with_its_cache_and_padding(exported):
  """In CI of a model with windows, few key heads, and experts of a capacity."""
  pytest.importorskip('transformers')
  import torch  # noqa: PLC0415 (from an extra)

  model, params, folder = exported
  rows = zip(IDS, PADDING, strict=True)
  requests = [Request(row[blank:].tolist(), 8, GREEDY) for row, blank in rows]
  decoder = Decoder(model, DEFAULT)
  wanted = decoder(decoder.prepare(params), requests)
  mask = torch.tensor(np.arange(IDS.shape[1]) >= PADDING[:, None]).long()
  got = _load(folder).generate(
    torch.tensor(IDS), attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
  )
  assert got[:, IDS.shape[1] :].tolist() == [list(ids) for ids in wanted]


@pytest.mark.slow
@pytest.mark.parametrize('exported', take(MODELS, ('hybrid', 'grown', 'beside')), indirect=True)
def test_a_folder_becomes_a_run_with_the_same_parameters(exported, tmp_path):
  """In CI of models with several stacks, with groups, and with experts and tokens beside them."""
  *_, folder = exported
  to_jax(folder, tmp_path / 'run')
  export.to_hf(str(tmp_path / 'run'), tmp_path / 'again')
  for name in ('model.safetensors', 'tokenizer.json', 'config.json'):
    assert (tmp_path / 'again' / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run that was grown, with learned gains, of a tokenizer of bytes."""
  directory, grown = tmp_path_factory.mktemp('run') / 'run', MODELS['grown']
  layer = dataclasses.replace(grown.layer, wiring=config.SkiplessConfig())
  _write_run(directory, dataclasses.replace(grown, layer=layer, vocab_size=256))
  return directory


@pytest.mark.slow
def test_the_program_of_the_card_writes_without_jax(run, tmp_path):
  pytest.importorskip('transformers')
  export.to_hf(str(run), tmp_path / 'folder')
  card = (tmp_path / 'folder' / 'README.md').read_text()
  program = re.search(r'```python\n(.*?)```', card, re.DOTALL)[1]
  without = 'import sys\nsys.modules["jax"] = sys.modules["tokenformer_jax"] = None\n'
  command = [sys.executable, '-c', without + program]
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert done.stdout.startswith('Once upon a time'), done.stderr


def test_a_large_model_has_several_files_and_their_index(run, tmp_path):
  export.to_hf(str(run), tmp_path / 'one')
  export.to_hf(str(run), tmp_path / 'many', shard_bytes=20_000)
  index = json.loads((tmp_path / 'many' / 'model.safetensors.index.json').read_text())
  assert len(set(index['weight_map'].values())) > 3
  one, many = (tensor_files.find(tmp_path / name) for name in ('one', 'many'))
  assert one.keys() == many.keys() and 'blocks.1.attention.query.keys' in one
  for name, tensor in one.items():
    np.testing.assert_array_equal(tensor.read(), many[name].read(), err_msg=name)


def test_a_model_with_learned_gains_is_written_in_half_precision(run, tmp_path):
  export.to_hf(str(run), tmp_path / 'folder', dtype='bfloat16')
  tensor = tensor_files.find(tmp_path / 'folder')['blocks.1.mixer_gain']
  gains = run_tensors.read_array(checkpoint.open_source(run, None), ('blocks', 'mixer_gain'))
  assert tensor.shape == () and tensor.read() == gains[1].astype(tensor_files.DTYPES['bfloat16'])


def test_bytes_and_chats_have_files_of_transformers():
  chat = {'name': 'ours', 'source': OURS, 'tokens': {}}
  made = hub_tokenizer.to_files({**BYTES, 'chat': chat}, 32)
  tokenizer = hf.Tokenizer.from_str(json.dumps(made['tokenizer.json']))
  text = 'naïve\n🙂'
  assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())
  assert tokenizer.encode(text).ids == [0xFF, *text.encode()], 'a text begins after an end'
  assert tokenizer.decode(list(text.encode())) == text
  settings = made['tokenizer_config.json']
  assert settings['eos_token'] == '<|endoftext|>' and OURS in settings['chat_template']


def test_a_tokenizer_is_written_the_same_again():
  stored = tokenizers.train_bpe(['some text to learn from'] * 9, 280).to_json()
  content = hub_tokenizer.to_files(stored, 32)['tokenizer.json']
  again = hub_tokenizer.to_files({'kind': 'huggingface', 'tokenizer': content}, 32)
  assert again['tokenizer.json'] == content != stored['tokenizer']
  assert hf.Tokenizer.from_str(json.dumps(content)).encode('some').ids[0] == 0
  chat = {'name': 'theirs', 'source': '', 'tokens': {'eos_token': 'e'}}
  e = hf.Tokenizer.from_str(json.dumps(content)).token_to_id('e')
  assert hub_tokenizer.end_ids(stored) == [0]
  assert hub_tokenizer.end_ids({**stored, 'chat': chat}) == [0, e], 'an answer has its own end'


def test_the_card_says_what_the_run_records(run):
  checkpoints, meta = checkpoint.open_source(run, None)
  checkpoints.close()
  card = model_card.write(meta, 'float32', 'small')
  sizes = [math.prod(entry.shape) for entry in hub_folder.layout(meta.config.model).values()]
  assert f'| Parameters | {sum(sizes):,} |' in card and 'qkv 32' in card
  assert 'did not train' in card and 'stdlib' not in card and 'Lineage' not in card
  grown = Ancestor('grow', 'runs/small', 7, tiny_model(), config.GrowConfig(), 7, groups='2')
  seen = Seen(80, 'digest', (Batches(0, 4, 32),))
  card = model_card.write(
    dataclasses.replace(meta, step=20, seen=seen, lineage=(grown,)), 'float32', 'small'
  )
  assert '20 steps' in card and '- `stdlib`' in card
  assert re.search(r'1\. `grow` of a model of [0-9,]+ parameters, at step 7, groups 2', card)
  assert 'runs/small' not in card, 'a path of the machine'


@pytest.mark.parametrize(
  ('model', 'match'),
  [
    (linear(tiny_model()), "mixer.kind is 'linear'; .* know only 'softmax'"),
    (two_kinds(window=0, layer=gated_model().layer), "mixer.kind is 'gated_unit'"),
    (
      with_mixer(tiny_model(), positions=config.RotaryConfig(clip=4)),
      r'model\.layer\.mixer\.positions\.clip is 4; .* know only 0',
    ),
  ],
)
def test_a_model_that_the_pytorch_files_cannot_compute_is_refused(model, match):
  with pytest.raises(UserError, match=match):
    hub_folder.check_can_load(model)


def test_keys_of_training_and_of_several_devices_do_not_matter():
  experts = config.ExpertsConfig(
    4,
    PattentionConfig(12, 12),
    router=config.RouterConfig(jitter=0.1, z_loss=0.1),
    balance=config.BiasBalanceConfig(rate=0.5),
    dispatch=config.CapacityConfig(factor=3.0, eval_factor=4.0),
  )
  hub_folder.check_can_load(tiny_model(layer=_layer(ffn=experts)))


def test_a_folder_whose_config_does_not_fit_is_refused(run, tmp_path):
  export.to_hf(str(run), tmp_path / 'folder')
  file = tmp_path / 'folder' / 'config.json'
  settings = json.loads(file.read_text())
  model = settings['tokenformer']
  for other, match in (
    ({**model, 'width': -32}, r'model\.width'),
    ({**model, 'variants': 3}, r'model\.variants'),
    ({**model, 'final_norm': 'bias'}, 'final_norm.scale is none of'),
    (None, 'must be a section of keys'),
  ):
    file.write_text(json.dumps({**settings, 'tokenformer': other}))
    with pytest.raises(UserError, match=match):
      to_jax(tmp_path / 'folder', tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
