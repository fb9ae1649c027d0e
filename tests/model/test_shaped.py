"""Shaped attention is the sum of its three parts: identity, attention and uniform attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import normal_params, tiny_model, with_mixer

from tokenformer_jax.config import NoPositionsConfig, NoProjectionConfig
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.mixers.shaped import ShapedAttention
from tokenformer_jax.model.params import Definition, define

LENGTH = 20
STARTS = np.where(np.arange(LENGTH) < 8, 0, 8)[None].repeat(2, axis=0)
MASKS = {  # causal, window, context
  'causal': (True, 0, Context()),
  'bidirectional': (False, 0, Context()),
  'documents, window': (True, 7, Context(starts_BxT=STARTS)),
}


def _uniform_matrix(causal: bool, window: int, context: Context) -> np.ndarray:
  """C [T, T] of a row: the softmax of equal scores under the mask."""
  slots = np.arange(LENGTH)
  distance = slots[:, None] - slots[None]
  seen = np.ones((LENGTH, LENGTH), bool)
  if causal:
    seen = (distance >= 0) & (distance < (window or LENGTH))
  if context.starts_BxT is not None:
    seen &= slots[None] >= STARTS[0][:, None]
  return seen / seen.sum(axis=1, keepdims=True)


def _definition(causal: bool = True, window: int = 0) -> Definition:
  """Shaped attention without values and positions."""
  nothing = NoProjectionConfig()
  model = with_mixer(
    tiny_model(dense=True, window=window),
    positions=NoPositionsConfig(),
    value=nothing,
    proj=nothing,
    shaped=True,
  )
  how = {'causal': causal, 'execution': Execution()}
  return define(lambda rngs: ShapedAttention(model.layer.mixer, model, **how, rngs=rngs))


def _apply(causal: bool, window: int, x: jax.Array, gains: jax.Array, context: Context = Context()):  # noqa: B008
  """Apply shaped attention with large queries, and with the same gains in all heads."""
  definition = _definition(causal, window)
  names = ('identity_gain', 'attention_gain', 'uniform_gain')
  of_heads = {name: jnp.full(4, gain) for name, gain in zip(names, gains, strict=True)}
  module = definition.bind(normal_params(definition, 0.25, seed=1) | of_heads)
  return module(x, context)[0]


@pytest.mark.parametrize(('causal', 'window', 'context'), MASKS.values(), ids=MASKS)
def test_shaped_attention_is_the_sum_of_its_three_parts(causal, window, context):
  x = np.float32(np.random.default_rng(0).normal(size=(2, LENGTH, 32)))
  run = jax.jit(lambda x, gains: _apply(causal, window, x, gains, context))
  parts = {
    gains: np.asarray(run(x, np.float32(gains)))
    for gains in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.7, 0.4, 0.9)]
  }
  np.testing.assert_allclose(parts[1, 0, 0], x, atol=1e-6, err_msg='α is not for the identity')
  heads = np.asarray(x).reshape(2, LENGTH, 4, 8)
  mean = np.einsum('TS,BSHK->BTHK', _uniform_matrix(causal, window, context), heads)
  np.testing.assert_allclose(parts[0, 0, 1], -mean.reshape(x.shape), atol=1e-5)
  want = 0.7 * parts[1, 0, 0] + 0.4 * parts[0, 1, 0] + 0.9 * parts[0, 0, 1]
  np.testing.assert_allclose(parts[0.7, 0.4, 0.9], want, atol=1e-5)
  assert np.abs(parts[0, 1, 0] + parts[0, 0, 1]).max() > 0.1, 'attention is uniform'


def test_the_mean_of_bfloat16_values_is_summed_in_float32():
  ones, gains = np.ones((1, 1024, 32), jnp.bfloat16), np.float32([0, 0, 1])
  got = jax.jit(functools.partial(_apply, True, 0))(ones, gains)
  np.testing.assert_array_equal(np.float32(got), -1, err_msg='a sum is rounded')


def test_a_new_layer_is_the_identity_also_with_padding():
  """C is of the tokens that there are, so that A − C is 0 before training."""
  x = np.float32(np.random.default_rng(0).normal(size=(2, LENGTH, 32)))
  context, definition = Context(0, np.array([0, 6])), _definition()
  got = jax.jit(lambda x: definition.bind(definition.init(jax.random.key(0)))(x, context)[0])(x)
  np.testing.assert_allclose(got[0], x[0], atol=1e-6)
  np.testing.assert_allclose(got[1, 6:], x[1, 6:], atol=1e-6)


def test_orthogonal_kernels_are_for_values_and_outputs():
  model = tiny_model(dense=True)
  init = dataclasses.replace(model.init, attention_kernels='orthogonal')
  model = dataclasses.replace(model, init=init)
  module = Attention(model.layer.mixer, model, execution=Execution(), rngs=nnx.Rngs(0))
  for name in ('value', 'proj'):
    kernel = getattr(module, name).kernel[...]
    np.testing.assert_allclose(kernel @ kernel.T, np.eye(32), atol=1e-5, err_msg=name)
  assert np.abs(module.key.kernel[...]).max() < 0.2, 'keys are orthogonal as well'
