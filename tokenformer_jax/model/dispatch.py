"""Send tokens to experts and combine the results, on one device or several.

With a capacity, every expert has a number of slots for the tokens of a sequence (Switch
Transformer; Lepikhin et al. 2020, arXiv 2006.16668). Otherwise tokens are sorted by expert. Devices
that split the experts exchange tokens, never experts.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import CapacityConfig, GroupedConfig
from tokenformer_jax.model import grouped
from tokenformer_jax.model.grouped import rows_at, sources
from tokenformer_jax.model.router import Choice
from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.rules import Axes, shard_count

# (rows of several experts, the product of such rows with a matrix for each expert) → their results
Apply = Callable[..., jax.Array]

WITHOUT_DROPS = GroupedConfig()


def capacities(
  config: CapacityConfig, most: int, top_k: int, count: int, training: bool
) -> np.ndarray:
  """Return the number of an expert's slots for sequences of 0, 1, … `most` tokens, int32.

  Halves are rounded to even, and there are at most as many slots as tokens.
  """
  factor, tokens = config.factor if training else config.eval_factor, np.arange(most + 1)
  even = np.round(factor * tokens * top_k / count)
  return np.minimum(tokens, np.maximum(even, config.least)).astype(np.int32)


class Routed(NamedTuple):
  """The gated sum of expert outputs, and whether each token had a slot at each expert."""

  out_BxTxD: jax.Array
  kept_BxTxK: jax.Array


def run(
  apply: Apply,
  x_BxTxD: jax.Array,
  choice: Choice,
  matrices: Sequence[jax.Array],
  axes: Sequence[Axes],
  config: CapacityConfig | GroupedConfig,
  *,
  training: bool,
) -> Routed:
  """Return the gated sum of expert outputs for each token.

  `apply` is `(rows, product, *matrices) → results`, where `product(rows, matrix)` multiplies each
  row by its expert's part of a matrix [E, …]. `axes` are the logical axes of each matrix.
  `training` selects the capacity of training.
  """
  count = len(matrices[0])
  matrices = [matrix.astype(x_BxTxD.dtype) for matrix in matrices]

  def on_device(x: jax.Array, choice: Choice, *matrices: jax.Array) -> Routed:
    if isinstance(config, CapacityConfig):
      return _with_capacity(apply, x, choice, matrices, config, count, training)
    return _sorted(apply, x, choice, matrices, config, count)

  sizes = jax.sharding.get_abstract_mesh().shape
  lengths = [(x_BxTxD.shape[0], 'batch'), (x_BxTxD.shape[1], 'slots')]
  lengths += [
    pair
    for m, names in zip(matrices, axes, strict=True)
    for pair in zip(m.shape, names, strict=True)
  ]
  if math.prod(sizes.values()) == 1 or any(size % shard_count(name) for size, name in lengths):
    return on_device(x_BxTxD, choice, *matrices)
  batch = per_device.split_spec(('batch', 'slots'))

  def on_shard(x: jax.Array, choice: Choice, *shards: jax.Array) -> Routed:
    whole = [_whole(shard, names) for shard, names in zip(shards, axes, strict=True)]
    out = on_device(x, choice, *whole)
    if per_device.is_split('expert_hidden'):
      out = out._replace(out_BxTxD=per_device.total(out.out_BxTxD, 'expert_hidden'))
    return out

  return jax.shard_map(
    on_shard,
    in_specs=(batch, batch, *map(per_device.split_spec, axes)),
    out_specs=batch,
  )(x_BxTxD, choice, *matrices)


def _whole(shard: jax.Array, names: Axes) -> jax.Array:
  """Gather the width of a shard of a matrix, and mark the result as a copy for its rows."""
  shard = per_device.varying_over_rows(shard, names)
  if per_device.is_split('expert_width'):
    shard = per_device.gather(shard, 'expert_width', names.index('expert_width'))
  return shard


def _with_capacity(
  apply: Apply,
  x_BxTxD: jax.Array,
  choice: Choice,
  matrices: Sequence[jax.Array],
  config: CapacityConfig,
  count: int,
  training: bool,
) -> Routed:
  """Return the result of experts with a limited number of slots for each sequence.

  The number depends on the tokens of the sequence, so padding does not change it.
  """
  batch, length, width = x_BxTxD.shape
  top_k = choice.experts_BxTxK.shape[-1]
  slots_by_tokens = capacities(config, length, top_k, count, training)
  slots = int(slots_by_tokens[-1])
  if not slots:
    return Routed(0 * x_BxTxD, choice.experts_BxTxK < 0)
  experts_BxM = choice.experts_BxTxK.reshape(batch, -1)
  tokens_B = jnp.sum(experts_BxM[:, ::top_k] < count, axis=1)
  own_slots_Bx1 = jnp.asarray(slots_by_tokens)[tokens_B][:, None]
  rank_BxM = jax.vmap(lambda experts_M: grouped.rank(experts_M, count).rank_M)(experts_BxM)
  kept_BxM = (rank_BxM < own_slots_Bx1) & (experts_BxM < count)
  # The slots of all sequences, expert by expert.
  row_Bx1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
  at_BxM = (experts_BxM * batch + row_Bx1) * slots + rank_BxM
  at_M = jnp.where(kept_BxM, at_BxM, count * batch * slots).reshape(-1)
  # Choice k of token t has the number K t + k, and M // K is no token's number.
  source = sources(at_M, count * batch * slots)
  flat_NxD = x_BxTxD.reshape(-1, width)
  slots_PxD = rows_at(flat_NxD, source // top_k)
  slots_ExSxD = slots_PxD.reshape(count, batch * slots, width)
  results = _at_experts(apply, slots_ExSxD, matrices).reshape(-1, width)
  rows_MxD = rows_at(results, at_M)
  kept_BxTxK = kept_BxM.reshape(batch, length, top_k)
  return Routed(_combine(rows_MxD, choice.gates_BxTxK, kept_BxTxK), kept_BxTxK)


def _at_experts(apply: Apply, slots_ExSxD: jax.Array, matrices: Sequence[jax.Array]) -> jax.Array:
  """Apply each expert to its slots, on the expert's device."""

  def product(rows_ExSxI: jax.Array, matrices_ExIxO: jax.Array) -> jax.Array:
    return jnp.einsum('ESI,EIO->ESO', rows_ExSxI, matrices_ExIxO)

  devices, local = len(slots_ExSxD) // len(matrices[0]), len(matrices[0])
  if devices == 1:
    return apply(slots_ExSxD, product, *matrices)
  _, slots, width = slots_ExSxD.shape
  sent = per_device.exchange(slots_ExSxD.reshape(devices, local, slots, width), 'experts')
  rows = jnp.moveaxis(sent, 0, 1).reshape(local, devices * slots, width)
  results = apply(rows, product, *matrices).reshape(local, devices, slots, width)
  return per_device.exchange(jnp.moveaxis(results, 1, 0), 'experts').reshape(slots_ExSxD.shape)


def _sorted(
  apply: Apply,
  x_BxTxD: jax.Array,
  choice: Choice,
  matrices: Sequence[jax.Array],
  config: GroupedConfig,
  count: int,
) -> Routed:
  """Return the result of experts for all tokens, by products of sorted rows."""
  width, top_k = x_BxTxD.shape[-1], choice.experts_BxTxK.shape[-1]
  experts_M, local = choice.experts_BxTxK.reshape(-1), len(matrices[0])
  flat_NxD, devices = x_BxTxD.reshape(-1, width), count // local
  if devices == 1:
    order = grouped.sort(experts_M, count)
    rows_PxD = rows_at(flat_NxD, order.source_P // top_k)
    rows_MxD = order.back(apply(rows_PxD, order.product, *matrices))
    kept_BxTxK = choice.experts_BxTxK < count
    return Routed(_combine(rows_MxD, choice.gates_BxTxK, kept_BxTxK), kept_BxTxK)
  # Each device has slots for the tokens of every other one.
  slots = device_slots(config, len(experts_M), top_k, local, devices)
  target_M = jnp.where(experts_M < count, experts_M // local, devices)
  rank_M = grouped.rank(target_M, devices).rank_M
  kept_M = (rank_M < slots) & (experts_M < count)
  at_M = jnp.where(kept_M, target_M * slots + rank_M, devices * slots)
  source = sources(at_M, devices * slots)
  slots_PxD = rows_at(flat_NxD, source // top_k)
  own_P = jnp.append(experts_M % local, local)[source]
  sent = per_device.exchange(slots_PxD.reshape(devices, slots, width), 'experts')
  own_P = per_device.exchange(own_P.reshape(devices, slots), 'experts').reshape(-1)
  order = grouped.sort(own_P, local)
  results = apply(order.rows(sent.reshape(-1, width)), order.product, *matrices)
  back = per_device.exchange(order.back(results).reshape(devices, slots, width), 'experts')
  rows_MxD = rows_at(back.reshape(-1, width), at_M)
  kept_BxTxK = kept_M.reshape(choice.experts_BxTxK.shape)
  return Routed(_combine(rows_MxD, choice.gates_BxTxK, kept_BxTxK), kept_BxTxK)


def device_slots(config: GroupedConfig, choices: int, top_k: int, local: int, devices: int) -> int:
  """Return the number of a device's slots for the choices of another device.

  `choices` are the tokens of a device times `top_k`; `local` is the number of a device's experts.
  """
  most = choices // top_k * min(top_k, local)
  if not config.device_factor:
    return most
  return min(most, math.ceil(config.device_factor * choices / devices))


def _combine(rows_MxD: jax.Array, gates_BxTxK: jax.Array, kept_BxTxK: jax.Array) -> jax.Array:
  """Return the sum over a token's experts, weighted by the gates, [B, T, D]."""
  batch, length, top_k = gates_BxTxK.shape
  rows = rows_MxD.reshape(batch, length, top_k, -1)
  gates_BxTxK = jnp.where(kept_BxTxK, gates_BxTxK, 0).astype(rows.dtype)
  return jnp.einsum('BTKD,BTK->BTD', rows, gates_BxTxK)
