"""Softmax attention: the mixer of TokenFormers, Transformers and Simplified Transformer Blocks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import AsKeyConfig, ModelConfig, SoftmaxConfig, width_of_heads
from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import kernels, sequence
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.layers import gain, gained, out_of_heads, projection
from tokenformer_jax.model.norm import Norm, normed
from tokenformer_jax.model.positions import Rotary
from tokenformer_jax.model.token_attention import TokenAttention
from tokenformer_jax.model.trunk import EMPTY_AUX, FROM_START, NO_INPUTS, Aux, Context, Inputs
from tokenformer_jax.parallel.rules import parts
from tokenformer_jax.parallel.sharding import constrain


class SummedKV(NamedTuple):
  """Keys and values of every slot, and the sum [B, 1, H, K] of the values so far in float32."""

  kv: caches.KV
  total: jax.Array


Cache = caches.KV | caches.Ring | SummedKV


class Attention(nnx.Module):
  """Multi-head softmax attention whose query, key, value and output are projections.

  A head of keys and values may serve several heads of queries (Ainslie et al. 2023, arXiv
  2305.13245). With fewer heads of keys than devices, each device has all of them.

  Without a value projection the value is the input, and without an output projection the heads are
  the output. Shaped attention (Noci et al. 2023, arXiv 2306.17759) is α V + β A V − γ C V, with
  gains for each head, the attention A, and the mean C V of the visible values. Queries start at
  zero, so A starts as C and the layer passes V on (He & Hofmann 2023, arXiv 2311.01906).
  """

  def __init__(
    self,
    config: SoftmaxConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    compute: Compute,
    rngs: nnx.Rngs,
  ):
    self.heads, self.key_heads = config.heads, config.key_heads
    self.head_width = width_of_heads(config, model.width)
    into_query, into_key = (
      (model.width, heads * self.head_width) for heads in (self.heads, self.key_heads)
    )
    make = functools.partial(projection, model=model, compute=compute, rngs=rngs)
    into_heads = ('width', 'heads')
    orthogonal = model.init.attention_kernels == 'orthogonal'
    self.query = make(config.qkv, axes=into_heads, widths=into_query, starts_at_zero=config.shaped)
    self.key = make(config.qkv, axes=into_heads, widths=into_key)
    value = config.qkv if isinstance(config.value, AsKeyConfig) else config.value
    self.value = make(
      value,
      axes=into_heads,
      widths=into_key,
      starts_at_zero=config.value_skip,
      orthogonal=orthogonal,
    )
    self.proj = make(
      config.proj,
      axes=('heads', 'width'),
      widths=into_query[::-1],
      starts_at_zero=config.proj_skip,
      orthogonal=orthogonal,
    )
    has_norm = config.qk_norm != 'none'
    norm = functools.partial(Norm, config.qk_norm, model, head_width=self.head_width, rngs=rngs)
    self.query_norm, self.key_norm = (norm(), norm()) if has_norm else (None, None)
    # The output is g₁ h + g₂ proj(h) of the heads h.
    self.heads_gain, self.proj_gain = (gain(rngs), gain(rngs)) if config.proj_skip else (None, None)
    # V = g₁ x + g₂ value(x)
    self.input_gain, self.value_gain = (
      (gain(rngs), gain(rngs)) if config.value_skip else (None, None)
    )
    heads = config.heads if config.shaped else 0
    self.identity_gain = gain(rngs, heads=heads) if heads else None  # α
    self.attention_gain = gain(rngs, heads=heads) if heads else None  # β
    self.uniform_gain = gain(rngs, heads=heads) if heads else None  # γ
    self.shaped = config.shaped
    rotary = Rotary(config.positions, self.head_width)
    self.attend = TokenAttention(rotary, causal, config.window, config.length_scale)
    self.implementation = compute.attention

  def length_flops(self, length: int) -> float:
    """Count the FLOPs of scores and weighted sums for one of `length` positions.

    Each visible position costs 4 · D (TokenFormer, Table 3). Under a causal mask a query sees on
    average T/2 positions, or W − W² / 2T with a window W < T.
    """
    return 4 * self.heads * self.head_width * self.attend.mean_seen(length)

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
    """Return an empty cache for texts of up to `length` slots, or for the slots of the window."""
    widths = (self.head_width, self.head_width)
    empty = self.attend.init_cache(batch, self.key_heads, length, widths, dtype)
    if not self.shaped or isinstance(empty, caches.Ring):
      return empty
    total = jnp.zeros((batch, 1, self.heads, self.head_width), jnp.float32)
    return SummedKV(empty, total)

  def cache_axes(self) -> Cache:
    """Return the logical axes of the arrays of the cache."""
    axes = self.attend.cache(*self._pair_axes())
    if not self.shaped or isinstance(axes, caches.Ring):
      return axes
    split = 'row_heads' if self.heads % parts('row_heads') == 0 else 'heads'
    return SummedKV(axes, ('batch', None, split, None))

  def _pair_axes(self) -> caches.PairAxes:
    """Return the logical axes of cached keys and values."""
    return caches.HEADS if self.key_heads % parts('row_heads') == 0 else caches.WHOLE

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: Cache | None = None,
    inputs: Inputs = NO_INPUTS,
  ) -> tuple[jax.Array, Cache | None, Aux]:
    """Attend from the next T slots to all visible slots.

    `cache` holds the earlier slots; None if no later call continues from here. `inputs` is unused:
    this layer draws nothing.

    Returns:
      The output [B, T, D], the cache with the new slots, and an empty `Aux`.
    """
    del inputs
    length = x_BxTxD.shape[1]
    positions_BxT = context.positions(length)
    attend, rotary = self.attend, self.attend.rotary
    plain = cache is None and context.padding_B is None and not rotary.clip
    name = kernels.usable_kernel(
      self.implementation, x_BxTxD.dtype, x_BxTxD.shape[0], length, self.heads
    )
    # A norm over the entries of a head does not count zeros that fill it.
    fills = plain and self.query_norm is None
    filled = kernels.filled_width(name, self.head_width) if fills else self.head_width
    of_keys = 'heads' if self.key_heads % parts('heads') == 0 else None
    query, key, value = (
      constrain(heads, 'batch', 'slots', axis, None)
      for heads, axis in (
        (normed(self.query_norm, self.query(x_BxTxD, (self.heads, filled))), 'heads'),
        (normed(self.key_norm, self.key(x_BxTxD, (self.key_heads, filled))), of_keys),
        (self._value(x_BxTxD, filled), of_keys),
      )
    )
    query = attend.scaled(query, positions_BxT, context)
    if cache is not None:
      return self._with_cache(query, key, value, context, cache)
    if plain:
      query, key = rotary(query, positions_BxT), rotary(key, positions_BxT)
      kernel = functools.partial(
        kernels.attend,
        head_width=self.head_width,
        causal=attend.causal,
        window=attend.window,
        implementation=self.implementation,
      )
      if not self.shaped and (halo := sequence.halo(key, attend.window)):
        mixed = sequence.in_window(kernel, query, key, value, context.starts_BxT, halo)
        return self._output(value, mixed, None), None, EMPTY_AUX
    query, key, row_value = sequence.whole_rows(query, key, value)
    if plain:
      mixed = kernel(query, key, row_value, starts_BxT=context.starts_BxT)
    else:
      mixed = attend(query, key, row_value, context)
    mixed, mean = sequence.split_rows(mixed, self.heads), None
    if self.shaped:
      mean = kernels.uniform_attention(
        row_value,
        context.document_positions(positions_BxT),
        causal=attend.causal,
        window=attend.window,
        documents=context.starts_BxT is not None,
      )
      mean = sequence.split_rows(mean, self.heads)
    return self._output(value, mixed, mean), None, EMPTY_AUX

  def _value(self, x_BxTxD: jax.Array, filled: int) -> jax.Array:
    """Return the values as heads [B, T, H, `filled`], filled with zeros."""
    if self.value is not None and self.input_gain is None:
      return self.value(x_BxTxD, (self.key_heads, filled))
    x_BxTxHxK = x_BxTxD.reshape(*x_BxTxD.shape[:2], self.heads, self.head_width)
    x_BxTxHxK = jnp.pad(x_BxTxHxK, ((0, 0),) * 3 + ((0, filled - self.head_width),))
    if self.value is None:
      return x_BxTxHxK
    projected = self.value(x_BxTxD, (self.heads, filled))
    return gained(self.input_gain, x_BxTxHxK) + gained(self.value_gain, projected)

  def _with_cache(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context, cache: Cache
  ) -> tuple[jax.Array, Cache, Aux]:
    """Return the results of `__call__` for heads and a cache."""
    positions_BxT = context.positions(query.shape[1])
    old = cache.kv if isinstance(cache, SummedKV) else cache
    mixed, kept, view = self.attend.with_cache(query, key, value, context, old, self._pair_axes())
    if not self.shaped:
      return self._output(value, mixed, None), kept, EMPTY_AUX
    if isinstance(cache, SummedKV):
      is_token = (positions_BxT >= 0)[..., None, None]
      sums = cache.total + kernels.prefix_sums(value * is_token.astype(value.dtype))
      mean = sums / jnp.maximum(positions_BxT + 1, 1)[..., None, None]
      return self._output(value, mixed, mean), SummedKV(kept, sums[:, -1:]), EMPTY_AUX
    if view is None:
      mean = kernels.uniform_attention(value, positions_BxT, causal=True, window=self.attend.window)
    else:
      seen = kernels.sees_view(view, context, query.shape[1], self.attend.window)
      weights = seen / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)
      mean = jnp.einsum('BHTS,BHSK->BTHK', weights.astype(jnp.float32), view.values)
    return self._output(value, mixed, mean), kept, EMPTY_AUX

  def _output(self, value: jax.Array, mixed: jax.Array, mean: jax.Array | None) -> jax.Array:
    """Return the output [B, T, D] for values V, attention A V and uniform attention C V."""
    if self.shaped:
      alpha, beta, gamma = (
        head_gain[...][None, None, :, None]
        for head_gain in (self.identity_gain, self.attention_gain, self.uniform_gain)
      )
      shaped = alpha * value.astype(jnp.float32) + beta * mixed.astype(jnp.float32) - gamma * mean
      mixed = shaped.astype(value.dtype)
    projected = gained(self.proj_gain, out_of_heads(self.proj, mixed, self.head_width))
    if self.heads_gain is None:
      return projected
    return gained(self.heads_gain, out_of_heads(None, mixed, self.head_width)) + projected
