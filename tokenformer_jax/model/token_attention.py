"""The attention of a layer between its projections: positions, visible keys, and the cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.config import LengthScaleConfig
from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import kernels
from tokenformer_jax.model.positions import Rotary, far_apart, scale_by_length
from tokenformer_jax.model.trunk import Context

Cache = caches.KV | caches.Ring


@dataclasses.dataclass(frozen=True)
class TokenAttention:
  """Attention of a layer's queries to its keys, for whole texts and with a cache."""

  rotary: Rotary
  causal: bool  # whether a query sees only the keys up to its own
  window: int  # the number of keys that a causal query sees, up to its own; 0: all
  length_scale: LengthScaleConfig  # the factor of scores that grows with the length
  normalise: str = 'softmax'  # see `kernels.weigh`

  def mean_seen(self, length: int) -> float:
    """Return the number of positions that one of `length` sees, on average."""
    if not self.causal:
      return length
    window = min(self.window or length, length)
    return window - window**2 / (2 * length) if length else 0

  def scaled(self, query: jax.Array, positions_BxT: jax.Array, context: Context) -> jax.Array:
    """Return the queries [B, T, H, K] times the factor of `length_scale`.

    `positions_BxT` are those of the context.
    """
    seen = seen_keys(context.document_positions(positions_BxT), self.causal, self.window)
    return scale_by_length(self.length_scale, query, positions_BxT, seen)

  def cache(self, keys: Any, values: Any) -> Cache:
    """Return two arrays, or their logical axes, as the cache of this layer."""
    return (caches.Ring if self.window else caches.KV)(keys, values)

  def init_cache(
    self, batch: int, heads: int, length: int, widths: tuple[int, int], dtype: jnp.dtype
  ) -> Cache:
    """Return an empty cache for texts of up to `length` slots, or for the slots of the window.

    Slots include those of padding. `widths` are those of the heads of keys and of values.
    """
    slots = min(self.window, length) if self.window else length
    return self.cache(*(jnp.zeros((batch, heads, slots, width), dtype) for width in widths))

  def __call__(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context
  ) -> jax.Array:
    """Return the attention [B, T, H, K] of texts from their beginning, by XLA's own operations.

    Queries are scaled, and neither queries nor keys are rotated. Values may differ in K.
    """
    positions_BxT = context.positions(query.shape[1])
    far = far_apart(self.rotary, query, key)
    query, key = self.rotary(query, positions_BxT), self.rotary(key, positions_BxT)
    how = {'normalise': self.normalise, 'far': far}
    if not self.causal:
      return kernels.full_attention(query, key, value, context.padding_B, **how)
    how |= {'window': self.window, 'starts_BxT': context.starts_BxT}
    return kernels.causal_attention(query, key, value, context.padding_B, **how)

  def with_cache(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    context: Context,
    old: Cache,
    axes: caches.PairAxes = caches.HEADS,
  ) -> tuple[jax.Array, Cache, caches.View | None]:
    """Return the attention of the next T slots to all visible slots; see `__call__`.

    `old` holds the earlier slots, and `axes` are the logical axes of its arrays.

    Returns:
      The attention [B, T, H, K], the cache with the new slots, and the view of a cache that the
      queries see; None for a text from its beginning.
    """
    # With clipped distances the cache holds keys before rotation.
    positions_BxT = context.positions(query.shape[1])
    stored = key if self.rotary.clip else self.rotary(key, positions_BxT)
    new = caches.KV(stored.swapaxes(1, 2), value.swapaxes(1, 2))
    if context.is_beginning:
      return self(query, key, value, context), old.write(new, 0, axes), None
    kept, view = old.extend(new, context.start, axes)
    return self._attend_view(query, view, context), kept, view

  def _attend_view(self, query: jax.Array, view: caches.View, context: Context) -> jax.Array:
    """Return the attention to the keys of a cache."""
    far = None
    if self.rotary.clip:
      key = view.keys.swapaxes(1, 2)
      far = far_apart(self.rotary, query, key)
      far = far._replace(key=far.key.swapaxes(1, 2))
      padding_Bx1 = 0 if context.padding_B is None else context.padding_B[:, None]
      key = self.rotary(key, view.slots_S[None] - padding_Bx1)
      view = view._replace(keys=key.swapaxes(1, 2))
    query = self.rotary(query, context.positions(query.shape[1]))
    how = {'normalise': self.normalise, 'far': far}
    return kernels.attend_view(query, view, context, self.window, **how)


def seen_keys(positions_BxT: jax.Array, causal: bool, window: int) -> jax.Array:
  """Return the number of keys [B, T] that the queries at these positions of a document see.

  Positions are negative for padding; without `causal` they are those of whole texts. A `window` of
  0 is no limit.
  """
  if not causal:
    return jnp.broadcast_to(positions_BxT[:, -1:] + 1, positions_BxT.shape)
  seen_BxT = jnp.maximum(positions_BxT + 1, 1)
  return jnp.minimum(seen_BxT, window) if window else seen_BxT
