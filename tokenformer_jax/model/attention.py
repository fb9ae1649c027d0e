"""Token-token attention: rotary positions, masks and the choice of a kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tokenformer_jax.config import ModelConfig, RotaryConfig, SoftmaxConfig
from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import splash
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.layers import projection
from tokenformer_jax.model.trunk import FROM_START, NO_INPUTS, NOTHING, Aux, Context, Inputs
from tokenformer_jax.parallel import sharding
from tokenformer_jax.parallel.sharding import constrain

_QUERY_BLOCK = 128  # positions; blocks are longer where there would be more than …
_MOST_BLOCKS = 16
_MASKED = -1e30  # a score that softmax turns into 0


def rotary_width(head_width: int, fraction: float) -> int:
  """Return the number of rotated entries of a head, an even number."""
  return int(head_width * fraction) // 2 * 2


def rotate(x_BxTxHxK: jax.Array, positions_BxT: jax.Array, *, width: int, base: float) -> jax.Array:
  """Apply rotary position embedding to the first `width` entries of each head.

  Entries i and i + width/2 form a plane, rotated by position · base^(−2i/width). This is the
  half-split layout of GPT-NeoX (RoFormer, arXiv 2104.09864, eq. 15, with the number of rotated
  entries as the exponent's denominator). Angles are always float32. Positions may be [1, T].
  """
  head = x_BxTxHxK.shape[-1]
  entries = np.arange(width // 2)
  # A product with a matrix of 0 and ±1 swaps the entries of each plane, exactly. On a TPU this
  # small product costs far less than moving a few entries of every head.
  partner_KxK = np.zeros((head, head), np.float32)
  partner_KxK[entries + width // 2, entries] = -1
  partner_KxK[entries, entries + width // 2] = 1
  frequencies_K = np.zeros(head, np.float32)  # 0 for entries that are not rotated
  frequencies_K[:width] = np.tile(base ** (-2 * entries / width), 2)
  angles_BxTxK = positions_BxT.astype(jnp.float32)[..., None] * frequencies_K[None, None]
  cos_BxTx1xK, sin_BxTx1xK = (f(angles_BxTxK)[:, :, None] for f in (jnp.cos, jnp.sin))
  partners_BxTxHxK = jnp.einsum(
    'BTHK,KL->BTHL', x_BxTxHxK, partner_KxK.astype(x_BxTxHxK.dtype), precision='highest'
  )
  rotated = x_BxTxHxK.astype(jnp.float32) * cos_BxTx1xK
  rotated = rotated + partners_BxTxHxK.astype(jnp.float32) * sin_BxTx1xK
  return rotated.astype(x_BxTxHxK.dtype)


def causal_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  padding_B: jax.Array | None = None,
  *,
  window: int = 0,
) -> jax.Array:
  """Return causal softmax attention on [B, T, H, K] each, by XLA's own operations.

  Each block of queries skips the keys that none of its queries sees, and the backward pass
  recomputes the scores. On a CPU this takes half the time of `jax.nn.dot_product_attention`
  (benchmarks/attention.py). Softmax is in float32. No query sees the first `padding_B` keys of its
  row, nor keys `window` or more positions before it; `window` 0 sets no limit.
  """
  length = query.shape[1]
  block = max(_QUERY_BLOCK, -(-length // _MOST_BLOCKS))
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
  blocks = []
  for first in range(0, length, block):
    last = min(first + block, length)
    blocks.append(_attend_block(query, key, value, first, last, True, window, padding_B))
  return jnp.concatenate(blocks, axis=2).swapaxes(1, 2)


def full_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  """Return softmax attention of every position to all positions, by XLA's own operations."""
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
  return _attend_block(query, key, value, 0, query.shape[2], False, 0, None).swapaxes(1, 2)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4, 5, 6))
def _attend_block(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  first: int,
  last: int,
  causal: bool,
  window: int,
  padding_B: jax.Array | None,
) -> jax.Array:
  """Return the attention of the queries in [first, last) to the keys before `last`.

  Keys outside the first query's window are skipped. The arguments are the whole arrays, so that all
  blocks save the same three arrays for their backward passes.
  """
  first_key = max(0, first + 1 - window) if window else 0
  query = query[:, :, first:last]
  key, value = key[:, :, first_key:last], value[:, :, first_key:last]
  scores_BxHxCxS = jnp.einsum(
    'BHCK,BHSK->BHCS',
    query / jnp.sqrt(query.shape[-1]).astype(query.dtype),
    key,
    preferred_element_type=jnp.float32,
  )
  if causal:
    keys_S = jnp.arange(first_key, last)
    seen = _sees(jnp.arange(first, last), keys_S, window)[None, None]
    if padding_B is not None:
      seen = seen & (keys_S[None, :] >= padding_B[:, None])[:, None, None]
    scores_BxHxCxS = jnp.where(seen, scores_BxHxCxS, _MASKED)
  weights_BxHxCxS = jax.nn.softmax(scores_BxHxCxS)
  return jnp.einsum('BHCS,BHSK->BHCK', weights_BxHxCxS.astype(value.dtype), value)


def _sees(slots_T: jax.Array, keys_S: jax.Array, window: int) -> jax.Array:
  """Return the mask [T, S] of keys that the queries in these slots see (`SoftmaxConfig.window`)."""
  distances_TxS = slots_T[:, None] - keys_S[None, :]
  seen_TxS = distances_TxS >= 0
  return seen_TxS & (distances_TxS < window) if window else seen_TxS


def kernel(name: str, dtype: jnp.dtype, platform: str | None = None) -> str:
  """Return the kernel for `config.train.attention` on a platform, by default `sharding.platform()`.

  `auto` is `splash` on a TPU and `cudnn` (cuDNN's flash attention) on a GPU in bfloat16. Elsewhere
  it is `xla` (`causal_attention`).
  """
  platform = platform or sharding.platform()
  if name != 'auto':
    return name
  if platform == 'gpu' and dtype == jnp.bfloat16:
    return 'cudnn'
  return 'splash' if platform == 'tpu' else 'xla'


def usable_kernel(name: str, dtype: jnp.dtype, batch: int, length: int, heads: int) -> str:
  """Return `kernel(name, dtype)`, or `xla` if splash cannot compute these sizes (`splash.fits`)."""
  name = kernel(name, dtype)
  return name if name != 'splash' or splash.fits(batch, heads, length) else 'xla'


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  head_width: int | None = None,
  causal: bool,
  window: int = 0,
  implementation: str,
) -> jax.Array:
  """Return softmax attention on [B, T, H, K] each, computed by the `usable_kernel`.

  `window` is that of `SoftmaxConfig`, for causal attention. `head_width` is that of
  `splash.attention`, the only kernel that takes heads filled with zeros.
  """
  batch, length, heads, _ = query.shape
  name = usable_kernel(implementation, query.dtype, batch, length, heads)
  window = window if window < length else 0
  if name == 'cudnn':
    # JAX counts the positions left and right of a query without the query's own.
    local = (window - 1, 0) if window else None
    return jax.nn.dot_product_attention(
      query, key, value, is_causal=causal, local_window_size=local, implementation='cudnn'
    )
  if name == 'splash':
    return splash.attention(query, key, value, head_width=head_width, causal=causal, window=window)
  if causal:
    return causal_attention(query, key, value, window=window)
  return full_attention(query, key, value)


def _attend_view(
  query_BxTxHxK: jax.Array, view: caches.View, context: Context, window: int
) -> jax.Array:
  """Return the attention of the queries in slots `context.start` … to the keys in the view."""
  scores_BxHxTxS = jnp.einsum(
    'BTHK,BHSK->BHTS',
    query_BxTxHxK / jnp.sqrt(query_BxTxHxK.shape[-1]).astype(query_BxTxHxK.dtype),
    view.keys,
    preferred_element_type=jnp.float32,
  )
  queries_T = context.start + jnp.arange(query_BxTxHxK.shape[1])
  seen = _sees(queries_T, view.slots_S, window)[None, None]
  if context.padding_B is not None:
    seen = seen & (view.slots_S[None, :] >= context.padding_B[:, None])[:, None, None]
  weights_BxHxTxS = jax.nn.softmax(jnp.where(seen, scores_BxHxTxS, _MASKED))
  return jnp.einsum('BHTS,BHSK->BTHK', weights_BxHxTxS.astype(view.values.dtype), view.values)


class Attention(nnx.Module):
  """Multi-head softmax attention whose query, key, value and output are projections."""

  def __init__(
    self,
    config: SoftmaxConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    compute: Compute,
    rngs: nnx.Rngs,
  ):
    make = functools.partial(projection, model=model, compute=compute, rngs=rngs)
    into_heads, out_of_heads = ('width', 'heads'), ('heads', 'width')
    self.query, self.key, self.value = (make(config.qkv, axes=into_heads) for _ in range(3))
    self.proj = make(config.proj, axes=out_of_heads)
    self.heads, self.causal, self.window = config.heads, causal, config.window
    self.head_width = model.width // config.heads
    self.rotary_width, self.rotary_base = 0, 0.0
    if isinstance(rotary := config.positions, RotaryConfig):
      self.rotary_width = rotary_width(self.head_width, rotary.fraction)
      self.rotary_base = rotary.base
    self.implementation = compute.attention

  def length_flops(self, length: int) -> float:
    """Count the FLOPs of scores and weighted sums for one of `length` positions.

    Each visible position costs 4 · D (TokenFormer, Table 3). Under a causal mask a query sees on
    average T/2 positions, or W − W² / 2T with a window W < T.
    """
    seen = length
    if self.causal:
      window = min(self.window or length, length)
      seen = window - window**2 / (2 * length) if length else 0
    return 4 * self.heads * self.head_width * seen

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> caches.KV | caches.Ring:
    """Return an empty cache for texts of up to `length` slots, or for the slots of the window."""
    slots = min(self.window, length) if self.window else length
    empty = jnp.zeros((batch, self.heads, slots, self.head_width), dtype)
    return caches.Ring(empty, empty) if self.window else caches.KV(empty, empty)

  def cache_axes(self) -> caches.KV | caches.Ring:
    """Return the logical axes of the arrays of the cache."""
    kind = caches.Ring if self.window else caches.KV
    return kind(caches.AXES, caches.AXES)

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: caches.KV | caches.Ring | None = None,
    inputs: Inputs = NO_INPUTS,
  ) -> tuple[jax.Array, caches.KV | caches.Ring | None, Aux]:
    """Attend from the next T slots to all visible slots.

    Args:
      x_BxTxD: the input.
      context: the first slot and the padding.
      cache: keys and values of earlier slots; None if no later call continues from here.
      inputs: unused: this layer draws nothing.

    Returns:
      The output [B, T, D], the cache with the new slots, and an empty `Aux`.
    """
    del inputs
    padding_B = context.padding_B
    plain = cache is None and padding_B is None
    name = usable_kernel(self.implementation, x_BxTxD.dtype, *x_BxTxD.shape[:2], self.heads)
    filled = splash.filled(self.head_width) if plain and name == 'splash' else self.head_width
    query, key, value = (
      constrain(p(x_BxTxD, (self.heads, filled)), 'batch', None, 'heads', None)
      for p in (self.query, self.key, self.value)
    )
    if self.rotary_width:
      positions_BxT = context.positions(x_BxTxD.shape[1])
      turn = functools.partial(rotate, width=self.rotary_width, base=self.rotary_base)
      query, key = turn(query, positions_BxT), turn(key, positions_BxT)
    if cache is not None:
      new = caches.KV(key.swapaxes(1, 2), value.swapaxes(1, 2))
      if not context.is_beginning:
        cache, view = cache.extend(new, context.start)
        return self._project(_attend_view(query, view, context, self.window)), cache, NOTHING
      cache = cache.write(new, 0)
    if padding_B is not None:
      out_BxTxHxK = causal_attention(query, key, value, padding_B, window=self.window)
    else:
      out_BxTxHxK = attend(
        query,
        key,
        value,
        head_width=self.head_width,
        causal=self.causal,
        window=self.window,
        implementation=self.implementation,
      )
    return self._project(out_BxTxHxK), cache, NOTHING

  def _project(self, out_BxTxHxK: jax.Array) -> jax.Array:
    return self.proj(constrain(out_BxTxHxK, 'batch', None, 'heads', None))
