"""The checksum of an array, Σ bits · (2 · index + 1) mod 2³², and the digest of JSON.

The checksum is the same on every mesh, and any single flipped bit changes it.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
  index = jnp.full(array.shape, first)
  stride = 1
  for axis in reversed(range(array.ndim)):
    index += jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride % 2**32)
    stride *= array.shape[axis]
  return jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)


def on_host(array: np.ndarray) -> int:
  """Return the same checksum as `on_devices`, computed by NumPy in pieces."""
  bits, piece, total = array.reshape(-1).view(f'uint{array.itemsize * 8}'), 2**20, 0
  for first in range(0, bits.size, piece):
    part = bits[first : first + piece].astype(np.uint32)
    weights = np.arange(2 * first + 1, 2 * (first + part.size), 2, dtype=np.uint64)
    total += int(np.sum(part * weights.astype(np.uint32), dtype=np.uint32))
  return total % 2**32


def digest(content: Any) -> str:
  """Return the digest of JSON content."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
