"""Rows whose slots are split over devices: let positions of a row see each other.

Everything that works on one position stays on the device that has its slot. Attention exchanges
slots for heads (Jacobs et al. 2023, arXiv 2309.14509): each device gets all slots of some heads,
applies the same kernel as on one device, and sends the result back. Every array moves once, and all
devices have the same work under every mask. Heads that they cannot share evenly are filled up. A
window takes the keys and values before a device's slots from the device before, and linear
attention the sums over all slots before.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.parallel.rules import mesh_axes, shard_count, spec
from tokenformer_jax.parallel.sharding import constrain

Split = tuple[str | None, ...]
_SLOTS: Split = ('batch', 'slots', 'heads', None)  # all heads of some slots, [B, T, H, K]
_ROWS: Split = ('batch', None, 'row_heads', None)  # all slots of some heads
# The shorter block of the kernel. In multiples of the longer one, 1024, a halo costs 1 to 11 % more
# work for most windows, because more slots before a device's own are computed in vain; at 2,500
# positions it would cost a tenth less.
SHORT_BLOCK = 512
_WORTH = 4  # a device has at least this many times the slots before its own that it takes


def whole_rows(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Return queries, keys and values [B, T, H, K] with all slots of some heads on each device.

  Keys and values of too few heads for all devices are repeated, as often as needed. Heads of zeros
  fill queries up to the same number of heads for each device. The arrays are unchanged if devices
  do not split slots.
  """
  if shard_count('slots') == 1:
    return query, key, value
  key, value = (_enough(x, query.shape[2]) for x in (key, value))
  query, key, value = (_exchange(x, _SLOTS, _ROWS) for x in (query, key, value))
  return query, key, value


def _enough(x: jax.Array, heads: int) -> jax.Array:
  """Return keys or values whose heads devices can split; each serves equally many of `heads`."""
  own, shards = x.shape[2], shard_count('row_heads')
  possible = (n for n in range(1, heads // own + 1) if heads % (n * own) == 0)
  times = next((n for n in possible if n * own % shards == 0), heads // own)
  return x if times == 1 else constrain(jnp.repeat(x, times, axis=2), *_SLOTS)


def split_rows(heads_BxTxHxK: jax.Array, heads: int) -> jax.Array:
  """Return all of `heads` heads of some slots on each device: the inverse of `whole_rows`."""
  if shard_count('slots') == 1:
    return heads_BxTxHxK
  return _exchange(heads_BxTxHxK, _ROWS, _SLOTS, heads // shard_count('heads'))


def splits(heads_BxTxHxK: jax.Array) -> bool:
  """Return whether devices split the slots of these heads, evenly as everything else."""
  sizes = zip(heads_BxTxHxK.shape, ('batch', 'slots', 'heads'), strict=False)
  return shard_count('slots') > 1 and all(size % shard_count(name) == 0 for size, name in sizes)


def on_slots(
  f: Callable[..., jax.Array], heads: tuple[jax.Array, ...], slots: tuple[jax.Array, ...]
) -> jax.Array:
  """Apply `f(*heads, *slots)` on each device to its slots; it returns heads.

  `heads` are [B, T, H, K] that the mesh `splits`; `slots` are integers [B, T], or [1, T] for all
  rows.
  """
  slot_specs = [spec(('batch' if len(x) > 1 else None, 'slots')) for x in slots]
  # A kernel does not declare over which axes its result varies, so JAX cannot check that.
  return jax.shard_map(
    f,
    in_specs=(*[spec(_SLOTS)] * len(heads), *slot_specs),
    out_specs=spec(_SLOTS),
    check_vma=False,
  )(*heads, *slots)


def halo(key_BxTxHxK: jax.Array, window: int) -> int:
  """Return how many slots before its own a device takes from the one before, for a window.

  The number is rounded up to whole blocks of a kernel. It is 0 where whole rows cost less: the
  kernel also computes these slots as queries, in vain.
  """
  if not window or not splits(key_BxTxHxK):
    return 0
  own = key_BxTxHxK.shape[1] // shard_count('slots')
  block = math.gcd(own, SHORT_BLOCK)
  slots = -(-(window - 1) // block) * block
  return slots if _WORTH * slots <= own else 0


def in_window(
  attend: Callable[..., jax.Array],
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  starts_BxT: jax.Array | None,
  slots: int,
) -> jax.Array:
  """Return the attention [B, T, H, K] of a window that needs `slots` slots before a device's own.

  The number comes from `halo`. `attend` is `kernels.attend`; for `starts_BxT` see `Context`.
  """
  (along,) = mesh_axes('slots')
  steps = [(i, i + 1) for i in range(shard_count('slots') - 1)]

  def with_halo(x: jax.Array) -> jax.Array:
    """Return an array with the slots before; they are zero on the first device."""
    return jnp.concatenate([jax.lax.ppermute(x[:, -slots:], along, steps), x], axis=1)

  def on_shard(query: jax.Array, key: jax.Array, value: jax.Array, starts_BxT: jax.Array):
    index, own = jax.lax.axis_index(along), key.shape[1]
    query = jnp.pad(query, ((0, 0), (slots, 0), (0, 0), (0, 0)))
    starts_BxT = jnp.maximum(with_halo(starts_BxT) - (index * own - slots), 0)
    # No slots come before those of the first device, and its own queries start after its halo.
    is_before = (index == 0) & (jnp.arange(slots + own) < slots)
    starts_BxT = jnp.where(is_before[None], 0, starts_BxT)
    out = attend(query, with_halo(key), with_halo(value), starts_BxT=starts_BxT)
    return out[:, slots:]

  if starts_BxT is None:
    starts_BxT = jnp.zeros(query.shape[:2], jnp.int32)
  return on_slots(on_shard, (query, key, value), (starts_BxT,))


def before(own: Any, continues_document_B: jax.Array) -> Any:
  """Return the sums over the devices with the slots before, inside `on_slots`.

  Args:
    own: the sums over this device's slots, arrays [B, …].
    continues_document_B: whether slots after this device's see also those before it.
  """
  (along,) = mesh_axes('slots')
  everywhere, goes_on_SxB = jax.lax.all_gather((own, continues_document_B), along)
  sums = jax.tree.map(jnp.zeros_like, own)

  def add(i: int, sums: jax.Array, all_sums: jax.Array) -> jax.Array:
    goes_on = goes_on_SxB[i].reshape(-1, *[1] * (sums.ndim - 1)).astype(sums.dtype)
    is_before = i < jax.lax.axis_index(along)
    return jnp.where(is_before, all_sums[i] + sums * goes_on, sums)

  for i in range(shard_count('slots')):
    sums = jax.tree.map(functools.partial(add, i), sums, everywhere)
  return sums


def _exchange(x: jax.Array, old: Split, new: Split, own: int | None = None) -> jax.Array:
  """Return heads split as `new` that were split as `old`; a device keeps `own` of them."""
  if not splits(x):  # rows of other lengths, in decoding
    return x
  (along,) = mesh_axes('slots')

  def on_shard(shard: jax.Array) -> jax.Array:
    if old == _ROWS:
      return jax.lax.all_to_all(shard, along, 1, 2, tiled=True)[:, :, :own]
    fill = -shard.shape[2] % shard_count('slots')
    if fill:
      shard = jnp.pad(shard, ((0, 0), (0, 0), (0, fill), (0, 0)))
    return jax.lax.all_to_all(shard, along, 2, 1, tiled=True)

  return jax.shard_map(on_shard, in_specs=spec(old), out_specs=spec(new))(x)
