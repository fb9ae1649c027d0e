"""Options of popular models: few key heads, norms of queries, scales of norms and embeddings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import mixtures
import numpy as np
import pytest
from tiny import large_params, normal_params, tiny_model

from tokenformer_jax.config import (
  DenseConfig,
  Llama3ScalingConfig,
  MeshConfig,
  ModelConfig,
  NoProjectionConfig,
  PattentionConfig,
  RotaryConfig,
  YarnScalingConfig,
)
from tokenformer_jax.config.check_model import check_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.lm import define_lm, unstack
from tokenformer_jax.model.norm import make_norm
from tokenformer_jax.model.params import define
from tokenformer_jax.parallel import sharding

HEADS, KEY_HEADS, WIDTH, LENGTH = 8, 2, 6, 24
PADDING = np.array([0, 3, 11])
X_BxTxD = np.random.default_rng(1).normal(size=(3, LENGTH, 32)).astype(np.float32)
QKV = {'dense': DenseConfig(bias=True), 'pattention': PattentionConfig(24, 24)}
FORMS = ('rms_offset', 'rms')


def _model(qkv: str = 'dense', **changes) -> ModelConfig:
  """Heads are 6 wide, and together wider than the model."""
  sizes = {'heads': HEADS, 'kv_heads': KEY_HEADS, 'head_width': WIDTH, 'qkv': QKV[qkv]}

  def change(name, layer):
    del name
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **sizes | changes))

  return tiny_model(dense=True).map_layers(change)


@functools.cache
def _attention(model: ModelConfig):
  return define(lambda rngs: Attention(model.layer.mixer, model, execution=Execution(), rngs=rngs))


STARTS = np.where(np.arange(LENGTH) < 9, 0, 9)[None].repeat(3, 0)


@pytest.mark.parametrize(
  ('qkv', 'window', 'context'),
  [
    ('pattention', 0, Context(padding_B=PADDING)),
    ('dense', 5, Context(starts_BxT=STARTS, restart=True)),
  ],
  ids=['tokens, padding', 'dense, window, documents'],
)
def test_few_key_heads_are_equal_ones_for_their_queries(qkv, window, context):
  few = _model(qkv, window=window, qk_norm='rms')
  params = normal_params(_attention(few), 0.5)
  assert (
    params['query']['kernel' if qkv == 'dense' else 'values'].shape[1]
    == params['proj']['kernel'].shape[0]
    == HEADS * WIDTH
  ), 'heads are not as wide as head_width'

  def repeated(part):
    def by_name(path, array):
      if path[-1].key == 'keys':
        return array
      heads = np.reshape(array, (*array.shape[:-1], KEY_HEADS, WIDTH))
      return np.repeat(heads, HEADS // KEY_HEADS, axis=-2).reshape(*array.shape[:-1], -1)

    return jax.tree_util.tree_map_with_path(by_name, part)

  all_heads = {**params, **{name: repeated(params[name]) for name in ('key', 'value')}}
  many = _model(qkv, window=window, qk_norm='rms', kv_heads=HEADS)
  got, want = (
    jax.jit(lambda p, own=own: _attention(own).bind(p)(X_BxTxD, context)[0])(own_params)
    for own, own_params in ((few, params), (many, all_heads))
  )
  np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize('window', [0, 5])
def test_a_cache_holds_the_heads_of_keys(window):
  model = _model(window=window, qk_norm='rms')
  layer = _attention(model).bind(normal_params(_attention(model), 0.5))
  want = jax.jit(lambda x: layer(x, Context(padding_B=PADDING))[0])(X_BxTxD)
  cache = layer.init_cache(3, LENGTH, jnp.float32)
  assert cache.keys.shape == (3, KEY_HEADS, window or LENGTH, WIDTH)
  extend = jax.jit(lambda x, start, cache: layer(x, Context(start, PADDING), cache))
  read, start = [], 0
  for size in (1, 12, *[1] * 11):
    out, cache, _ = extend(X_BxTxD[:, start : start + size], start, cache)
    read.append(out)
    start += size
  tokens = np.arange(LENGTH) >= PADDING[:, None]
  np.testing.assert_allclose(np.concatenate(read, 1)[tokens], np.asarray(want)[tokens], atol=2e-5)


@pytest.mark.slow
def test_key_heads_on_a_mesh_are_those_of_one_device():
  """Four devices split eight heads of queries; each has both heads of keys."""
  model = dataclasses.replace(_model(head_width=8, qk_norm='rms_joint'), pattern='layer')
  definition, decoder = define_lm(model), define_lm(model, Execution(layers='list'))
  params = large_params(model)
  ids = np.random.default_rng(0).integers(0, 64, (4, 12))

  def loss_and_gradients(params):
    return jax.value_and_grad(lambda p: jnp.mean(jnp.sin(definition.bind(p)(ids)[0])))(params)

  def decoded(params):
    model_ = decoder.bind(unstack(params, model))
    caches = model_.init_caches(4, 12)
    _, caches = model_(ids[:, :8], Context(), caches)
    logits, caches = model_(ids[:, 8:], Context(jnp.int32(8)), caches)
    return logits

  want = jax.jit(lambda p: (loss_and_gradients(p), decoded(p)))(params)
  mesh = sharding.make_mesh(MeshConfig(fsdp=2, tokens=4))
  placed = jax.device_put(params, sharding.tree_shardings(mesh, definition.axes))
  with jax.set_mesh(mesh):
    got = jax.jit(lambda p: (loss_and_gradients(p), decoded(p)))(placed)
  for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5, err_msg='a mesh computes something else')


REFUSED = {
  'and neither shaped nor value_skip; set both': _model(shaped=True),
  'which need a projection of the value and of the output': _model(proj=NoProjectionConfig()),
  'low_frequency=8 is not less than high_frequency=4': _model(
    positions=RotaryConfig(scaling=Llama3ScalingConfig(8.0, low_frequency=8.0))
  ),
  'yarn, which multiplies what is rotated, and clip=5': _model(
    positions=RotaryConfig(clip=5, scaling=YarnScalingConfig(8.0))
  ),
}


@pytest.mark.parametrize('sentence', REFUSED)
def test_settings_without_meaning_are_refused(sentence):
  with pytest.raises(UserError) as error:
    check_model(REFUSED[sentence])
  assert sentence in str(error.value)


def test_a_scale_of_a_norm_may_be_an_offset():
  model = tiny_model()
  offset, plain = (define(lambda rngs, f=form: make_norm(f, model, rngs=rngs)) for form in FORMS)
  new = offset.init(jax.random.key(0))
  assert not np.any(new['scale']), 'the norm does not start with a factor of 1'
  got, want = (
    jax.jit(lambda scale, norm=norm: norm.bind({'scale': scale})(X_BxTxD))(np.full(32, scale))
    for norm, scale in ((offset, np.float32(0.5)), (plain, np.float32(1.5)))
  )
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_embeddings_are_scaled_by_the_root_of_the_width():
  model, ids = tiny_model(), np.arange(6)[None]
  scaled = dataclasses.replace(model, embedding_scale=True)
  params = large_params(model)
  got, want = (define_lm(each).bind(params).embed(ids) for each in (scaled, model))
  np.testing.assert_allclose(got, want * 32**0.5, rtol=1e-6)


def test_the_shared_part_of_experts_has_a_gate():
  plain = mixtures.KINDS['fine-grained']
  gated = dataclasses.replace(plain, shared_gate=True)
  params = mixtures.large(mixtures.layer(gated))
  x = X_BxTxD[..., :16]
  without = {name: part for name, part in params.items() if name != 'shared_gate'}

  @jax.jit
  def run():
    whole = mixtures.layer(gated).bind(params)
    return whole(x)[0], mixtures.layer(plain).bind(without)(x)[0], whole.shared(x)

  got, want, shared = map(np.asarray, run())
  want = want - shared + shared / (1 + np.exp(-x @ np.asarray(params['shared_gate'])))[..., None]
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
