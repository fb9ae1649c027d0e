"""Shaped attention of Simplified Transformer Blocks: identity, attention and uniform attention."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig, SoftmaxConfig
from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import kernels, sequence
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.mixers.skips import SkipAttention
from tokenformer_jax.model.mixers.sums import document_sums, prefix_sums, window_sums
from tokenformer_jax.model.norm import gain
from tokenformer_jax.parallel.rules import parts


class SummedKV(NamedTuple):
  """Keys and values of every slot, and the sum [B, 1, H, K] of the values so far in float32."""

  kv: Any
  total: Any


class ShapedAttention(SkipAttention):
  """α V + β A V − γ C V, with gains for each head, attention A, and the mean C V of visible values.

  Noci et al. 2023 (arXiv 2306.17759). Queries start at zero, so A starts as C and the layer passes
  V on (He & Hofmann 2023, arXiv 2311.01906).
  """

  def __init__(self, config: SoftmaxConfig, model: ModelConfig, *, rngs: nnx.Rngs, **how: Any):
    super().__init__(config, model, rngs=rngs, **how)
    self.identity_gain = gain(rngs, heads=self.heads)  # α
    self.attention_gain = gain(rngs, heads=self.heads)  # β
    self.uniform_gain = gain(rngs, heads=self.heads)  # γ

  @staticmethod
  def zero_at_start(config: SoftmaxConfig) -> tuple[str, ...]:
    """Return the projections that start at zero: queries, and those with a skip."""
    return ('query', *SkipAttention.zero_at_start(config))

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return an empty cache; one of all slots also has the sum of their values."""
    empty = super().init_cache(batch, length, dtype)
    if isinstance(empty, caches.Ring):
      return empty
    return SummedKV(empty, jnp.zeros((batch, 1, self.heads, self.head_width), jnp.float32))

  def cache_axes(self) -> Any:
    """Return the logical axes of the arrays of the cache."""
    axes = super().cache_axes()
    if isinstance(axes, caches.Ring):
      return axes
    split = 'row_heads' if self.heads % parts('row_heads') == 0 else 'heads'
    return SummedKV(axes, ('batch', None, split, None))

  def mix(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context, cache: Any
  ) -> tuple[jax.Array, Any]:
    """Return α V + β A V − γ C V [B, T, H, K], and the cache with the new slots."""
    if cache is None:
      mixed, mean = self._of_rows(query, key, value, context)
    else:
      mixed, mean, cache = self._of_cache(query, key, value, context, cache)
    alpha, beta, gamma = (
      head_gain[...][None, None, :, None]
      for head_gain in (self.identity_gain, self.attention_gain, self.uniform_gain)
    )
    shaped = alpha * value.astype(jnp.float32) + beta * mixed.astype(jnp.float32) - gamma * mean
    return shaped.astype(value.dtype), cache

  def _of_rows(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    """Return A V and C V of whole rows."""
    attend = self.attend
    query, key = attend.encode(query, key, context)
    query, key, value = sequence.whole_rows(query, key, value)
    mixed = sequence.split_rows(attend.over_whole_rows(query, key, value, context), self.heads)
    positions_BxT = context.positions(value.shape[1])
    mean = uniform_attention(
      value,
      context.document_positions(positions_BxT),
      causal=attend.causal,
      window=attend.window,
      documents=context.starts_BxT is not None,
    )
    return mixed, sequence.split_rows(mean, self.heads)

  def _of_cache(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context, cache: Any
  ) -> tuple[jax.Array, jax.Array, Any]:
    """Return A V and C V of the next slots, and the cache with them."""
    attend, positions_BxT = self.attend, context.positions(value.shape[1])
    query, key = attend.encode(query, key, context)
    summed = isinstance(cache, SummedKV)
    old = cache.kv if summed else cache
    mixed, kept, view = attend.over_cache(query, key, value, context, old, self.key_axes)
    if summed:
      is_token = (positions_BxT >= 0)[..., None, None]
      sums = cache.total + prefix_sums(value * is_token.astype(value.dtype))
      mean = sums / jnp.maximum(positions_BxT + 1, 1)[..., None, None]
      return mixed, mean, SummedKV(kept, sums[:, -1:])
    if view is None:
      mean = uniform_attention(value, positions_BxT, causal=True, window=attend.window)
      return mixed, mean, kept
    seen = kernels.sees_view(view, context, value.shape[1], attend.window)
    weights = seen / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)
    mean = jnp.einsum('BHTS,BHSK->BTHK', weights.astype(jnp.float32), view.values)
    return mixed, mean, kept


def uniform_attention(
  value_BxTxHxK: jax.Array,
  positions_BxT: jax.Array,
  *,
  causal: bool,
  window: int = 0,
  documents: bool = False,
) -> jax.Array:
  """Return the mean C V of the values that each position sees, in float32.

  It equals softmax attention with equal scores, and takes no T × T array.

  Positions are [B, T], or [1, T] for all rows, and negative for padding, whose values do not count.
  With `causal` a position sees those up to its own, or the last `window` of them; 0: all. With
  `documents` rows hold several, positions are those in each, and a position sees only its own.
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
  if not documents:
    sums = window_sums(value_BxTxHxK, window) if window else prefix_sums(value_BxTxHxK)
  elif not window:
    sums = document_sums(value_BxTxHxK, positions_BxT)
  else:
    reaches = (positions_BxT < window - 1)[..., None, None]  # the beginning of the document
    of_window, of_document = (
      window_sums(value_BxTxHxK, window),
      document_sums(value_BxTxHxK, positions_BxT),
    )
    sums = jnp.where(reaches, of_document, of_window)
  return sums / count[..., None, None].astype(jnp.float32)
