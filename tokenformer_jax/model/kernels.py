"""Token-token attention of queries, keys and values: masks, and the choice of a kernel."""

import functools
import importlib
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.model import cache as caches
from tokenformer_jax.model.trunk import Context
from tokenformer_jax.parallel import sharding
from tokenformer_jax.parallel.rules import parts

_QUERY_BLOCK = 128  # positions; blocks are longer where there would be more than …
_MOST_BLOCKS = 16
_MASKED = -1e30  # a score that softmax turns into 0
_CHUNK = 128  # positions whose prefix sums are one product with a triangular matrix


class Far(NamedTuple):
  """Other queries and keys for pairs that are `clip` positions apart or more, as in ReRoPE."""

  query: jax.Array  # rotated by the position `clip`
  key: jax.Array  # rotated by the position 0
  clip: int


def causal_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  padding_B: jax.Array | None = None,
  *,
  window: int = 0,
  starts_BxT: jax.Array | None = None,
  normalise: str = 'softmax',
  far: Far | None = None,
) -> jax.Array:
  """Return causal attention on [B, T, H, K] each, by XLA's own operations; values may differ in K.

  Keys and values may have fewer heads: each serves equally many heads of queries.

  Each block of queries skips the keys that none of its queries sees, and the backward pass
  recomputes the scores. On a CPU this takes half the time of `jax.nn.dot_product_attention`
  (benchmarks/attention.py). Weights are float32.

  No query sees the first `padding_B` keys of its row. With a `window` W > 0 a query sees W keys, up
  to its own. With `starts_BxT` it sees none before this slot: the documents of `Context`.
  `normalise` is that of `weigh`.
  """
  length = query.shape[1]
  block = max(_QUERY_BLOCK, -(-length // _MOST_BLOCKS))
  query, key, value, others, clip = _heads_first(query, key, value, far)
  blocks = []
  for first in range(0, length, block):
    last = min(first + block, length)
    static = (first, last, True, window, normalise, clip)
    blocks.append(_attend_block(query, key, value, others, padding_B, starts_BxT, static))
  return jnp.concatenate(blocks, axis=2).swapaxes(1, 2)


def full_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  padding_B: jax.Array | None = None,
  *,
  normalise: str = 'softmax',
  far: Far | None = None,
) -> jax.Array:
  """Return the attention of every position to all; for the rest see `causal_attention`."""
  query, key, value, others, clip = _heads_first(query, key, value, far)
  static = (0, query.shape[2], False, 0, normalise, clip)
  return _attend_block(query, key, value, others, padding_B, None, static).swapaxes(1, 2)


def _heads_first(query: jax.Array, key: jax.Array, value: jax.Array, far: Far | None):
  """Return the arrays as [B, H, T, K], those of `far` or None, and its distance or 0."""
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
  others = None if far is None else (far.query.swapaxes(1, 2), far.key.swapaxes(1, 2))
  return query, key, value, others, 0 if far is None else far.clip


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(6,))
def _attend_block(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  far: tuple[jax.Array, jax.Array] | None,
  padding_B: jax.Array | None,
  starts_BxT: jax.Array | None,
  static: tuple[int, int, bool, int, str, int],
) -> jax.Array:
  """Return the attention of a block of queries to the keys before its end.

  Keys outside the first query's window are skipped. The arguments are the whole arrays, so that all
  blocks save the same arrays [B, H, T, K] for their backward passes.

  `static` is the first query of the block, the one after its last, whether it is causal, the
  window, the normalisation, and the distance of pairs that are far apart.
  """
  first, last, causal, window, normalise, clip = static
  first_key = max(0, first + 1 - window) if window else 0

  def scores(query: jax.Array, key: jax.Array) -> jax.Array:
    query, key = query[:, :, first:last], key[:, :, first_key:last]
    return _scores(query, key)

  queries_T, keys_S = jnp.arange(first, last), jnp.arange(first_key, last)
  scores_BxHxCxS = scores(query, key)
  if far is not None:
    is_far = (queries_T[:, None] - keys_S[None, :] >= clip)[None, None]
    scores_BxHxCxS = jnp.where(is_far, scores(*far), scores_BxHxCxS)
  seen = _sees(queries_T, keys_S, window)[None, None] if causal else None
  if padding_B is not None:
    is_token = (keys_S[None, :] >= padding_B[:, None])[:, None, None]
    seen = is_token if seen is None else seen & is_token
  if starts_BxT is not None:
    seen &= _document_mask(starts_BxT[:, first:last], keys_S)
  weights_BxHxCxS = weigh(scores_BxHxCxS, seen, normalise).astype(value.dtype)
  return _by_head('BHCS,BHSK->BHCK', weights_BxHxCxS, value[:, :, first_key:last])


def _scores(query: jax.Array, key: jax.Array, letters: str = 'BHCK,BHSK->BHCS') -> jax.Array:
  """Return q · k / √K in float32."""
  query = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
  return _by_head(letters, query, key, preferred_element_type=jnp.float32)


def _by_head(letters: str, x: jax.Array, key: jax.Array, **how: Any) -> jax.Array:
  """Return the product of arrays with heads of queries, and of keys [B, H, …] or [B, G, …]."""
  at, to = letters.index('H'), letters.split('->')[1].index('H')
  groups = key.shape[1]
  if x.shape[at] == groups:
    return jnp.einsum(letters, x, key, **how)
  of_x, rest = letters.split(',', 1)
  of_key, of_out = rest.split('->')
  grouped = f'{of_x.replace("H", "HR")},{of_key}->{of_out.replace("H", "HR")}'
  x = x.reshape(*x.shape[:at], groups, -1, *x.shape[at + 1 :])
  out = jnp.einsum(grouped, x, key, **how)
  return out.reshape(*out.shape[:to], -1, *out.shape[to + 2 :])


def weigh(scores: jax.Array, seen: jax.Array | None, normalise: str) -> jax.Array:
  """Return the weights of keys from float32 scores [B, H, T, S].

    softmax        exp(a) / Σ exp(a)
    squared_relu   relu(a)² / l

  Here l is the number of keys that the query sees. `seen` is a mask that broadcasts to the scores;
  None: all keys are seen.
  """
  if normalise == 'softmax':
    return jax.nn.softmax(scores if seen is None else jnp.where(seen, scores, _MASKED))
  squares = jnp.square(jax.nn.relu(scores))
  if seen is None:
    return squares / scores.shape[-1]
  return jnp.where(seen, squares, 0) / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)


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
  return name if name != 'splash' or _splash().fits(batch, heads, length) else 'xla'


def filled_width(name: str, head_width: int) -> int:
  """Return the head width that projections should produce for a kernel: see `splash.filled`."""
  return _splash().filled(head_width) if name == 'splash' else head_width


def _splash() -> types.ModuleType:
  """Return the module of the kernel for TPUs; runs on other devices import no Pallas."""
  return importlib.import_module('tokenformer_jax.model.splash')


def attend(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  head_width: int | None = None,
  causal: bool,
  window: int = 0,
  starts_BxT: jax.Array | None = None,
  implementation: str,
) -> jax.Array:
  """Return softmax attention on [B, T, H, K] each, computed by the `usable_kernel`.

  Keys and values may have fewer heads, as in `causal_attention`.
  `window` and `starts_BxT`, which is that of `Context`, need causal attention. `head_width` is that
  of `splash.attention`, the only kernel that takes heads filled with zeros.
  """
  batch, length, heads, _ = query.shape
  name = usable_kernel(implementation, query.dtype, batch, length, heads)
  window = window if window < length else 0
  if name != 'xla' and not sharding.on_one_part() and key.shape[2] % parts('row_heads'):
    # Kernels need equal parts of the heads of queries and keys on each device.
    key, value = (
      sharding.constrain(
        jnp.repeat(x, heads // x.shape[2], axis=2), 'batch', None, 'row_heads', None
      )
      for x in (key, value)
    )
  # cuDNN takes the mask of documents as a bias, which needs an even length.
  if name == 'cudnn' and (starts_BxT is None or length % 2 == 0):
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
    how = {'causal': causal, 'window': window, 'starts_BxT': starts_BxT}
    return _splash().attention(query, key, value, head_width=head_width, **how)
  if causal:
    return causal_attention(query, key, value, window=window, starts_BxT=starts_BxT)
  return full_attention(query, key, value)


def _document_mask(starts_BxT: jax.Array, keys_S: jax.Array) -> jax.Array:
  """Return the mask [B, 1, T, S] of keys, by their slots, not before the query's document."""
  return (keys_S[None, None, :] >= starts_BxT[:, :, None])[:, None]


def sees_view(view: caches.View, context: Context, length: int, window: int) -> jax.Array:
  """Return the mask [B, 1, T, S], or [1, 1, T, S], of the keys that the next queries see."""
  queries_T = context.start + jnp.arange(length)
  seen = _sees(queries_T, view.slots_S, window)[None, None]
  if context.padding_B is None:
    return seen
  return seen & (view.slots_S[None, :] >= context.padding_B[:, None])[:, None, None]


def attend_view(
  query_BxTxHxK: jax.Array,
  view: caches.View,
  context: Context,
  window: int,
  *,
  normalise: str = 'softmax',
  far: Far | None = None,
) -> jax.Array:
  """Return the attention of the queries in slots `context.start` … to the keys in the view.

  See `causal_attention`; the keys of `far` are [B, H, S, K].
  """
  letters = 'BTHK,BHSK->BHTS'
  scores_BxHxTxS = _scores(query_BxTxHxK, view.keys, letters)
  length = query_BxTxHxK.shape[1]
  if far is not None:
    queries_T = context.start + jnp.arange(length)
    is_far = (queries_T[:, None] - view.slots_S[None, :] >= far.clip)[None, None]
    far_scores = _scores(far.query, far.key, letters)
    scores_BxHxTxS = jnp.where(is_far, far_scores, scores_BxHxTxS)
  seen = sees_view(view, context, length, window)
  weights_BxHxTxS = weigh(scores_BxHxTxS, seen, normalise).astype(view.values.dtype)
  return _by_head('BHTS,BHSK->BTHK', weights_BxHxTxS, view.values)


def uniform_attention(
  value_BxTxHxK: jax.Array,
  positions_BxT: jax.Array,
  *,
  causal: bool,
  window: int = 0,
  documents: bool = False,
) -> jax.Array:
  """Return the mean of the values that each position sees, in float32: C of shaped attention.

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
  sums = window_sums(value_BxTxHxK, window) if window else None
  if documents:
    of_documents = document_sums(value_BxTxHxK, positions_BxT)
    reaches = (positions_BxT < window - 1)[..., None, None]  # the beginning of the document
    sums = jnp.where(reaches, of_documents, sums) if window else of_documents
  elif not window:
    sums = prefix_sums(value_BxTxHxK)
  return sums / count[..., None, None].astype(jnp.float32)


def prefix_sums(x: jax.Array) -> jax.Array:
  """Return the sums over the second axis up to each position, in float32, shape [B, T, …].

  Sums inside a chunk are a product with a triangular matrix, which the matrix unit computes; sums
  over chunks are few.
  """
  batch, length, *rest = x.shape
  chunk = min(_CHUNK, length)
  chunks_BxNxCxR = _split(x.reshape(batch, length, -1), chunk)
  within = jnp.einsum(
    'CS,BNSR->BNCR',
    jnp.tri(chunk, dtype=x.dtype),
    chunks_BxNxCxR,
    preferred_element_type=jnp.float32,
    precision='highest',
  )
  before_BxNxR = jnp.cumsum(within[:, :, -1], axis=1) - within[:, :, -1]
  sums = (within + before_BxNxR[:, :, None]).reshape(batch, -1, chunks_BxNxCxR.shape[-1])
  return sums[:, :length].reshape(batch, length, *rest)


def document_sums(x: jax.Array, positions_BxT: jax.Array) -> jax.Array:
  """Return the sums over each document up to each position, in float32, shape [B, T, …].

  `positions_BxT` are those in each document. See `prefix_sums`; no sum is a difference of sums over
  several documents, which would lose digits.
  """
  batch, length = x.shape[:2]
  chunk = min(_CHUNK, length)
  chunks_BxNxCxR = _split(x.reshape(batch, length, -1), chunk)
  positions_BxNxC = _split(positions_BxT[..., None], chunk)[..., 0]
  seen_BxNxCxS, begins_before_BxNxC = seen_in_chunk(positions_BxNxC)
  within = jnp.einsum(
    'BNCS,BNSR->BNCR',
    seen_BxNxCxS.astype(x.dtype),
    chunks_BxNxCxR,
    preferred_element_type=jnp.float32,
    precision='highest',
  )

  def add(before_BxR: jax.Array, chunk: tuple[jax.Array, jax.Array]):
    last_BxR, goes_on_B = chunk
    return last_BxR + before_BxR * goes_on_B[:, None], before_BxR

  before_BxNxC = begins_before_BxNxC.astype(jnp.float32)
  chunks = (within[:, :, -1].swapaxes(0, 1), before_BxNxC[:, :, -1].swapaxes(0, 1))
  _, before_NxBxR = jax.lax.scan(add, jnp.zeros_like(within[:, 0, -1]), chunks)
  sums = within + before_NxBxR.swapaxes(0, 1)[:, :, None] * before_BxNxC[..., None]
  return sums.reshape(batch, -1, chunks_BxNxCxR.shape[-1])[:, :length].reshape(x.shape)


def seen_in_chunk(positions_xC: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Return which keys of a chunk of a row its queries see, and whether they see earlier ones.

  Args:
    positions_xC: positions in the document, [B, …, C].

  Returns:
    The mask of queries and keys, bool [B, …, C, C], and bool [B, …, C].
  """
  size = positions_xC.shape[-1]
  distance_CxS = jnp.arange(size)[:, None] - jnp.arange(size)[None]
  leading = (None,) * (positions_xC.ndim - 1)
  distance_xCxS, first_xC = distance_CxS[leading], jnp.arange(size)[leading]
  seen_xCxS = (distance_xCxS >= 0) & (distance_xCxS <= positions_xC[..., None])
  return seen_xCxS, positions_xC > first_xC


def window_sums(x: jax.Array, window: int) -> jax.Array:
  """Return the sums over the last `window` positions up to each, in float32, shape [B, T, …].

  The window of a position is the beginning of its block of `window` positions and the end of the
  block before. So no sum is a difference of sums over the whole text, which would lose digits.
  """
  batch, length, *rest = x.shape
  blocks_BxNxWxR = _split(x.reshape(batch, length, -1), window)
  flat = blocks_BxNxWxR.reshape(-1, *blocks_BxNxWxR.shape[2:])
  beginnings = prefix_sums(flat).reshape(blocks_BxNxWxR.shape)
  ends = beginnings[:, :, -1:] - beginnings
  before = jnp.pad(ends[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
  sums = (beginnings + before).reshape(batch, -1, blocks_BxNxWxR.shape[-1])
  return sums[:, :length].reshape(batch, length, *rest)


def _split(x_BxTxR: jax.Array, size: int) -> jax.Array:
  """Return the array in parts of `size` positions, [B, N, size, R], filled with zeros."""
  batch, length, rest = x_BxTxR.shape
  filled = jnp.pad(x_BxTxR, ((0, 0), (0, -length % size), (0, 0)))
  return filled.reshape(batch, -1, size, rest)
