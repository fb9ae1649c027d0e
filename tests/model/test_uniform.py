"""Uniform attention is the mean over what is seen, and shaped attention its three parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny_model, with_mixer

from tokenformer_jax.config import NoPositionsConfig, NoProjectionConfig
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.mixers.shaped import ShapedAttention, uniform_attention
from tokenformer_jax.model.mixers.sums import prefix_sums, window_sums

MASKS = {  # causal, window
  'causal': (True, 0),
  'window': (True, 7),
  'window of one': (True, 1),
  'longer window': (True, 999),
  'bidirectional': (False, 0),
}
EACH_MASK = pytest.mark.parametrize('mask', MASKS.values(), ids=MASKS)


def _uniform_matrix(length: int, causal: bool, window: int, padding: int = 0) -> np.ndarray:
  """C [T, T] of a row: the softmax of equal scores under the mask."""
  slots = np.arange(length)
  distance = slots[:, None] - slots[None]
  seen = np.ones((length, length), bool)
  if causal:
    seen = (distance >= 0) & (distance < (window or length))
  seen &= slots[None] >= padding
  return seen / np.maximum(seen.sum(axis=1, keepdims=True), 1)


@EACH_MASK
@pytest.mark.parametrize('length', [1, 20, 300])
def test_uniform_attention_is_the_mean_of_visible_values(mask, length):
  causal, window = mask
  value = np.random.default_rng(0).normal(size=(2, length, 3, 4)).astype(np.float32)
  padding = np.array([0, length // 3]) * causal
  positions = np.arange(length)[None] - padding[:, None]
  got = jax.jit(lambda v: uniform_attention(v, positions, causal=causal, window=window))(value)
  for row, hidden in enumerate(padding):
    want = np.einsum('TS,SHK->THK', _uniform_matrix(length, causal, window, hidden), value[row])
    np.testing.assert_allclose(got[row, hidden:], want[hidden:], atol=1e-5)


def test_sums_over_windows_lose_no_digits_in_a_long_text():
  """Differences of sums over the whole text would be wrong by the rounding of these."""
  value = jnp.asarray(1000 + np.random.default_rng(0).normal(size=(1, 20_000, 2)), jnp.float32)
  got = jax.jit(lambda x: window_sums(x, 5))(value)[0, -1]
  np.testing.assert_allclose(got, np.float64(value[0, -5:]).sum(axis=0), rtol=3e-7)


def test_prefix_sums_of_bfloat16_are_float32():
  sums = jax.jit(prefix_sums)(jnp.ones((1, 3000, 1), jnp.bfloat16))
  np.testing.assert_array_equal(sums[0, :, 0], 1 + np.arange(3000), err_msg='a sum is rounded')


def _mixed(module: Attention, x: np.ndarray) -> np.ndarray:
  return np.asarray(jax.jit(lambda x: module(x)[0])(x))


def _shaped(causal: bool, window: int, gains: tuple[float, float, float]) -> ShapedAttention:
  """Shaped attention without values and positions, with the same gains in all heads."""
  nothing = NoProjectionConfig()
  model = with_mixer(
    tiny_model(dense=True, window=window),
    positions=NoPositionsConfig(),
    value=nothing,
    proj=nothing,
    shaped=True,
  )
  how = {'causal': causal, 'execution': Execution(), 'rngs': nnx.Rngs(0)}
  module = ShapedAttention(model.layer.mixer, model, **how)
  rng = np.random.default_rng(1)
  module.query.kernel[...] = jnp.asarray(rng.normal(size=(32, 32)) / 4, jnp.float32)
  for gain, value in zip(
    (module.identity_gain, module.attention_gain, module.uniform_gain), gains, strict=True
  ):
    gain[...] = jnp.full(4, value)
  return module


@EACH_MASK
def test_rows_of_shaped_attention_add_up_to_the_gains(mask):
  """If all values are equal, each position gets (α + β − γ) times the value."""
  module = _shaped(*mask, gains=(0.7, 0.4, 0.9))
  got = _mixed(module, np.ones((2, 20, 32), np.float32))
  np.testing.assert_allclose(got, 0.7 + 0.4 - 0.9, atol=1e-6)


@EACH_MASK
def test_shaped_attention_is_the_sum_of_its_three_parts(mask):
  x = np.float32(np.random.default_rng(0).normal(size=(2, 20, 32)))
  parts = {
    gains: _mixed(_shaped(*mask, gains=gains), x)
    for gains in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.7, 0.4, 0.9)]
  }
  np.testing.assert_allclose(parts[1, 0, 0], x, atol=1e-6, err_msg='α is not for the identity')
  heads = np.asarray(x).reshape(2, 20, 4, 8)
  mean = np.einsum('TS,BSHK->BTHK', _uniform_matrix(20, *mask), heads)
  np.testing.assert_allclose(parts[0, 0, 1], -mean.reshape(x.shape), atol=1e-5)
  want = 0.7 * parts[1, 0, 0] + 0.4 * parts[0, 1, 0] + 0.9 * parts[0, 0, 1]
  np.testing.assert_allclose(parts[0.7, 0.4, 0.9], want, atol=1e-5)
  if mask != MASKS['window of one']:
    assert np.abs(parts[0, 1, 0] + parts[0, 0, 1]).max() > 0.1, 'attention is uniform'


def test_padding_leaves_the_identity_at_the_start():
  """C is of the tokens that there are, so that A − C is 0 before training, in padded rows also."""
  module = _shaped(True, 0, (1, 1, 1))
  module.query.kernel[...] = jnp.zeros((32, 32))
  x = jax.random.normal(jax.random.key(0), (2, 20, 32))
  context = Context(0, jnp.array([0, 6]))
  got = jax.jit(lambda x: module(x, context)[0])(x)
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
