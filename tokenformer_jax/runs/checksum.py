"""The checksum of an array, Σ bits · (2 · index + 1) mod 2³², and the digest of JSON.

The checksum is the same on every mesh, and any single flipped bit changes it. The bits of bfloat16
are those of the same number in float32, so an array that is stored in bfloat16 and read in float32
keeps its checksum.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LOST = 16  # bits of float32 that bfloat16 does not have
_CHUNK = 2**20  # numbers at a time


@jax.jit
def on_devices(array: jax.Array) -> jax.Array:
  """Return the checksum of an array, computed where the array is."""
  if array.ndim < 3:
    return _sum_of_bits(array, jnp.uint32(0))

  # Sum layer by layer to save memory: on a CPU XLA writes the products before it sums them.
  def add(i: jax.Array, total: jax.Array) -> jax.Array:
    layer = jax.lax.dynamic_index_in_dim(array, i, keepdims=False)
    return total + _sum_of_bits(layer, i.astype(jnp.uint32) * jnp.uint32(layer.size % 2**32))

  return jax.lax.fori_loop(0, array.shape[0], add, jnp.uint32(0))


def _sum_of_bits(array: jax.Array, first: jax.Array) -> jax.Array:
  bits = array
  if not jnp.issubdtype(array.dtype, jnp.integer):
    width = array.dtype.itemsize * 8
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{width}'))
  bits = bits.astype(jnp.uint32)
  if array.dtype == jnp.bfloat16:
    bits <<= _LOST
  index = jnp.full(array.shape, first)
  stride = 1
  for axis in reversed(range(array.ndim)):
    index += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= array.shape[axis]
  return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)


def of_chunks(chunks: Iterable[np.ndarray]) -> int:
  """Return the checksum of an array from its numbers in order, as `on_devices` computes it."""
  index, total = 0, 0
  for array in chunks:
    all_bits = np.ascontiguousarray(array).reshape(-1).view(f'uint{array.itemsize * 8}')
    for first in range(0, all_bits.size, _CHUNK):
      bits = all_bits[first : first + _CHUNK].astype(np.uint32)
      if array.dtype == jnp.bfloat16:
        bits <<= _LOST
      weights = np.arange(2 * index + 1, 2 * (index + bits.size), 2, dtype=np.uint64)
      total += int(np.sum(bits * weights.astype(np.uint32), dtype=np.uint32))
      index += bits.size
  return total % 2**32


def digest(content: Any) -> str:
  """Return the digest of JSON content."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
