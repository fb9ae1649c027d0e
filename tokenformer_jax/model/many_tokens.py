"""The weights of many parameter tokens, with the gradient of their norm through KᵀK.

The score gradient then needs no sum over its row and no second read after it, which cost more than
products of D² numbers for each row (benchmarks/norm_cost.py).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.config.pattention import L2NormGELU
from tokenformer_jax.model import groups as groups_lib
from tokenformer_jax.model.gelu import EPSILON, activate_scaled, inverse_root, twice_slope
from tokenformer_jax.model.params import TOKEN_AXES
from tokenformer_jax.model.products import product
from tokenformer_jax.model.stack import ROW_STATISTICS, SCORES
from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.rules import shard_count
from tokenformer_jax.parallel.sharding import constrain

MANY = 8  # parameter tokens per device, in widths D of the input


def are_many(keys_NxI: jax.Array, x: jax.Array) -> bool:
  """Return whether the gradient of the scores' norm should go through KᵀK; never for heads."""
  return x.ndim == 3 and len(keys_NxI) >= MANY * shard_count('param_tokens') * x.shape[-1]


def weights_of_many(
  x_BxTxI: jax.Array, keys_NxI: jax.Array, reference: int, score: L2NormGELU
) -> jax.Array:
  """Return the weights [B, T, N] of one group of many tokens."""

  def on_device(x_BxTxI: jax.Array, keys_NxI: jax.Array) -> jax.Array:
    if per_device.is_split('param_tokens'):
      x_BxTxI = per_device.varying(x_BxTxI, 'param_tokens')
    return _weights_by_keys(x_BxTxI, keys_NxI, reference, score.gelu)

  keys_NxI = keys_NxI.astype(x_BxTxI.dtype)
  weights_BxTxN = per_device.on_each_device(
    on_device, x_BxTxI, keys_NxI, TOKEN_AXES, split_out=True
  )
  return constrain(weights_BxTxN, 'batch', 'slots', 'param_tokens')


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _weights_by_keys(
  x_BxTxI: jax.Array, keys_NxI: jax.Array, reference: int, gelu: str
) -> jax.Array:
  """Return GELU(τ A / ‖A‖₂) of A = x Kᵀ, with the gradient of the norm by x (KᵀK) xᵀ.

  So the score gradient needs no reduction over its row, and no part of the norm: with C, the
  gradient of what GELU sees, Σ C A over a row is x · (C K), and the rest works on D numbers a row.
  """
  return _by_keys_forward(x_BxTxI, keys_NxI, reference, gelu)[0]


def _by_keys_forward(
  x_BxTxI: jax.Array, keys_NxI: jax.Array, reference: int, gelu: str
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  scores_BxTxN = checkpoint_name(product('BTI,NI->BTN', x_BxTxI, keys_NxI), SCORES)
  square_BxTx1 = groups_lib.on_devices(reference).total(
    jnp.square(scores_BxTxN.astype(jnp.float32))
  )
  square_BxTx1 = checkpoint_name(square_BxTx1 + EPSILON, ROW_STATISTICS)
  scale_BxTx1 = inverse_root(square_BxTx1, jnp.float32(reference))
  weights_BxTxN = activate_scaled(scores_BxTxN.astype(jnp.float32), scale_BxTx1, gelu)
  kept = x_BxTxI, keys_NxI, scores_BxTxN, square_BxTx1
  return weights_BxTxN.astype(x_BxTxI.dtype), kept


def _by_keys_backward(
  reference: int,
  gelu: str,
  kept: tuple[jax.Array, ...],
  gradient_BxTxN: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  x_BxTxI, keys_NxI, scores_BxTxN, square_BxTx1 = kept
  dtype, x32_BxTxI = x_BxTxI.dtype, x_BxTxI.astype(jnp.float32)
  scale_BxTx1, to_square = jax.vjp(
    lambda square: inverse_root(square, jnp.float32(reference)), square_BxTx1
  )
  # Twice the gradient of what GELU sees. The half is a factor of each row below.
  slope_BxTxN = twice_slope(scores_BxTxN.astype(jnp.float32), scale_BxTx1, gelu)
  twice_BxTxN = (gradient_BxTxN.astype(jnp.float32) * slope_BxTxN).astype(dtype)
  by_keys_BxTxI = product('BTN,NI->BTI', twice_BxTxN, keys_NxI, preferred_element_type=jnp.float32)
  along_BxTx1 = 0.5 * jnp.sum(by_keys_BxTxI * x32_BxTxI, axis=-1, keepdims=True)
  if per_device.is_split('param_tokens'):
    along_BxTx1 = per_device.total(along_BxTx1, 'param_tokens')
  (d_square_BxTx1,) = to_square(along_BxTx1)
  turned_BxTxI = product(
    'BTI,IJ->BTJ', x_BxTxI, keys_NxI.T @ keys_NxI, preferred_element_type=jnp.float32
  )
  d_x_BxTxI = 0.5 * scale_BxTx1 * by_keys_BxTxI + 2 * d_square_BxTx1 * turned_BxTxI
  scaled_BxTxI = (0.5 * scale_BxTx1 * x32_BxTxI).astype(dtype)
  _, to_keys = jax.vjp(lambda keys: product('BTI,NI->BTN', scaled_BxTxI, keys), keys_NxI)
  of_norm_BxTxI = (2 * d_square_BxTx1 * x32_BxTxI).astype(dtype)
  (d_keys_NxI,) = to_keys(twice_BxTxN)
  d_keys_NxI = d_keys_NxI + keys_NxI @ jnp.einsum('BTI,BTJ->IJ', of_norm_BxTxI, x_BxTxI)
  return d_x_BxTxI.astype(dtype), d_keys_NxI


_weights_by_keys.defvjp(_by_keys_forward, _by_keys_backward)
