"""Simplified Transformer Blocks and their baselines against golden values and published counts."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenformer_jax.config import (
  DenseConfig,
  LayerConfig,
  Layers,
  LMConfig,
  MLPConfig,
  ModelConfig,
  NoPositionsConfig,
  NoProjectionConfig,
  ParallelConfig,
  PreNormConfig,
  SkiplessConfig,
  SoftmaxConfig,
)
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params, Role
from tokenformer_jax.steps import optim

GOLDEN = dict(np.load(Path(__file__).parents[1] / 'golden' / 'sas.npz'))
META = json.loads(str(GOLDEN['meta']))
SIZES = {'width': 48, 'vocab_size': 24, 'max_length': 16}
MIXER = SoftmaxConfig(heads=4, positions=NoPositionsConfig(), qkv=DenseConfig(bias=True))
# The arrays of a block in the file and here.
BLOCK = {
  'attn_block_resid_gain': 'mixer_gain',
  'mlp_block_resid_gain': 'ffn_gain',
  'mlp_block_skip_gain': 'skip_gain',
  'ln_1.scale': 'attention_norm/scale',
  'ln_1.weight': 'attention_norm/scale',
  'ln_1.bias': 'attention_norm/bias',
  'ln_2.scale': 'ffn_norm/scale',
  'attn.attn_mat_skip_gain': 'attention/identity_gain',
  'attn.attn_mat_resid_gain': 'attention/attention_gain',
  'attn.centre_attn_gain': 'attention/uniform_gain',
  'attn.v_attn.resid_gain': 'attention/value_gain',
  'attn.v_attn.skip_gain': 'attention/input_gain',
  'attn.v_attn.weight': 'attention/value/kernel',
  'attn.c_proj.weight': 'attention/proj/kernel',
  'mlp.c_fc.weight': 'ffn/up/kernel',
  'mlp.c_proj.weight': 'ffn/down/kernel',
}
OTHERS = {
  'wte.weight': 'embedding',
  'wpe.weight': 'positions',
  'ln_f.weight': 'final_norm/scale',
  'ln_f.bias': 'final_norm/bias',
}


def _layer(wiring, *, shaped: bool, **changes) -> LayerConfig:
  dense = DenseConfig(bias=False)
  value = {'value': dense, 'proj': dense, **changes}
  mixer = dataclasses.replace(MIXER, shaped=shaped, **value)
  return LayerConfig(mixer, MLPConfig(width=96, activation='relu'), 'rms', wiring)


def _model(layer: LayerConfig, layers: int = 3, **sizes) -> ModelConfig:
  """Return a model of the source: without values, its first layer has its own."""
  variants = {}
  if isinstance(layer.mixer.value, NoProjectionConfig):
    mixer = dataclasses.replace(layer.mixer, value=DenseConfig(), value_skip=True)
    norm = 'affine' if layer.norm == 'none' else layer.norm
    variants = {'first': dataclasses.replace(layer, mixer=mixer, norm=norm)}
  pattern = f'first layer*{layers - 1}' if variants else f'layer*{layers}'
  return LMConfig(
    pattern=pattern,
    layer=layer,
    variants=Layers(variants),
    position_embedding='learned',
    norm_epsilon_outside=layer.norm == 'rms',
    **{**SIZES, **sizes},
  )


NONE = {'value': NoProjectionConfig(), 'proj': NoProjectionConfig()}
SAS = _layer(SkiplessConfig(), shaped=True, **NONE)
SAS_P = _layer(ParallelConfig(), shaped=True, **NONE)
VARIANTS = {
  'sas': _model(SAS),
  'sas_p': _model(SAS_P),
  'sas_p_nonorm': _model(dataclasses.replace(SAS_P, norm='none')),
  'pre_ln': _model(_layer(PreNormConfig(), shaped=False)),
  'parallel': _model(_layer(ParallelConfig(gains=False, skip=True), shaped=False)),
  'v_skipinit': _model(_layer(SkiplessConfig(), shaped=True)),
}


def _place(model: ModelConfig, path: str) -> tuple[str, int | None]:
  """Return where an array of the file is here: its path, and the index in a stack."""
  name = path.removeprefix('transformer.')
  if name in OTHERS:
    return OTHERS[name], None
  _, block, name = name.split('.', 2)
  stack, index = 'blocks', int(block)
  if model.variants:
    stack, index = ('blocks/first_0', 0) if block == '0' else ('blocks/layer_1', int(block) - 1)
  return f'{stack}/{BLOCK.get(name, name)}', index


def _tree(model: ModelConfig, arrays: dict[str, np.ndarray]) -> Params:
  """Return the file's arrays as a tree of parameters."""
  shapes = {
    jax.tree_util.keystr(path, simple=True, separator='/'): np.zeros(leaf.shape, np.float32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(define_lm(model).abstract)
  }
  for name, array in arrays.items():
    array = np.float32(array)
    own = {name: array}
    if 'qk_attn' in name:
      kind = {'weight': 'kernel', 'bias': 'bias'}[name.rpartition('.')[2]]
      halves = np.split(array, 2, axis=-1)
      prefix = name.rpartition('qk_attn')[0]
      own = {
        f'{prefix}{part}/{kind}': half for part, half in zip(('query', 'key'), halves, strict=True)
      }
    for path, value in own.items():
      place, index = _place(model, path)
      place = place.replace('attn.', 'attention/')
      where = ... if index is None else index
      shapes[place][where] = value.reshape(shapes[place][where].shape)
  return jax.tree.unflatten(jax.tree.structure(define_lm(model).abstract), shapes.values())


def _weights(name: str) -> dict[str, np.ndarray]:
  return {one: GOLDEN[f'weights/{one}'] for one in META['variants'][name]['weights']}


@pytest.mark.parametrize('name', VARIANTS)
def test_logits_loss_and_gradients_are_the_golden_ones(name):
  model, meta = VARIANTS[name], META['variants'][name]
  definition, ids = define_lm(model), jnp.asarray(GOLDEN['input_ids'])

  def objective(params: Params) -> tuple[jax.Array, jax.Array]:
    logits = definition.bind(params)(ids)[0]
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)
    return -jnp.mean(picked), logits

  run = jax.jit(jax.value_and_grad(objective, has_aux=True))
  (loss, logits), tree = run(_tree(model, _weights(name)))
  np.testing.assert_allclose(logits, GOLDEN[f'{name}/logits'], atol=5e-5)
  assert abs(loss - GOLDEN[f'{name}/loss']) < 1e-5
  gradient = functools.partial(_gradient, model, jax.tree.map(np.float64, tree))
  for path, want in zip(meta['weights'], GOLDEN[f'{name}/grad_norm'], strict=True):
    got = np.linalg.norm(gradient(path))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-9, err_msg=path)
  for path, want in zip(meta['scalars'], GOLDEN[f'{name}/grad_scalars'], strict=True):
    np.testing.assert_allclose(np.sum(gradient(path)), want, rtol=1e-4, atol=1e-7, err_msg=path)
  for block, of_gains in enumerate(GOLDEN.get(f'{name}/grad_head_gains', ())):
    for kind, want in zip(('skip', 'resid', 'centre'), of_gains, strict=True):
      end = 'centre_attn_gain' if kind == 'centre' else f'attn_mat_{kind}_gain'
      path = f'transformer.h.{block}.attn.{end}'
      # An entry of 0.001 beside others of 0.3 is a sum that cancels: its rounding is the CPU's.
      np.testing.assert_allclose(gradient(path), want, rtol=1e-4, atol=1e-6, err_msg=path)


def _gradient(model: ModelConfig, tree: Params, path: str) -> np.ndarray:
  """Return our gradient of an array of the file."""

  def at(path: str) -> np.ndarray:
    ours, index = _place(model, path)
    names = ours.replace('attn.', 'attention/').split('/')
    array = functools.reduce(lambda node, name: node[name], names, tree)
    return array if index is None else array[index]

  if 'qk_attn' not in path:
    return at(path)
  prefix, _, kind = path.rpartition('qk_attn.')
  ours = {'weight': 'kernel', 'bias': 'bias'}[kind]
  return np.concatenate([at(f'{prefix}{part}/{ours}') for part in ('query', 'key')], axis=-1)


# SPEC: 12 d² for each of 18 blocks and 50,000 rows of d; without 2 d² a block, but for one d².
@pytest.mark.parametrize(
  ('layer', 'count'),
  [
    pytest.param(_layer(PreNormConfig(), shaped=False), 166_645_248, id='pre-LN'),
    pytest.param(SAS, 146_001_408, id='SAS'),
  ],
)
def test_published_parameter_counts(layer, count):
  mixer = dataclasses.replace(layer.mixer, heads=12)
  layer = dataclasses.replace(layer, mixer=mixer, ffn=MLPConfig(activation='relu'))
  model = _model(layer, 18, width=768, vocab_size=50000, max_length=1024)
  definition = define_lm(model)
  gains = sum(
    array.size
    for array, info in zip(
      jax.tree.leaves(definition.abstract), jax.tree.leaves(definition.info), strict=True
    )
    if info.role is Role.GAIN and 'norm' not in info.axes
  )
  assert definition.count - gains == count


def test_gains_do_not_decay():
  mask = optim.decay_mask(define_lm(VARIANTS['sas']).info)
  block = mask['blocks']['layer_1']
  assert not any(jax.tree.leaves([block['mixer_gain'], block['attention']['uniform_gain']]))
