"""Caches of mixers with scores: keys and values of all slots, or of the last slots in a ring.

Each cache is a NamedTuple of arrays [B, H, S, K]. Only its mixer makes and reads it; the decoding
code treats it as arrays with logical axes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.parallel.sharding import constrain

AXES: tuple[str | None, ...] = ('batch', 'row_heads', None, None)
PairAxes = tuple[tuple[str | None, ...], tuple[str | None, ...]]  # of keys and of values
HEADS: PairAxes = (AXES, AXES)
_WHOLE = ('batch', None, None, None)
WHOLE: PairAxes = (_WHOLE, _WHOLE)  # of heads that devices do not split
_NOT_WRITTEN = 2**30  # a slot number after every query, which masks the entry


class CacheView(NamedTuple):
  """Keys and values [B, H, S, K] that queries may see, and their slot numbers [S]."""

  keys: Any  # an array, or the pytree of arrays that a score takes
  values: jax.Array
  slots_S: jax.Array


class KV(NamedTuple):
  """Keys and values of every slot."""

  keys: jax.Array
  values: jax.Array

  def write(self, new: 'KV', start: jax.Array | int, axes: PairAxes = HEADS) -> 'KV':
    """Return the cache with new keys and values in the slots from `start` on."""

    def put(old: jax.Array, new: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
      return constrain(jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=2), *names)

    return KV(*map(put, self, new, axes))

  def extend(
    self, new: 'KV', start: jax.Array | int, axes: PairAxes = HEADS
  ) -> tuple['KV', CacheView]:
    """Return the cache with new keys and values, and the slots that their queries may see."""
    cache = self.write(new, start, axes)
    return cache, CacheView(*cache, jnp.arange(cache.keys.shape[2]))


class Ring(NamedTuple):
  """Keys and values of the last R slots; slot s is at index s mod R."""

  keys: jax.Array
  values: jax.Array

  def write(self, new: KV, start: jax.Array | int, axes: PairAxes = HEADS) -> 'Ring':
    """Return the cache with new keys and values in the slots from `start` on."""
    size, length = self.keys.shape[2], new.keys.shape[2]
    kept = min(size, length)

    def put(old: jax.Array, new: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
      if length == 1:
        written = jax.lax.dynamic_update_slice_in_dim(old, new, start % size, axis=2)
      else:
        index = (start + length - kept + jnp.arange(kept)) % size
        written = old.at[:, :, index].set(new[:, :, length - kept :], unique_indices=True)
      return constrain(written, *names)

    return Ring(*map(put, self, new, axes))

  def extend(
    self, new: KV, start: jax.Array | int, axes: PairAxes = HEADS
  ) -> tuple['Ring', CacheView]:
    """Return the cache with new keys and values, and the slots that their queries may see."""
    cache, length = self.write(new, start, axes), new.keys.shape[2]
    if length == 1:
      return cache, CacheView(*cache, self._slots(start))
    # The first new queries still see slots that the last new keys overwrite in the ring.
    slots_S = jnp.concatenate([self._slots(start - 1), start + jnp.arange(length)])
    keys, values = (
      constrain(jnp.concatenate([old, added], axis=2), *names)
      for old, added, names in zip(self, new, axes, strict=True)
    )
    return cache, CacheView(keys, values, slots_S)

  def _slots(self, last: jax.Array | int) -> jax.Array:
    """Return the slot number [R] at each index after slot `last` is written."""
    size = self.keys.shape[2]
    slots_R = last - (last - jnp.arange(size)) % size
    return jnp.where(slots_R < 0, _NOT_WRITTEN, slots_R)
