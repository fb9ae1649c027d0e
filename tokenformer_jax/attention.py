"""Token-token attention: rotary positions, the causal mask, the key-value cache, the kernel."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.layers import projection
from tokenformer_jax.sharding import constrain


class Cache(NamedTuple):
  """Keys and values of the positions seen so far, [B, S, H, K]; in a model [L, B, S, H, K]."""

  keys: jax.Array
  values: jax.Array


def init_cache(config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> Cache:
  """An empty cache for `length` positions of every layer."""
  shape = (config.layers, batch, length, config.heads, config.width // config.heads)
  return Cache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def rotary_width(config: ModelConfig) -> int:
  """How many entries of each head are rotated: an even number."""
  return int(config.width // config.heads * config.rotary_fraction) // 2 * 2


def rotate(x_BxTxHxK: jax.Array, positions_T: jax.Array, *, width: int, base: float) -> jax.Array:
  """Rotary position embedding of the first `width` entries of each head.

  Entries i and i + width/2 form a plane, rotated by position · base^(−2i/width): the half-split
  layout of GPT-NeoX (RoFormer, arXiv 2104.09864, eq. 15, with rotated entries as the exponent's
  denominator). Angles are float32 whatever the activations are.
  """
  frequencies = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  angles_Tx1xR = jnp.outer(positions_T.astype(jnp.float32), frequencies)[:, None, :]
  cos, sin = jnp.cos(angles_Tx1xR)[None], jnp.sin(angles_Tx1xR)[None]
  first, second, rest = jnp.split(x_BxTxHxK, [width // 2, width], axis=-1)
  first32, second32 = first.astype(jnp.float32), second.astype(jnp.float32)
  rotated = (first32 * cos - second32 * sin, second32 * cos + first32 * sin)
  return jnp.concatenate([part.astype(x_BxTxHxK.dtype) for part in rotated] + [rest], axis=-1)


def kernel(name: str, dtype: jnp.dtype) -> str:
  """The implementation of `jax.nn.dot_product_attention` for `config.train.attention`.

  `auto` is cuDNN's flash attention on a GPU in bfloat16, and XLA's own operations elsewhere.
  """
  if name != 'auto':
    return name
  return 'cudnn' if jax.default_backend() == 'gpu' and dtype == jnp.bfloat16 else 'xla'


class Attention(nnx.Module):
  """Causal multi-head attention whose query, key, value and output are projections."""

  def __init__(self, config: ModelConfig, *, implementation: str, recompute: bool, rngs: nnx.Rngs):
    make = functools.partial(projection, config, recompute=recompute, rngs=rngs)
    self.query, self.key, self.value = make('qkv'), make('qkv'), make('qkv')
    self.proj = make('proj')
    self.heads = config.heads
    self.rotary_width = rotary_width(config) if config.positions == 'rotary' else 0
    self.rotary_base = config.rotary_base
    self.implementation = implementation

  def __call__(
    self, x_BxTxD: jax.Array, start: jax.Array | int = 0, cache: Cache | None = None
  ) -> tuple[jax.Array, Cache | None]:
    """Attends from positions start … start + T − 1.

    Args:
      x_BxTxD: the input.
      start: position of the first token; 0 without a cache.
      cache: keys and values of positions before `start`, or None if there are none.

    Returns:
      The output [B, T, D], and the cache with the new positions in it.
    """
    positions_T = start + jnp.arange(x_BxTxD.shape[1])
    query, key, value = (self._heads(p(x_BxTxD)) for p in (self.query, self.key, self.value))
    if self.rotary_width:
      turn = functools.partial(rotate, width=self.rotary_width, base=self.rotary_base)
      query, key = turn(query, positions_T), turn(key, positions_T)
    if cache is None:
      out_BxTxHxK = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        implementation=kernel(self.implementation, query.dtype),
      )
    else:
      cache = Cache(
        keys=jax.lax.dynamic_update_slice_in_dim(cache.keys, key, start, axis=1),
        values=jax.lax.dynamic_update_slice_in_dim(cache.values, value, start, axis=1),
      )
      seen_TxS = jnp.arange(cache.keys.shape[1])[None, :] <= positions_T[:, None]
      out_BxTxHxK = jax.nn.dot_product_attention(
        query, cache.keys, cache.values, mask=seen_TxS[None, None], implementation='xla'
      )
    out_BxTxHxK = constrain(out_BxTxHxK, 'batch', None, 'heads', None)
    return self.proj(out_BxTxHxK.reshape(x_BxTxD.shape)), cache

  def _heads(self, x_BxTxD: jax.Array) -> jax.Array:
    batch, length, width = x_BxTxD.shape
    x_BxTxHxK = x_BxTxD.reshape(batch, length, self.heads, width // self.heads)
    return constrain(x_BxTxHxK, 'batch', None, 'heads', None)
