"""Uniform attention, the mean of all values that a position sees: C of shaped attention.

It equals softmax attention with equal scores, and takes no T × T array.
"""

import jax
import jax.numpy as jnp

_CHUNK = 128  # positions whose prefix sums are one product with a triangular matrix


def uniform_attention(
  value_BxTxHxK: jax.Array, positions_BxT: jax.Array, *, causal: bool, window: int = 0
) -> jax.Array:
  """Return the mean of the values that each position sees, in float32.

  Positions are [B, T], or [1, T] for all rows, and negative for padding, whose values do not count.
  With `causal` a position sees those up to its own, or the last `window` of them; 0: all.
  """
  is_token = (positions_BxT >= 0)[..., None, None]
  value_BxTxHxK = value_BxTxHxK * is_token.astype(value_BxTxHxK.dtype)
  if not causal:
    count = jnp.sum(is_token, axis=1, keepdims=True)
    total = jnp.sum(value_BxTxHxK.astype(jnp.float32), axis=1, keepdims=True)
    return jnp.broadcast_to(total / count, value_BxTxHxK.shape)
  window = window if window < value_BxTxHxK.shape[1] else 0
  count = jnp.maximum(positions_BxT + 1, 1)
  count = jnp.minimum(count, window) if window else count
  sums = window_sums(value_BxTxHxK, window) if window else prefix_sums(value_BxTxHxK)
  return sums / count[..., None, None].astype(jnp.float32)


def prefix_sums(x: jax.Array) -> jax.Array:
  """Return the sums over the second axis up to each position, in float32, shape [B, T, …].

  Sums inside a chunk are a product with a triangular matrix, which the matrix unit computes; sums
  over chunks are few.
  """
  batch, length, *rest = x.shape
  chunk = min(_CHUNK, length)
  chunks_BxNxCxR = _split(x.reshape(batch, length, -1), chunk)
  within = jnp.einsum(
    'CS,BNSR->BNCR',
    jnp.tri(chunk, dtype=x.dtype),
    chunks_BxNxCxR,
    preferred_element_type=jnp.float32,
    precision='highest',
  )
  before_BxNxR = jnp.cumsum(within[:, :, -1], axis=1) - within[:, :, -1]
  sums = (within + before_BxNxR[:, :, None]).reshape(batch, -1, chunks_BxNxCxR.shape[-1])
  return sums[:, :length].reshape(batch, length, *rest)


def window_sums(x: jax.Array, window: int) -> jax.Array:
  """Return the sums over the last `window` positions up to each, in float32, shape [B, T, …].

  The window of a position is the beginning of its block of `window` positions and the end of the
  block before. So no sum is a difference of sums over the whole text, which would lose digits.
  """
  batch, length, *rest = x.shape
  blocks_BxNxWxR = _split(x.reshape(batch, length, -1), window)
  flat = blocks_BxNxWxR.reshape(-1, *blocks_BxNxWxR.shape[2:])
  beginnings = prefix_sums(flat).reshape(blocks_BxNxWxR.shape)
  ends = beginnings[:, :, -1:] - beginnings
  before = jnp.pad(ends[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
  sums = (beginnings + before).reshape(batch, -1, blocks_BxNxWxR.shape[-1])
  return sums[:, :length].reshape(batch, length, *rest)


def _split(x_BxTxR: jax.Array, size: int) -> jax.Array:
  """Return the array in parts of `size` positions, [B, N, size, R], filled with zeros."""
  batch, length, rest = x_BxTxR.shape
  filled = jnp.pad(x_BxTxR, ((0, 0), (0, -length % size), (0, 0)))
  return filled.reshape(batch, -1, size, rest)
