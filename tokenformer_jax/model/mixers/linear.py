"""Linear attention, whose rotation is in the numerator only.

With the feature map φ(x) = elu(x) + 1 and the rotation R_m of position m (RoFormer, arXiv
2104.09864, eq. 19),

  o_m = Σ_n (R_m φ(q_m))ᵀ (R_n φ(k_n)) v_n / Σ_n φ(q_m)ᵀ φ(k_n)

The denominator has no rotation, so that it stays positive. Without positions this is the linear
attention of Katharopoulos et al. 2020 (arXiv 2006.16236). All sums over n go through a state of
constant size, Σ R_n φ(k_n) v_nᵀ and Σ φ(k_n), so there is no T × T array.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import LinearConfig, ModelConfig
from tokenformer_jax.model import sequence
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import EMPTY_AUX, FROM_START, NO_INPUTS, Aux, Context, LayerInputs
from tokenformer_jax.model.positions import Rotary
from tokenformer_jax.model.projections import into_heads, projection
from tokenformer_jax.parallel.sharding import constrain

_CHUNK = 128  # the most positions whose scores are computed together
_LEAST = 1e-12  # the smallest denominator to divide by; keeps its inverse square in float32


class State(NamedTuple):
  """Sums over all positions so far, float32; or the logical axes of both."""

  products: Any  # Σ R_n φ(k_n) v_nᵀ, [B, H, K, L] for values of width L
  keys: Any  # Σ φ(k_n), [B, H, K]


_AXES = State(('batch', 'heads', None, None), ('batch', 'heads', None))


class LinearAttention(nnx.Module):
  """Multi-head linear attention whose query, key, value and output are projections."""

  joined: Any = None  # as in `attention.Attention`

  def __init__(
    self,
    config: LinearConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    execution: Execution,
    rngs: nnx.Rngs,
  ):
    make = functools.partial(projection, model=model, execution=execution, rngs=rngs)
    self.query = make(config.qkv, axes=('width', 'heads'))
    self.key = make(config.qkv, axes=('width', 'heads'))
    self.value = make(config.qkv, axes=('width', 'heads'))
    self.proj = make(config.proj, axes=('heads', 'width'))
    self.heads, self.causal = config.heads, causal
    self.head_width = model.width // config.heads
    self.rotary = Rotary(config.positions, self.head_width)

  def length_flops(self, length: int) -> float:
    """Count the FLOPs of the recurrent form for one position, 4 · H · K² for every length.

    A key enters the state and a query reads it, by a product of K × K each. Products inside a chunk
    and normalisers do not count: they depend on how the sums are computed.
    """
    del length
    return 4 * self.heads * self.head_width**2

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> State:
    """Return the state before the first slot; its size depends on neither length nor dtype."""
    del length, dtype
    return _empty(batch, self.heads, self.head_width, self.head_width)

  def cache_axes(self) -> State:
    """Return the logical axes of the arrays of the cache."""
    return _AXES

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: State | None = None,
    inputs: LayerInputs = NO_INPUTS,
  ) -> tuple[jax.Array, State | None, Aux]:
    """Attend from the next T slots to all visible slots.

    `cache` is the state after the earlier slots; None if no later call continues from here.
    `inputs` is unused: this layer draws nothing.

    Returns:
      The output [B, T, D], the state after the new slots, and an empty `Aux`.
    """
    del inputs
    query, key, value = (
      constrain(projected, 'batch', 'slots', 'heads', None)
      for projected in into_heads(self, x_BxTxD, [(self.heads, self.head_width)] * 3)
    )
    positions_BxT = context.positions(x_BxTxD.shape[1])
    if self.causal:
      documents = None
      if context.starts_BxT is not None:
        documents = context.document_positions(positions_BxT)
      attend = causal_attention
      if cache is None and sequence.splits(query):
        attend = _over_slots
      rest = positions_BxT, cache, documents
      mixed, state = attend(query, key, value, *rest, rotary=self.rotary)
    else:
      mixed, state = full_attention(query, key, value, positions_BxT, rotary=self.rotary), None
    output_BxTxD = self.proj(constrain(mixed, 'batch', 'slots', 'heads', None))
    return output_BxTxD, None if cache is None else state, EMPTY_AUX


def causal_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  positions_BxT: jax.Array,
  state: State | None = None,
  documents_BxT: jax.Array | None = None,
  *,
  rotary: Rotary,
) -> tuple[jax.Array, State]:
  """Return the attention of each position to those up to it, and the state after the last.

  A loop over chunks carries the state. Inside a chunk the masked scores are a product. The backward
  pass saves the inputs and the state before each chunk, and recomputes one chunk after the other,
  so its memory is proportional to T.

  Queries and keys are [B, T, H, K], values [B, T, H, L]; positions are [B, T], or [1, T] for all
  rows, and negative for padding, whose keys do not count. `state` holds earlier positions, if any.
  `documents_BxT` are the positions in each of a row's documents, which do not see each other; None:
  a row is one document. With several, the state after the last position is of no use.

  Returns:
    [B, T, H, L] in the dtype of the values. Where the denominator is 0 the output is 0.
  """
  batch, length, heads, width = query.shape
  if state is None:
    state = _empty(batch, heads, width, value.shape[-1])
  count = -(-length // _CHUNK)
  chunks = [_split(x, count) for x in (query, key, value)]

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend(state: State, chunk: tuple[jax.Array, ...]) -> tuple[State, jax.Array]:
    query, key, value, positions_BxC, *documents = chunk
    return _attend_chunk(state, _map(query, key, positions_BxC, rotary), value, *documents)

  chunks.append(_split(positions_BxT, count, filling=-1))
  if documents_BxT is not None:
    chunks.append(_split(documents_BxT, count))
  state, mixed = jax.lax.scan(attend, _constrained(state), tuple(chunks))
  mixed = mixed.swapaxes(0, 1).reshape(batch, -1, *value.shape[2:])
  return mixed[:, :length], state


def _over_slots(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  positions_BxT: jax.Array,
  state: State | None,
  documents_BxT: jax.Array | None,
  *,
  rotary: Rotary,
) -> tuple[jax.Array, State | None]:
  """Return causal attention where devices split the slots of rows, and no state.

  Devices exchange the sums over their slots. Each adds up those of the devices before its own, as
  far back as the document of its first slot goes, and begins there.
  """

  def on_shard(query, key, value, positions_BxT, *documents):
    sums, continues_document_B = _shard_sums(key, value, positions_BxT, *documents, rotary=rotary)
    before = sequence.before(sums, continues_document_B)
    how = {'rotary': rotary}
    return causal_attention(query, key, value, positions_BxT, before, *documents, **how)[0]

  documents = () if documents_BxT is None else (documents_BxT,)
  mixed = sequence.on_slots(on_shard, (query, key, value), (positions_BxT, *documents))
  return mixed, state


def _shard_sums(
  key: jax.Array,
  value: jax.Array,
  positions_BxT: jax.Array,
  documents_BxT: jax.Array | None = None,
  *,
  rotary: Rotary,
) -> tuple[State, jax.Array]:
  """Return the sums over this device's slots that later slots see, and whether those see more.

  They see the slots of the document that the last slot is in, and those of devices before if that
  document began there, bool [B].
  """
  batch, length = key.shape[:2]
  mapped = _map(key, key, positions_BxT, rotary)
  keys, turned, continues_document_B = mapped.key, mapped.turned_key, jnp.ones(batch, bool)
  if documents_BxT is not None:
    last_Bx1 = documents_BxT[:, -1:]
    seen_BxT = length - 1 - jnp.arange(length)[None] <= last_Bx1
    seen = seen_BxT[..., None, None].astype(key.dtype)
    keys, turned, continues_document_B = keys * seen, turned * seen, last_Bx1[:, 0] >= length
  products = _product('BSHK,BSHL->BHKL', turned, value)
  return State(products, jnp.sum(keys.astype(jnp.float32), axis=1)), continues_document_B


def _attend_chunk(
  state: State, mapped: '_Mapped', value: jax.Array, documents_BxC: jax.Array | None = None
) -> tuple[State, jax.Array]:
  """Return the state after a chunk, and its mixed values; its rows may hold several documents.

  `state` holds the earlier slots of the document that each row's chunk begins in, and the new state
  those of the document that it ends in. `documents_BxC` are the positions in the documents.
  """
  slots_C = jnp.arange(value.shape[1])
  distance_1xCxS = (slots_C[:, None] - slots_C[None])[None]
  seen, goes_on = distance_1xCxS >= 0, jnp.ones((1, len(slots_C), 1, 1), bool)
  if documents_BxC is not None:
    seen &= distance_1xCxS <= documents_BxC[..., None]
    goes_on = (documents_BxC > slots_C[None])[..., None, None]  # as far as the earlier chunks
  seen = seen.astype(value.dtype)
  scores = _product('BCHK,BSHK->BHCS', mapped.turned_query, mapped.turned_key)
  mixed = _product('BHCS,BSHL->BCHL', scores.astype(value.dtype) * seen[:, None], value)
  query = mapped.turned_query * goes_on.astype(value.dtype)
  mixed += _product('BCHK,BHKL->BCHL', query, state.products)
  sums = _product('BCS,BSHK->BCHK', seen, mapped.key)
  sums += state.keys[:, None] * goes_on
  key = mapped.turned_key * seen[:, -1, :, None, None]
  products = state.products * goes_on[:, -1, :, None] + _product('BSHK,BSHL->BHKL', key, value)
  state = _constrained(State(products, sums[:, -1]))
  return state, (mixed * _inverse(mapped.query, sums)).astype(value.dtype)


def full_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  positions_BxT: jax.Array,
  *,
  rotary: Rotary,
) -> jax.Array:
  """Return the attention of each position to all; see `causal_attention`."""

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    mapped = _map(query, key, positions_BxT, rotary)
    products = _product('BTHK,BTHL->BHKL', mapped.turned_key, value)
    sums = jnp.sum(mapped.key.astype(jnp.float32), axis=1, keepdims=True)
    mixed = _product('BTHK,BHKL->BTHL', mapped.turned_query, products)
    return (mixed * _inverse(mapped.query, sums)).astype(value.dtype)

  return attend(query, key, value)


class _Mapped(NamedTuple):
  """Queries and keys after the feature map, and the same rotated by their positions."""

  query: jax.Array
  key: jax.Array
  turned_query: jax.Array
  turned_key: jax.Array


def _map(query: jax.Array, key: jax.Array, positions_BxT: jax.Array, rotary: Rotary) -> _Mapped:
  """Return the features, in the dtype of the inputs; those of keys in padding are 0."""
  query, key = (_elu_plus_one(x.astype(jnp.float32)).astype(x.dtype) for x in (query, key))
  key = key * (positions_BxT >= 0)[..., None, None].astype(key.dtype)
  return _Mapped(query, key, rotary(query, positions_BxT), rotary(key, positions_BxT))


def _elu_plus_one(x: jax.Array) -> jax.Array:
  """Return elu(x) + 1 without the cancellation of exp(x) − 1 + 1."""
  return jnp.where(x >= 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def _inverse(query: jax.Array, sums: jax.Array) -> jax.Array:
  """Return 1 / Σ φ(q)ᵀ φ(k) with a last axis of 1; 0, and no gradient, where the sum is 0."""
  total = jnp.sum(query.astype(jnp.float32) * sums, axis=-1, keepdims=True)
  is_known = total > _LEAST
  return jnp.where(is_known, 1 / jnp.where(is_known, total, 1), 0)


def _product(letters: str, *arrays: jax.Array) -> jax.Array:
  return jnp.einsum(letters, *arrays, preferred_element_type=jnp.float32)


def _split(x: jax.Array, count: int, filling: int = 0) -> jax.Array:
  """Return [B, T, …] in chunks of equal length, [count, B, C, …], the last one filled up."""
  size = -(-x.shape[1] // count)
  ends = [(0, 0), (0, count * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, ends, constant_values=filling)
  return x.reshape(x.shape[0], count, size, *x.shape[2:]).swapaxes(0, 1)


def _empty(batch: int, heads: int, width: int, value_width: int) -> State:
  products = jnp.zeros((batch, heads, width, value_width), jnp.float32)
  return State(products, jnp.zeros((batch, heads, width), jnp.float32))


def _constrained(state: State) -> State:
  return State(*(constrain(x, *axes) for x, axes in zip(state, _AXES, strict=True)))
