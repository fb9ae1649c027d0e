"""Softmax attention: the causal mask with and without a window, and what is computed for it.

Its gradients are tested in test_documents.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenformer_jax.model.kernels import causal_attention


def _heads(seed: int, length: int = 6, dtype=np.float32) -> np.ndarray:
  """[B, T, H, K] with K = 8."""
  return np.random.default_rng(seed).normal(size=(2, length, 3, 8)).astype(dtype)


def _softmax_attention(
  query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int = 0
) -> np.ndarray:
  """Causal attention in float64, all scores at once."""
  scores = np.einsum('BTHK,BSHK->BHTS', query, key) / np.sqrt(query.shape[-1])
  seen = np.tri(query.shape[1])
  if window:
    seen -= np.tri(query.shape[1], k=-window)
  weights = np.exp(scores) * seen
  return np.einsum('BHTS,BSHK->BTHK', weights / weights.sum(axis=-1, keepdims=True), value)


# Queries come in blocks of 128. One position, and more than a block.
@pytest.mark.parametrize(
  ('length', 'window'),
  [(1, 0), (300, 0), *((300, window) for window in (1, 129, 1000))],
)
def test_attention_is_the_formula(length, window):
  arguments = [_heads(seed, length) for seed in range(3)]
  np.testing.assert_allclose(
    jax.jit(functools.partial(causal_attention, window=window))(*arguments),
    _softmax_attention(*(np.float64(a) for a in arguments), window=window),
    atol=1e-5,
    err_msg=f'a position does not attend to itself and the {window - 1} before it',
  )


def test_attention_in_a_window_computes_less():
  shape = jax.ShapeDtypeStruct((1, 1024, 1, 64), jnp.float32)

  def scores(window: int) -> float:
    attention = jax.jit(functools.partial(causal_attention, window=window))
    return attention.lower(shape, shape, shape).cost_analysis()['flops']

  # Of 8 blocks of 128 queries each sees its own keys and at most 127 before, or all before.
  assert scores(128) < 2 / 4.5 * scores(0) * 1.05, 'blocks outside of the window are computed'


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
