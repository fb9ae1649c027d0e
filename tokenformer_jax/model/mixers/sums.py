"""Sums over the positions before each: of a whole row, of a document, and of a window."""

import jax
import jax.numpy as jnp

_CHUNK = 128  # positions whose prefix sums are one product with a triangular matrix


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


def document_sums(x: jax.Array, positions_BxT: jax.Array) -> jax.Array:
  """Return the sums over each document up to each position, in float32, shape [B, T, …].

  `positions_BxT` are those in each document. See `prefix_sums`; no sum is a difference of sums over
  several documents, which would lose digits.
  """
  batch, length = x.shape[:2]
  chunk = min(_CHUNK, length)
  chunks_BxNxCxR = _split(x.reshape(batch, length, -1), chunk)
  positions_BxNxC = _split(positions_BxT[..., None], chunk)[..., 0]
  seen_BxNxCxS, begins_before_BxNxC = seen_in_chunk(positions_BxNxC)
  within = jnp.einsum(
    'BNCS,BNSR->BNCR',
    seen_BxNxCxS.astype(x.dtype),
    chunks_BxNxCxR,
    preferred_element_type=jnp.float32,
    precision='highest',
  )

  def add(before_BxR: jax.Array, chunk: tuple[jax.Array, jax.Array]):
    last_BxR, goes_on_B = chunk
    return last_BxR + before_BxR * goes_on_B[:, None], before_BxR

  before_BxNxC = begins_before_BxNxC.astype(jnp.float32)
  chunks = (within[:, :, -1].swapaxes(0, 1), before_BxNxC[:, :, -1].swapaxes(0, 1))
  _, before_NxBxR = jax.lax.scan(add, jnp.zeros_like(within[:, 0, -1]), chunks)
  sums = within + before_NxBxR.swapaxes(0, 1)[:, :, None] * before_BxNxC[..., None]
  return sums.reshape(batch, -1, chunks_BxNxCxR.shape[-1])[:, :length].reshape(x.shape)


def seen_in_chunk(positions_xC: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return which keys of a chunk of a row its queries see, and whether they see earlier ones.

  Args:
    positions_xC: positions in the document, [B, …, C].

  Returns:
    The mask of queries and keys, bool [B, …, C, C], and bool [B, …, C].
  """
  size = positions_xC.shape[-1]
  distance_CxS = jnp.arange(size)[:, None] - jnp.arange(size)[None]
  leading = (None,) * (positions_xC.ndim - 1)
  distance_xCxS, first_xC = distance_CxS[leading], jnp.arange(size)[leading]
  seen_xCxS = (distance_xCxS >= 0) & (distance_xCxS <= positions_xC[..., None])
  return seen_xCxS, positions_xC > first_xC


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
