"""The attention of a layer between its projections: positions, visible keys, and the cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.config import (
  GatedUnitConfig,
  PositionScaleConfig,
  RotaryConfig,
  SeenScaleConfig,
  SoftmaxConfig,
)
from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import kernels, sequence, splash
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.mixers.length_scale import LengthScaled
from tokenformer_jax.model.mixers.rerope import ClippedRotary
from tokenformer_jax.model.positions import Rotary

Cache = caches.KV | caches.Ring


def make_positions(
  config: SoftmaxConfig | GatedUnitConfig, head_width: int, causal: bool
) -> Rotary | LengthScaled:
  """Return how the queries and keys of a mixer depend on their positions."""
  positions, scale = config.positions, config.length_scale
  if isinstance(positions, RotaryConfig) and positions.clip:
    rotary = ClippedRotary(positions, head_width)
  else:
    rotary = Rotary(positions, head_width)
  if isinstance(scale, SeenScaleConfig | PositionScaleConfig):
    return LengthScaled(rotary, scale, causal, config.window)
  return rotary


@dataclasses.dataclass(frozen=True)
class TokenAttention:
  """Attention of queries to keys, by XLA's own operations, on devices that have whole rows.

  Arrays are [B, T, H, K], and caches [B, H, S, K]; values may differ in K.
  """

  positions: Rotary | LengthScaled
  causal: bool  # whether a query sees only the keys up to its own
  window: int  # the number of keys that a causal query sees, up to its own; 0: all
  weigh: kernels.Weigh = kernels.softmax

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    context: Context,
    cache: Cache | None = None,
    axes: caches.PairAxes = caches.HEADS,
  ) -> tuple[jax.Array, Cache | None]:
    """Attend from the next T slots to all visible slots.

    `cache` holds the earlier slots, and `axes` are the logical axes of its arrays; None: these are
    whole texts.

    Returns:
      The attention [B, T, H, K], and the cache with the new slots.
    """
    positions_BxT = context.positions(query.shape[1])
    query = self.positions.query(query, positions_BxT, context)
    key = self.positions.key(key, positions_BxT)
    if cache is None:
      return self.over_rows(query, key, value, context), None
    return self._over_cache(query, key, value, context, cache, axes)

  def over_rows(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context
  ) -> jax.Array:
    """Return the attention of encoded queries to the keys of the same whole texts."""
    positions_BxT = context.positions(value.shape[1])
    pair = self.positions.pairs(query, key, positions_BxT, positions_BxT)
    how = {'score': self.positions.score, 'weigh': self.weigh}
    if not self.causal:
      return kernels.full_attention(*pair, value, context.padding_B, **how)
    how |= {'window': self.window, 'starts_BxT': context.starts_BxT}
    return kernels.causal_attention(*pair, value, context.padding_B, **how)

  def _over_cache(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    context: Context,
    cache: Cache,
    axes: caches.PairAxes,
  ) -> tuple[jax.Array, Cache]:
    """Return the attention of encoded queries to a cache and the new keys, and the new cache."""
    new = caches.KV(key.swapaxes(1, 2), value.swapaxes(1, 2))
    if context.is_beginning:
      # Not by a kernel of a subclass: prompts are padded and of any length.
      mixed = TokenAttention.over_rows(self, query, key, value, context)
      return mixed, cache.write(new, 0, axes)
    kept, view = cache.extend(new, context.start, axes)
    padding_Bx1 = 0 if context.padding_B is None else context.padding_B[:, None]
    query, key = self.positions.pairs(
      query,
      view.keys.swapaxes(1, 2),
      context.positions(query.shape[1]),
      view.slots_S[None] - padding_Bx1,
    )
    keys = jax.tree.map(lambda x: x.swapaxes(1, 2), key)
    how = {'score': self.positions.score, 'weigh': self.weigh}
    mixed = kernels.attend_view(query, view._replace(keys=keys), context, self.window, **how)
    return mixed, kept

  def mean_seen(self, length: int) -> float:
    """Return the number of positions that one of `length` sees, on average."""
    if not self.causal:
      return length
    window = min(self.window or length, length)
    return window - window**2 / (2 * length) if length else 0

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelAttention(TokenAttention):
  """Softmax attention by the fastest kernel for whole texts, on devices that may split slots."""

  weigh: kernels.Softmax = kernels.softmax  # pyright: ignore[reportIncompatibleMethodOverride]
  head_width: int  # K without zeros that fill heads
  implementation: str  # see `kernels.kernel`

  def fits_kernel(self, context: Context) -> bool:
    """Return whether a kernel computes the scores of whole texts: products, without padding."""
    return self.positions.score is kernels.dot_product and context.padding_B is None

  def filled_width(self, x_BxTxD: jax.Array, heads: int, context: Context) -> int:
    """Return the width of the heads that projections should produce for whole texts."""
    if not self.fits_kernel(context):
      return self.head_width
    batch, length, _ = x_BxTxD.shape
    name = kernels.usable_kernel(self.implementation, x_BxTxD.dtype, batch, length, heads)
    return splash.filled(self.head_width) if name == 'splash' else self.head_width

  def over_rows(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context
  ) -> jax.Array:
    """Return the attention of slots that devices split; see `TokenAttention.over_rows`.

    Devices exchange slots for heads, or take the slots before their own for a narrow window.
    """
    fits, heads = self.fits_kernel(context), query.shape[2]
    if fits and (slots := sequence.halo(key, self.window)):
      return sequence.in_window(self._kernel, query, key, value, context.starts_BxT, slots)
    query, key, value = sequence.whole_rows(query, key, value)
    if fits:
      mixed = self._kernel(query, key, value, starts_BxT=context.starts_BxT)
    else:
      mixed = super().over_rows(query, key, value, context)
    return sequence.split_rows(mixed, heads)

  @property
  def _kernel(self) -> Any:
    return functools.partial(
      kernels.attend,
      head_width=self.head_width,
      causal=self.causal,
      window=self.window,
      weigh=self.weigh,
      implementation=self.implementation,
    )
