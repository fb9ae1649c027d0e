"""A language model of two kinds of layers, one of them without a feed-forward part."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

from tokenformer_jax.config import Layers, MeshConfig, ModelConfig, NoFeedForwardConfig
from tokenformer_jax.model import flops, lm
from tokenformer_jax.model.blocks import Block
from tokenformer_jax.model.cache import KV, Ring
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Definition, Params, define
from tokenformer_jax.model.trunk import Context
from tokenformer_jax.parallel import sharding

WINDOW = 8


def _model() -> ModelConfig:
  """Five layers: `local` attends in a window and has no feed-forward part."""
  local = dataclasses.replace(tiny_model(window=WINDOW).layer, ffn=NoFeedForwardConfig())
  return tiny_model(pattern='(local layer)*2 local', variants=Layers({'local': local}))


MODEL = _model()
# The stack and the index in it of every layer, in order.
PLACES = [('local_0', 0), ('layer_1', 0), ('local_0', 1), ('layer_1', 1), ('local_2', 0)]
IDS = np.random.default_rng(0).integers(0, 64, (4, 24), np.int32)


@functools.cache
def _params() -> Params:
  """Parameters large enough that every part of the model matters."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape) * p.shape[-1] ** -0.5, p.dtype),
    define_lm(MODEL).abstract,
  )


def _logits(definition: Definition, params: Params) -> jax.Array:
  return definition.bind(params)(IDS)[0]


@functools.cache
def _result(layers: str) -> tuple[jax.Array, Params]:
  """Logits, and gradients with the arrays of each layer apart."""
  definition = define_lm(MODEL, Compute(layers=layers))
  params = lm.unstack(_params(), MODEL) if layers == 'list' else _params()

  def objective(params: Params) -> tuple[jax.Array, jax.Array]:
    logits = _logits(definition, params)
    return jnp.mean(jnp.sin(logits)), logits

  gradients, logits = jax.jit(jax.grad(objective, has_aux=True))(params)
  return logits, gradients if layers == 'list' else lm.unstack(gradients, MODEL)


@pytest.mark.parametrize('layers', ['unrolled', 'list'])
def test_logits_and_gradients_are_the_same_however_layers_run(layers):
  want, got = _result('scan'), _result(layers)
  leaves = jax.tree_util.tree_leaves_with_path(got)
  for (path, one), other in zip(leaves, jax.tree.leaves(want), strict=True):
    message = f'layers={layers} computes another {jax.tree_util.keystr(path)}'
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=message)


def test_layers_are_applied_in_the_order_of_the_pattern_each_by_its_own_config():
  params = _params()

  @jax.jit
  def by_hand(params: Params) -> jax.Array:
    model = define_lm(MODEL).bind(params)
    x_BxTxD = model.embed(IDS)
    for stack, index in PLACES:
      layer = MODEL.layers[stack.partition('_')[0]]
      block = define(functools.partial(_block, layer))
      own = jax.tree.map(lambda array, i=index: array[i], params['blocks'][stack])
      x_BxTxD = block.bind(own)(x_BxTxD)[0]
    return model.final_norm(x_BxTxD) @ model.output_embedding.T

  np.testing.assert_allclose(
    by_hand(params),
    _result('scan')[0],
    atol=1e-4,
    err_msg='a layer is at another place, or made by the config of another',
  )


def _block(layer, rngs) -> Block:
  return Block(layer, MODEL, compute=Compute(), rngs=rngs)


def test_a_layer_without_a_feed_forward_part_has_no_parameters_of_one():
  parts = {name: set(stack) for name, stack in define_lm(MODEL).abstract['blocks'].items()}
  assert parts == {
    'local_0': {'attention'},
    'layer_1': {'attention', 'ffn'},
    'local_2': {'attention'},
  }


# Prompts of one token, shorter than the window and longer, then one by one.
@pytest.mark.parametrize('prompt', [1, 5, 13])
def test_decoding_with_caches_is_the_forward_pass(prompt):
  params = lm.unstack(_params(), MODEL)
  definition = define_lm(MODEL, Compute(layers='list'))

  @functools.partial(jax.jit, static_argnames='first')
  def read(caches, ids, start, first):
    return definition.bind(params)(ids, Context(0 if first else start), caches)

  caches, logits = definition.bind(params).init_caches(4, 32), []
  for start, stop in itertools.pairwise([0, *range(prompt, IDS.shape[1] + 1)]):
    part, caches = read(caches, IDS[:, start:stop], start, first=start == 0)
    logits.append(part)
  np.testing.assert_allclose(
    jnp.concatenate(logits, axis=1),
    _result('scan')[0],
    atol=1e-4,
    err_msg='what is generated is not what was trained',
  )


def test_each_layer_has_the_cache_of_its_own_kind():
  module = define_lm(MODEL, Compute(layers='list')).bind(lm.unstack(_params(), MODEL))
  caches = [(type(cache), cache.keys.shape[2]) for cache in module.init_caches(4, 32)]
  local, layer = (Ring, WINDOW), (KV, 32)
  assert caches == [local, layer, local, layer, local], 'a layer keeps what it does not see'


def test_forward_flops_are_those_counted_by_hand():
  attention = 2 * (3 * 2 * 32 * 24 + 2 * 32 * 40)
  ffn, head = 2 * 2 * 32 * 48, 2 * 64 * 32
  # Of 16 positions a query sees 8 on average, and W − W² / 2T = 6 in the window.
  seen = 2 * 4 * 32 * 8 + 3 * 4 * 32 * 6
  want = 5 * attention + 2 * ffn + head + seen
  assert flops.forward_flops(MODEL, 16) == want, 'a layer counts as one of another kind'


def test_logits_on_a_mesh_are_those_of_one_device():
  definition = define_lm(MODEL)
  mesh = sharding.make_mesh(MeshConfig(fsdp=4, tokens=2))
  with jax.set_mesh(mesh):
    params = jax.device_put(_params(), sharding.tree_shardings(mesh, definition.axes))
    got = jax.jit(functools.partial(_logits, definition))(params)
  np.testing.assert_allclose(
    got, _result('scan')[0], atol=1e-4, err_msg='4 × 2 devices compute another model'
  )
