"""Pattention: attention between the input and learnable parameter tokens.

A TokenFormer has one wherever a Transformer has a linear projection (Wang et al. 2024,
arXiv 2410.23168, eq. 3-5). With keys K [N, D_in] and values V [N, D_out],

  Pattention(x) = Θ(x Kᵀ) V

where Θ is one of the score functions below. The number N of parameter tokens is free: it changes
neither the input's nor the output's width, which is how a trained model grows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.params import param
from tokenformer_jax.products import product
from tokenformer_jax.sharding import constrain

# Keeps a row of zeros finite; far below the rounding of any row that is not.
EPSILON = 1e-12

# Names of what the backward pass may find kept.
_SCORES, _ROW_NORM = 'pattention_scores', 'pattention_row_norm'


def activate(x: jax.Array, gelu: str) -> jax.Array:
  """GELU by the error function (`exact`) or by its `tanh` approximation, of the shape of x.

  `exact` is written with erf in float32: on a CPU that takes a third of the time of `jax.nn.gelu`,
  which goes through erfc to keep the relative error of results near 0, and on a TPU it is cheaper,
  too. The absolute error is one rounding of x.
  """
  if gelu == 'tanh':
    return jax.nn.gelu(x, approximate=True)
  x32 = x.astype(jnp.float32)
  return (0.5 * x32 * (1 + jax.lax.erf(x32 * jnp.sqrt(jnp.float32(0.5))))).astype(x.dtype)


def parameter_weights(
  scores_BxTxN: jax.Array,
  *,
  score: str = 'l2_norm_gelu',
  gelu: str = 'exact',
  reference_tokens: int,
  row_epsilon: float = 0.0,
) -> jax.Array:
  """Θ: the weight of every parameter token, from its score A.

  With τ² = `reference_tokens`, the number of tokens that the model was first trained with:

    l2_norm_gelu   GELU(τ A / ‖A‖₂)             TokenFormer (as released)
    gelu_l2_norm   τ GELU(A) / ‖GELU(A)‖₂       Table 4, GELU + L2 (as released)
    gelu_l1_norm   τ² GELU(A) / ‖GELU(A)‖₁      Table 4, GELU + L1
    softmax        τ² exp(A) / ‖exp(A)‖₁        Table 4, exp + L1 (as released)
    exp_l2_norm    τ exp(A) / ‖exp(A)‖₂         exp + L2

  τ is data and not the array's shape, so that tokens of score 0 can be added without changing the
  weights of the others (exactly so for the forms with GELU, for which a zero score has weight 0).

  Args:
    scores_BxTxN: x Kᵀ, in the dtype of the activations. Norms are summed in float32.
    score: the name of a form above.
    gelu: `exact` (by the error function) or `tanh`.
    reference_tokens: τ².
    row_epsilon: added to every norm, as the released TPU code does (1e-5).

  Returns:
    Weights of the shape and dtype of the scores.
  """
  dtype = scores_BxTxN.dtype
  if score == 'l2_norm_gelu':
    inverse = _inverse_l2(scores_BxTxN, reference_tokens, row_epsilon)
    return activate(scores_BxTxN * inverse.astype(dtype), gelu)
  if score in ('gelu_l2_norm', 'gelu_l1_norm'):
    weights = activate(scores_BxTxN, gelu)
  else:
    # A shift of a whole row cancels in the norm and keeps exp from overflowing.
    scores_BxTxN = scores_BxTxN.astype(jnp.float32)
    row_max = jax.lax.stop_gradient(jnp.max(scores_BxTxN, axis=-1, keepdims=True))
    weights = jnp.exp(scores_BxTxN - row_max)
  inverse = _inverse_l1 if score in ('gelu_l1_norm', 'softmax') else _inverse_l2
  return (weights * inverse(weights, reference_tokens, row_epsilon)).astype(dtype)


def _inverse_l2(rows: jax.Array, reference_tokens: int, epsilon: float) -> jax.Array:
  """τ / (‖row‖₂ + ε), in float32, with a last axis of 1."""
  square = jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=-1, keepdims=True) + EPSILON
  inverse = 1 / (jnp.sqrt(square) + epsilon) if epsilon else jax.lax.rsqrt(square)
  inverse = inverse * jnp.sqrt(jnp.float32(reference_tokens))
  return checkpoint_name(inverse, _ROW_NORM)


def _inverse_l1(rows: jax.Array, reference_tokens: int, epsilon: float) -> jax.Array:
  """τ² / (‖row‖₁ + ε), in float32, with a last axis of 1."""
  total = jnp.sum(jnp.abs(rows.astype(jnp.float32)), axis=-1, keepdims=True)
  return checkpoint_name(reference_tokens / (total + (epsilon or EPSILON)), _ROW_NORM)


def token_weights(x_BxTxI: jax.Array, keys_NxI: jax.Array, **how: Any) -> jax.Array:
  """Θ(x Kᵀ), [B, T, N] in the dtype of x; `how` is of `parameter_weights`."""
  scores_BxTxN = checkpoint_name(
    constrain(product('MI,NI->MN', x_BxTxI, keys_NxI), 'batch', None, 'param_tokens'),
    _SCORES,
  )
  return parameter_weights(scores_BxTxN, **how)


def pattention(
  x_BxTxI: jax.Array, keys_NxI: jax.Array, values_NxO: jax.Array, **how: Any
) -> jax.Array:
  """Θ(x Kᵀ) V, [B, T, O] in the dtype of x; `how` is of `parameter_weights`."""
  return product('MN,NO->MO', token_weights(x_BxTxI, keys_NxI, **how), values_NxO)


class Pattention(nnx.Module):
  """Pattention with its parameters: `keys` [N, D_in] and `values` [N, D_out]."""

  def __init__(
    self,
    d_in: int,
    d_out: int,
    *,
    param_tokens: int,
    reference_tokens: int,
    score: str,
    gelu: str,
    row_epsilon: float = 0.0,
    key_std: float,
    value_std: float,
    recompute: bool,
    rngs: nnx.Rngs,
  ):
    """Draws keys and values from normal distributions of the given standard deviations.

    Args:
      d_in: width of the input.
      d_out: width of the output.
      param_tokens: N, the number of parameter tokens.
      reference_tokens: τ², see `parameter_weights`.
      score: the score function's name.
      gelu: `exact` or `tanh`.
      row_epsilon: see `parameter_weights`.
      key_std: standard deviation of the keys.
      value_std: standard deviation of the values.
      recompute: compute the scores again in the backward pass, instead of keeping them. What is
        made of the scores is never kept.
      rngs: the stream `params` is used.
    """
    self.keys = param(
      rngs, nnx.initializers.normal(key_std), (param_tokens, d_in), ('param_tokens', 'width')
    )
    self.values = param(
      rngs, nnx.initializers.normal(value_std), (param_tokens, d_out), ('param_tokens', 'width')
    )
    self.how = {
      'score': score,
      'gelu': gelu,
      'reference_tokens': reference_tokens,
      'row_epsilon': row_epsilon,
    }
    self.recompute = recompute

  def weights(self, x_BxTxI: jax.Array) -> jax.Array:
    """[B, T, D_in] → the weight of every parameter token [B, T, N]."""
    return token_weights(x_BxTxI, self.keys[...], **self.how)

  def __call__(self, x_BxTxI: jax.Array) -> jax.Array:
    """[B, T, D_in] → [B, T, D_out]."""
    apply = functools.partial(pattention, **self.how)
    kept = (_ROW_NORM,) if self.recompute else (_ROW_NORM, _SCORES)
    policy = jax.checkpoint_policies.save_only_these_names(*kept)
    apply = jax.checkpoint(apply, prevent_cse=False, policy=policy)
    return apply(x_BxTxI, self.keys[...], self.values[...])
