"""Token-token attention of queries, keys and values: masks, and the choice of a kernel."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import splash
from tokenformer_jax.model.layer import Context
from tokenformer_jax.parallel import sharding
from tokenformer_jax.parallel.rules import shard_count

_QUERY_BLOCK = 128  # query positions per block, raised so that there are at most …
_MOST_BLOCKS = 16
_MASKED = -1e30  # a score that softmax turns into 0

# (queries, keys, slots of the queries [T] and of the keys [S], letters of `jnp.einsum`) → float32
# scores [B, H, T, S]. Queries and keys are arrays, or pytrees of arrays of the same shape.
Score = Callable[[Any, Any, jax.Array, jax.Array, str], jax.Array]
# (scores, a mask of the visible keys that broadcasts to them or None) → float32 weights of the keys
Weigh = Callable[[jax.Array, jax.Array | None], jax.Array]


def dot_product(
  query: jax.Array, key: jax.Array, queries_T: jax.Array, keys_S: jax.Array, letters: str
) -> jax.Array:
  """Return q · k / √K in float32: a `Score`."""
  del queries_T, keys_S
  query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  return _by_head(letters, query, key, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Softmax:
  """exp(a) / Σ exp(a) of scores a, or of cap · tanh(a / cap): a `Weigh`."""

  cap: float = 0.0

  def __call__(self, scores: jax.Array, seen: jax.Array | None) -> jax.Array:
    scores = soft_cap(scores, self.cap)
    return jax.nn.softmax(scores if seen is None else jnp.where(seen, scores, _MASKED))


softmax = Softmax()


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
  """Return cap · tanh(x / cap), which keeps small numbers (Gemma 2); x itself for a cap of 0."""
  return cap * jnp.tanh(x / cap) if cap else x


def causal_attention(
  query: Any,
  key: Any,
  value: jax.Array,
  padding_B: jax.Array | None = None,
  *,
  window: int = 0,
  starts_BxT: jax.Array | None = None,
  score: Score = dot_product,
  weigh: Weigh = softmax,
) -> jax.Array:
  """Return causal attention on [B, T, H, K] each, by XLA's own operations; values may differ in K.

  Keys and values may have fewer heads: each serves equally many heads of queries.

  Each block of queries skips the keys that none of its queries sees, and the backward pass
  recomputes the scores. On a CPU this takes half the time of `jax.nn.dot_product_attention`
  (benchmarks/attention.py). Weights are float32.

  No query sees the first `padding_B` keys of its row. With a `window` W > 0 a query sees W keys, up
  to its own. With `starts_BxT` it sees none before this slot: the documents of `Context`.
  """
  length = value.shape[1]
  block = max(_QUERY_BLOCK, -(-length // _MOST_BLOCKS))
  query, key, value = _heads_first(query, key, value)
  blocks = []
  for first in range(0, length, block):
    last = min(first + block, length)
    static = (first, last, True, window, score, weigh)
    blocks.append(_attend_block(query, key, value, padding_B, starts_BxT, static))
  return jnp.concatenate(blocks, axis=2).swapaxes(1, 2)


def full_attention(
  query: Any,
  key: Any,
  value: jax.Array,
  padding_B: jax.Array | None = None,
  *,
  score: Score = dot_product,
  weigh: Weigh = softmax,
) -> jax.Array:
  """Return the attention of every position to all; for the rest see `causal_attention`."""
  query, key, value = _heads_first(query, key, value)
  static = (0, value.shape[2], False, 0, score, weigh)
  return _attend_block(query, key, value, padding_B, None, static).swapaxes(1, 2)


def _heads_first(*arrays: Any) -> Any:
  """Return arrays [B, T, H, K] as [B, H, T, K]."""
  return jax.tree.map(lambda x: x.swapaxes(1, 2), arrays)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(5,))
def _attend_block(
  query: Any,
  key: Any,
  value: jax.Array,
  padding_B: jax.Array | None,
  starts_BxT: jax.Array | None,
  static: tuple[int, int, bool, int, Score, Weigh],
) -> jax.Array:
  """Return the attention of a block of queries to the keys before its end.

  Keys outside the first query's window are skipped. The arguments are the whole arrays, so that all
  blocks save the same arrays [B, H, T, K] for their backward passes.

  `static` is the first query of the block, the one after its last, whether it is causal, the
  window, the score and the weights.
  """
  first, last, causal, window, score, weigh = static
  first_key = max(0, first + 1 - window) if window else 0
  queries_T, keys_S = jnp.arange(first, last), jnp.arange(first_key, last)
  query = jax.tree.map(lambda x: x[:, :, first:last], query)
  key = jax.tree.map(lambda x: x[:, :, first_key:last], key)
  scores_BxHxCxS = score(query, key, queries_T, keys_S, 'BHCK,BHSK->BHCS')
  masks = []
  if causal:
    masks.append(_sees(queries_T, keys_S, window)[None, None])
  if padding_B is not None:
    masks.append((keys_S[None, :] >= padding_B[:, None])[:, None, None])
  if starts_BxT is not None:
    masks.append(_document_mask(starts_BxT[:, first:last], keys_S))
  seen = functools.reduce(jnp.logical_and, masks) if masks else None
  weights_BxHxCxS = weigh(scores_BxHxCxS, seen).astype(value.dtype)
  return _by_head('BHCS,BHSK->BHCK', weights_BxHxCxS, value[:, :, first_key:last])


def _by_head(letters: str, x: jax.Array, key: jax.Array, **how: Any) -> jax.Array:
  """Return the product of arrays with heads of queries, and of keys [B, H, …] or [B, G, …]."""
  at, to = letters.index('H'), letters.split('->')[1].index('H')
  groups = key.shape[1]
  if x.shape[at] == groups:
    return jnp.einsum(letters, x, key, **how)
  x_spec, rest = letters.split(',', 1)
  key_spec, out_spec = rest.split('->')
  grouped = f'{x_spec.replace("H", "HR")},{key_spec}->{out_spec.replace("H", "HR")}'
  x = x.reshape(*x.shape[:at], groups, -1, *x.shape[at + 1 :])
  out = jnp.einsum(grouped, x, key, **how)
  return out.reshape(*out.shape[:to], -1, *out.shape[to + 2 :])


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
  starts_BxT: jax.Array | None = None,
  weigh: Softmax = softmax,
  implementation: str,
) -> jax.Array:
  """Return softmax attention on [B, T, H, K] each, computed by the `usable_kernel`.

  Keys and values may have fewer heads, as in `causal_attention`. XLA computes what cuDNN does not
  have: a cap of scores, and documents in rows of an odd length.
  `window` and `starts_BxT`, which is that of `Context`, need causal attention. `head_width` is that
  of `splash.attention`, the only kernel that takes heads filled with zeros.
  """
  batch, length, heads, _ = query.shape
  name = usable_kernel(implementation, query.dtype, batch, length, heads)
  window = window if window < length else 0
  if name != 'xla' and not sharding.on_one_shard() and key.shape[2] % shard_count('row_heads'):
    # Kernels need equal parts of the heads of queries and keys on each device.
    key, value = (
      sharding.constrain(
        jnp.repeat(x, heads // x.shape[2], axis=2), 'batch', None, 'row_heads', None
      )
      for x in (key, value)
    )
  # cuDNN takes the mask of documents as a bias, which needs an even length.
  if name == 'cudnn' and not weigh.cap and (starts_BxT is None or length % 2 == 0):
    # JAX counts the positions left and right of a query without the query's own.
    local = (window - 1, 0) if window else None
    return jax.nn.dot_product_attention(
      query,
      key,
      value,
      mask=None if starts_BxT is None else _document_mask(starts_BxT, jnp.arange(length)),
      is_causal=causal,
      local_window_size=local,
      implementation='cudnn',
    )
  if name == 'splash':
    return splash.attention(
      query,
      key,
      value,
      head_width=head_width,
      causal=causal,
      window=window,
      starts_BxT=starts_BxT,
      cap=weigh.cap,
    )
  if causal:
    return causal_attention(query, key, value, window=window, starts_BxT=starts_BxT, weigh=weigh)
  return full_attention(query, key, value, weigh=weigh)


def _document_mask(starts_BxT: jax.Array, keys_S: jax.Array) -> jax.Array:
  """Return the mask [B, 1, T, S] of keys, by their slots, not before the query's document."""
  return (keys_S[None, None, :] >= starts_BxT[:, :, None])[:, None]


def attend_view(
  query: Any,
  view: caches.CacheView,
  context: Context,
  window: int,
  *,
  score: Score = dot_product,
  weigh: Weigh = softmax,
) -> jax.Array:
  """Return the attention [B, T, H, K] of the queries in slots `context.start` … to a cache's keys.

  See `causal_attention`; queries are [B, T, H, K] and the keys of the view [B, H, S, K].
  """
  length = jax.tree.leaves(query)[0].shape[1]
  queries_T = context.start + jnp.arange(length)
  scores_BxHxTxS = score(query, view.keys, queries_T, view.slots_S, 'BTHK,BHSK->BHTS')
  seen = _sees(queries_T, view.slots_S, window)[None, None]
  if context.padding_B is not None:
    seen &= (view.slots_S[None, :] >= context.padding_B[:, None])[:, None, None]
  weights_BxHxTxS = weigh(scores_BxHxTxS, seen).astype(view.values.dtype)
  return _by_head('BHTS,BHSK->BTHK', weights_BxHxTxS, view.values)
