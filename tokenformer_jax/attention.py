"""Token-token attention: rotary positions, the causal mask, the key-value cache, the kernel."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.layers import projection
from tokenformer_jax.sharding import constrain

_QUERY_BLOCK = 128  # positions, or more so that there are at most …
_MOST_BLOCKS = 16
_MASKED = -1e30  # a score that softmax turns into 0


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


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  """Causal softmax attention by XLA's own operations, on [B, T, H, K] each.

  Blocks of queries leave out the keys that none of them sees, and scores are computed again in the
  backward pass instead of being kept: on a CPU this takes half the time of
  `jax.nn.dot_product_attention` (benchmarks/attention.py). Softmax is in float32.
  """
  length = query.shape[1]
  block = max(_QUERY_BLOCK, -(-length // _MOST_BLOCKS))
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
  blocks = []
  for first in range(0, length, block):
    last = min(first + block, length)
    blocks.append(_attend_block(query, key, value, first, last, True))
  return jnp.concatenate(blocks, axis=2).swapaxes(1, 2)


def full_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
  """Softmax attention of every position to all of them, computed in the same way."""
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
  return _attend_block(query, key, value, 0, query.shape[2], False).swapaxes(1, 2)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3, 4, 5))
def _attend_block(
  query: jax.Array, key: jax.Array, value: jax.Array, first: int, last: int, causal: bool
) -> jax.Array:
  """Attention of the queries from `first` to before `last` to the keys before `last`.

  The whole arrays come in, so that the blocks keep the same three for their backward passes.
  """
  query, key, value = query[:, :, first:last], key[:, :, :last], value[:, :, :last]
  scores_BxHxCxS = jnp.einsum(
    'BHCK,BHSK->BHCS',
    query / jnp.sqrt(query.shape[-1]).astype(query.dtype),
    key,
    preferred_element_type=jnp.float32,
  )
  if causal:
    positions_C = first + jnp.arange(query.shape[2])
    seen_CxS = jnp.arange(key.shape[2])[None, :] <= positions_C[:, None]
    scores_BxHxCxS = jnp.where(seen_CxS[None, None], scores_BxHxCxS, _MASKED)
  weights_BxHxCxS = jax.nn.softmax(scores_BxHxCxS)
  return jnp.einsum('BHCS,BHSK->BHCK', weights_BxHxCxS.astype(value.dtype), value)


def kernel(name: str, dtype: jnp.dtype) -> str:
  """The kernel for `config.train.attention`.

  `auto` is `cudnn`, cuDNN's flash attention, on a GPU in bfloat16; elsewhere it is `xla`,
  `causal_attention`.
  """
  if name != 'auto':
    return name
  return 'cudnn' if jax.default_backend() == 'gpu' and dtype == jnp.bfloat16 else 'xla'


class Attention(nnx.Module):
  """Multi-head attention whose query, key, value and output are projections."""

  def __init__(
    self,
    config: ModelConfig,
    *,
    causal: bool = True,
    implementation: str,
    recompute: bool,
    rngs: nnx.Rngs,
  ):
    make = functools.partial(projection, config, recompute=recompute, rngs=rngs)
    self.query, self.key, self.value = make('qkv'), make('qkv'), make('qkv')
    self.proj = make('proj')
    self.heads, self.causal = config.heads, causal
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
      if kernel(self.implementation, query.dtype) == 'cudnn':
        out_BxTxHxK = jax.nn.dot_product_attention(
          query, key, value, is_causal=self.causal, implementation='cudnn'
        )
      else:
        attend = causal_attention if self.causal else full_attention
        out_BxTxHxK = attend(query, key, value)
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
