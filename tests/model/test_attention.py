"""Softmax attention: the causal mask with and without a window, and the choice of a kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.kernels import attend, causal_attention, kernel
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.params import define


def _heads(seed: int, length: int = 6, dtype=np.float32) -> np.ndarray:
  """[B, T, H, K] with K = 8."""
  return np.random.default_rng(seed).normal(size=(2, length, 3, 8)).astype(dtype)


def _mask(length: int, window: int) -> np.ndarray:
  """Which keys each query sees, [T, T]."""
  everything_before = np.tri(length, dtype=bool)
  return everything_before & ~np.tri(length, k=-window, dtype=bool) if window else everything_before


def _softmax_attention(
  query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int = 0
) -> np.ndarray:
  """Causal attention in float64, all scores at once."""
  scores = np.einsum('BTHK,BSHK->BHTS', query, key) / np.sqrt(query.shape[-1])
  weights = np.exp(scores) * _mask(query.shape[1], window)
  return np.einsum('BHTS,BSHK->BTHK', weights / weights.sum(axis=-1, keepdims=True), value)


# Queries come in blocks of 128.
@pytest.mark.parametrize('length', [1, 128, 129, 300])
def test_attention_is_the_formula(length):
  arguments = [_heads(seed, length) for seed in range(3)]
  np.testing.assert_allclose(
    jax.jit(causal_attention)(*arguments),
    _softmax_attention(*(np.float64(a) for a in arguments)),
    atol=1e-5,
    err_msg='not softmax(Q Kᵀ / √K) V with the causal mask',
  )


# One position, less than a block, its edges, more than one, and more than there are.
@pytest.mark.parametrize('window', [1, 5, 127, 128, 129, 200, 1000])
def test_attention_in_a_window_is_the_formula(window):
  arguments = [_heads(seed, 300) for seed in range(3)]
  np.testing.assert_allclose(
    jax.jit(functools.partial(causal_attention, window=window))(*arguments),
    _softmax_attention(*(np.float64(a) for a in arguments), window=window),
    atol=1e-5,
    err_msg=f'a position does not attend to itself and the {window - 1} before it',
  )


@pytest.mark.parametrize('window', [5, 128])
def test_gradients_of_attention_in_a_window(window):
  arguments = [jnp.asarray(_heads(seed, 300)) for seed in range(3)]

  def plain(query, key, value):
    scores = jnp.einsum('BTHK,BSHK->BHTS', query, key) / jnp.sqrt(8)
    weights = jax.nn.softmax(jnp.where(_mask(300, window)[None, None], scores, -jnp.inf))
    return jnp.einsum('BHTS,BSHK->BTHK', weights, value)

  def gradients(attention):
    return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), argnums=(0, 1, 2)))

  got = gradients(functools.partial(causal_attention, window=window))(*arguments)
  for name, one, other in zip('qkv', got, gradients(plain)(*arguments), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5, err_msg=f'the gradient of {name}')


def test_attention_in_a_window_computes_less():
  shape = jax.ShapeDtypeStruct((1, 2048, 1, 64), jnp.float32)

  def scores(window: int) -> float:
    attention = jax.jit(functools.partial(causal_attention, window=window))
    return attention.lower(shape, shape, shape).cost_analysis()['flops']

  # Of 16 blocks of 128 queries each sees its own keys and at most 127 before, or all before.
  assert scores(128) < 2 / 8.5 * scores(0) * 1.05, 'blocks outside of the window are computed'


@pytest.mark.parametrize('window', [0, 1, 5, 20])
def test_cudnn_gets_the_window(window, monkeypatch):
  # JAX's own operations are the reference for its arguments: here is no GPU.
  asked = jax.nn.dot_product_attention
  monkeypatch.setattr(
    jax.nn, 'dot_product_attention', lambda *x, **how: asked(*x, **how | {'implementation': 'xla'})
  )
  arguments = [_heads(seed, 16) for seed in range(3)]
  np.testing.assert_allclose(
    attend(*map(jnp.asarray, arguments), causal=True, window=window, implementation='cudnn'),
    _softmax_attention(*(np.float64(a) for a in arguments), window=window),
    atol=1e-5,
    err_msg='cuDNN counts the positions of the window otherwise',
  )


def test_attention_is_compiled_in_few_blocks():
  shape = jax.ShapeDtypeStruct((1, 100_000, 1, 8), jnp.float32)
  jaxpr = str(jax.make_jaxpr(causal_attention)(shape, shape, shape))
  assert jaxpr.count('dot_general') <= 2 * 16, 'the time to compile grows with the length'


def test_scores_of_attention_are_float32():
  query, key, value = (_heads(seed, 200, jnp.bfloat16) for seed in range(3))
  query = 8 * query  # Scores up to 50, of which bfloat16 would keep no decimal.
  want = _softmax_attention(*(np.float64(a) for a in (query, key, value)))
  error = np.float64(jax.jit(causal_attention)(query, key, value)) - want
  rms = np.sqrt(np.mean(error**2))
  assert rms < 0.005, 'scores are rounded to bfloat16 before the softmax'


def _attend(
  x_TxD: jax.Array, start: int = 0, cached: float | None = None, window: int = 0
) -> jax.Array:
  """Attention with random parameters; `cached` fills all 12 positions of a cache."""
  model = tiny_model(window=window)
  definition = define(
    lambda rngs: Attention(model.layer.mixer, model, execution=Execution(), rngs=rngs)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), definition.abstract
  )
  attention, cache = definition.bind(params), None
  if cached is not None:
    cache = jax.tree.map(lambda c: c + cached, attention.init_cache(1, 12, jnp.float32))
  return attention(x_TxD[None], Context(start), cache)[0][0]


X_TxD = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)


@pytest.mark.parametrize(
  'options', [{}, {'start': 3, 'cached': 1.0}], ids=['alone', 'with a cache']
)
@pytest.mark.parametrize('window', [0, 3])
def test_attention_sees_itself_and_what_is_before(options, window):
  derivative = jax.jit(jax.jacobian(functools.partial(_attend, **options, window=window)))(X_TxD)
  seen_TxS = np.abs(derivative).max(axis=(1, 3)) > 0
  np.testing.assert_array_equal(
    seen_TxS, _mask(6, window), err_msg='the mask is not the causal one, or not in the window'
  )


def test_attention_with_a_cache_sees_what_is_cached():
  attend = jax.jit(functools.partial(_attend, start=3))
  changed = jnp.any(attend(X_TxD, cached=1.0) != attend(X_TxD, cached=-5.0), axis=-1)
  assert jnp.all(changed), 'attention ignores the positions before `start`'


def test_attention_with_a_cache_sees_no_empty_position():
  attend = jax.jit(functools.partial(_attend, start=0))
  np.testing.assert_array_equal(
    attend(X_TxD, cached=1.0),
    attend(X_TxD, cached=-5.0),
    err_msg='attention looks at positions that are not written yet',
  )


@pytest.mark.parametrize('name', ['auto', 'xla'])
def test_a_cpu_uses_xla(name):
  assert kernel(name, jnp.bfloat16) == 'xla', 'there is no cuDNN on a CPU'
