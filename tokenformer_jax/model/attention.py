"""Softmax attention: the mixer of TokenFormers and Transformers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import AsKeyConfig, ModelConfig, SoftmaxConfig, width_of_heads
from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import kernels
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import EMPTY_AUX, FROM_START, NO_INPUTS, Aux, Context, LayerInputs
from tokenformer_jax.model.norm import apply_norm, make_norm
from tokenformer_jax.model.projections import into_heads, projection
from tokenformer_jax.model.token_attention import KernelAttention, make_positions
from tokenformer_jax.parallel.rules import shard_count
from tokenformer_jax.parallel.sharding import constrain


class Attention(nnx.Module):
  """Multi-head softmax attention whose query, key, value and output are projections.

  A head of keys and values may serve several heads of queries (Ainslie et al. 2023, arXiv
  2305.13245). With fewer heads of keys than devices, each device has all of them.
  """

  joined: Any = None  # the projections of queries, keys and values in one: `joined.join`

  def __init__(
    self,
    config: SoftmaxConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    execution: Execution,
    rngs: nnx.Rngs,
  ):
    self.heads, self.key_heads = config.heads, config.key_heads
    self.head_width = width_of_heads(config, model.width)
    queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
    make = functools.partial(projection, model=model, execution=execution, rngs=rngs)
    heads_of = functools.partial(make, axes=('width', 'heads'))
    query_zero, value_zero = (name in self.zero_at_start(config) for name in ('query', 'value'))
    orthogonal = model.init.attention_kernels == 'orthogonal'
    self.query = heads_of(config.qkv, widths=(model.width, queries), starts_at_zero=query_zero)
    self.key = heads_of(config.qkv, widths=(model.width, keys))
    self.value = heads_of(
      config.qkv if isinstance(config.value, AsKeyConfig) else config.value,
      widths=(model.width, keys),
      starts_at_zero=value_zero,
      orthogonal=orthogonal,
    )
    self.proj = make(
      config.proj,
      axes=('heads', 'width'),
      widths=(queries, model.width),
      orthogonal=orthogonal,
    )
    form, is_joint = config.qk_norm.removesuffix('_joint'), config.qk_norm.endswith('_joint')
    self.query_norm, self.key_norm = (
      make_norm(form, model, head_width=self.head_width, heads=heads if is_joint else 0, rngs=rngs)
      for heads in (self.heads, self.key_heads)
    )
    # Kernels divide scores by the square root of the width of a head.
    self.query_scale = math.sqrt(self.head_width / (config.score_width or self.head_width))
    self.attend = KernelAttention(
      make_positions(config, self.head_width, causal),
      causal,
      config.window,
      weigh=kernels.Softmax(config.score_cap),
      head_width=self.head_width,
      implementation=execution.attention,
    )

  @staticmethod
  def zero_at_start(config: SoftmaxConfig) -> tuple[str, ...]:
    """Return the projections that start at zero."""
    del config
    return ()

  def length_flops(self, length: int) -> float:
    """Count the FLOPs of scores and weighted sums for one of `length` positions.

    Each visible position costs 4 · D (TokenFormer, Table 3). Under a causal mask a query sees on
    average T/2 positions, or W − W² / 2T with a window W < T.
    """
    return 4 * self.heads * self.head_width * self.attend.mean_seen(length)

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return an empty cache for texts of up to `length` slots, or for the slots of the window."""
    widths = (self.head_width, self.head_width)
    return self.attend.init_cache(batch, self.key_heads, length, widths, dtype)

  def cache_axes(self) -> Any:
    """Return the logical axes of the arrays of the cache."""
    return self.attend.cache(*self.key_axes)

  @property
  def key_axes(self) -> caches.PairAxes:
    """The logical axes of cached keys and of cached values."""
    return caches.HEADS if self.key_heads % shard_count('row_heads') == 0 else caches.WHOLE

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: Any = None,
    inputs: LayerInputs = NO_INPUTS,
  ) -> tuple[jax.Array, Any, Aux]:
    """Attend from the next T slots to all visible slots.

    `cache` holds the earlier slots; None if no later call continues from here. `inputs` is unused:
    this layer draws nothing.

    Returns:
      The output [B, T, D], the cache with the new slots, and an empty `Aux`.
    """
    del inputs
    # A kernel may want heads filled with zeros, which would change a norm over their entries.
    width = self.head_width
    if cache is None and self.query_norm is None:
      width = self.attend.filled_width(x_BxTxD, self.heads, context)
    query, key, value = self.project(x_BxTxD, width)
    query, key = apply_norm(self.query_norm, query), apply_norm(self.key_norm, key)
    query = query if self.query_scale == 1 else query * self.query_scale
    key_axis = 'heads' if self.key_heads % shard_count('heads') == 0 else None
    query = constrain(query, 'batch', 'slots', 'heads', None)
    key, value = (constrain(x, 'batch', 'slots', key_axis, None) for x in (key, value))
    mixed, cache = self.mix(query, key, value, context, cache)
    return self.proj(constrain(mixed, 'batch', 'slots', 'heads', None)), cache, EMPTY_AUX

  def project(self, x_BxTxD: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries [B, T, H, `width`], keys and values [B, T, G, `width`], filled with zeros."""
    own = (self.key_heads, width)
    query, key, value = into_heads(self, x_BxTxD, ((self.heads, width), own, own))
    return query, key, value

  def mix(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context, cache: Any
  ) -> tuple[jax.Array, Any]:
    """Return the values mixed by attention [B, T, H, K], and the cache with the new slots."""
    return self.attend(query, key, value, context, cache, self.key_axes)
