"""The way of tokens to their experts, and of the results back, on one device or several.

With a capacity, every expert has a number of places for the tokens of a group of sequences (Switch
Transformer; Lepikhin et al. 2020, arXiv 2006.16668). Without, tokens are sorted by expert. Devices
that split the experts send each other the tokens, never the experts.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import CapacityConfig, GroupedConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import grouped
from tokenformer_jax.model.grouped import rows_at, sources
from tokenformer_jax.model.router import Choice
from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.rules import Axes, parts

# (rows of several experts, the product of such rows with a matrix for each expert) → their results
Apply = Callable[..., jax.Array]

WITHOUT_DROPS = GroupedConfig()


def capacity(config: CapacityConfig, tokens: int, top_k: int, count: int, training: bool) -> int:
  """Return the places that an expert has for a group of tokens.

  Halves are rounded to even. No expert needs more places than there are tokens.
  """
  return int(_capacities(config, tokens, top_k, count, training)[tokens])


def _capacities(
  config: CapacityConfig, most: int, top_k: int, count: int, training: bool
) -> np.ndarray:
  """Return the places that an expert has for a group of 0, 1, … `most` tokens, int32."""
  factor, tokens = config.factor if training else config.eval_factor, np.arange(most + 1)
  even = np.round(factor * tokens * top_k / count)
  return np.minimum(tokens, np.maximum(even, config.least)).astype(np.int32)


class Routed(NamedTuple):
  """The result of experts.

  Attributes:
    out_BxTxD: the sum of the results of a token's experts, times its gates.
    kept_BxTxK: whether a token had a place at an expert.
  """

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
  """Return what the chosen experts make of each token.

  Args:
    apply: `(rows, product, *matrices)`, where `product(rows, matrix)` multiplies each row with its
      expert's part of a matrix [E, …].
    x_BxTxD: the tokens.
    choice: their experts.
    matrices: those of all experts, each [E, …].
    axes: their logical axes.
    config: how tokens get to experts.
    training: whether the capacity is that of training.
  """
  count = len(matrices[0])
  matrices = [matrix.astype(x_BxTxD.dtype) for matrix in matrices]

  def on_device(x: jax.Array, choice: Choice, *matrices: jax.Array) -> Routed:
    if isinstance(config, CapacityConfig):
      return _with_capacity(apply, x, choice, matrices, config, count, training)
    return _sorted(apply, x, choice, matrices, config, count)

  sizes = jax.sharding.get_abstract_mesh().shape
  lengths = [(x_BxTxD.shape[0], 'batch')]
  lengths += [
    pair
    for m, names in zip(matrices, axes, strict=True)
    for pair in zip(m.shape, names, strict=True)
  ]
  if math.prod(sizes.values()) == 1 or any(size % parts(name) for size, name in lengths):
    return on_device(x_BxTxD, choice, *matrices)
  batch = per_device.split_spec(('batch',))

  def on_part(x: jax.Array, choice: Choice, *pieces: jax.Array) -> Routed:
    whole = [_whole(piece, names) for piece, names in zip(pieces, axes, strict=True)]
    out = on_device(x, choice, *whole)
    if per_device.is_split('expert_hidden'):
      out = out._replace(out_BxTxD=per_device.total(out.out_BxTxD, 'expert_hidden'))
    return out

  return jax.shard_map(
    on_part,
    in_specs=(batch, batch, *map(per_device.split_spec, axes)),
    out_specs=batch,
  )(x_BxTxD, choice, *matrices)


def _whole(piece: jax.Array, names: Axes) -> jax.Array:
  """Gather the width of a device's part of a matrix, and mark it as a copy for its rows."""
  piece = per_device.varying_over_rows(piece, names)
  if per_device.is_split('expert_width'):
    piece = per_device.gather(piece, 'expert_width', names.index('expert_width'))
  return piece


def _with_capacity(
  apply: Apply,
  x_BxTxD: jax.Array,
  choice: Choice,
  matrices: Sequence[jax.Array],
  config: CapacityConfig,
  count: int,
  training: bool,
) -> Routed:
  """Return the result of experts that have places for so many tokens of each group.

  The number follows from the tokens that a group has, so padding does not change it.
  """
  batch, length, width = x_BxTxD.shape
  top_k, rows = choice.experts_BxTxK.shape[-1], config.rows if training else 1
  if batch % rows:
    raise UserError(
      f'config.model has ffn.dispatch.rows={config.rows}, and a device has {batch} sequences of a '
      'batch, or of each part of it with optim.accumulation_steps; make rows a divisor of that'
    )
  groups = batch // rows
  capacities = _capacities(config, rows * length, top_k, count, training)
  slots = int(capacities[-1])
  if not slots:
    return Routed(0 * x_BxTxD, choice.experts_BxTxK < 0)
  experts_GxM, gates_GxM = (one.reshape(groups, -1) for one in choice)
  tokens_G = jnp.sum(experts_GxM[:, ::top_k] < count, axis=1)
  own_slots_Gx1 = jnp.asarray(capacities)[tokens_G][:, None]
  place_GxM = jax.vmap(lambda e, g: place(e, g, count, config.order))(experts_GxM, gates_GxM)
  kept_GxM = (place_GxM < own_slots_Gx1) & (experts_GxM < count)
  # The places of all groups, expert by expert.
  group_Gx1 = jnp.arange(groups, dtype=jnp.int32)[:, None]
  at_GxM = (experts_GxM * groups + group_Gx1) * slots + place_GxM
  at_M = jnp.where(kept_GxM, at_GxM, count * groups * slots).reshape(-1)
  # Choice k of token t has the number K t + k, and M // K is no token's number.
  source = sources(at_M, count * groups * slots)
  flat_NxD = x_BxTxD.reshape(-1, width)
  places_PxD = rows_at(flat_NxD, source // top_k)
  of_experts_ExSxD = places_PxD.reshape(count, groups * slots, width)
  results = _at_experts(apply, of_experts_ExSxD, matrices).reshape(-1, width)
  rows_MxD = rows_at(results, at_M)
  kept_BxTxK = kept_GxM.reshape(batch, length, top_k)
  return Routed(_combine(rows_MxD, choice.gates_BxTxK, kept_BxTxK), kept_BxTxK)


def place(experts_M: jax.Array, gates_M: jax.Array, count: int, order: str) -> jax.Array:
  """Return the place of each choice of a group at its expert, from 0 on.

  Args:
    experts_M: the chosen experts, choice k of token t at K t + k; `count` for none.
    gates_M: their gates.
    count: the number of experts.
    order: see `CapacityConfig.order`.
  """
  if order == 'sequence':
    return grouped.places(experts_M, count).of_row_M
  first = jnp.argsort(-gates_M, stable=True)
  places = grouped.places(experts_M[first], count).of_row_M
  return jnp.zeros_like(places).at[first].set(places, unique_indices=True)


def _at_experts(apply: Apply, places_ExSxD: jax.Array, matrices: Sequence[jax.Array]) -> jax.Array:
  """Apply each expert to its places, on the device that has the expert."""

  def product(rows_ExSxI: jax.Array, matrices_ExIxO: jax.Array) -> jax.Array:
    return jnp.einsum('ESI,EIO->ESO', rows_ExSxI, matrices_ExIxO)

  devices, local = len(places_ExSxD) // len(matrices[0]), len(matrices[0])
  if devices == 1:
    return apply(places_ExSxD, product, *matrices)
  _, slots, width = places_ExSxD.shape
  sent = per_device.exchange(places_ExSxD.reshape(devices, local, slots, width), 'experts')
  rows = jnp.moveaxis(sent, 0, 1).reshape(local, devices * slots, width)
  results = apply(rows, product, *matrices).reshape(local, devices, slots, width)
  return per_device.exchange(jnp.moveaxis(results, 1, 0), 'experts').reshape(places_ExSxD.shape)


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
  # Each device has places for the tokens of every other one.
  slots = device_slots(config, len(experts_M), top_k, local, devices)
  target_M = jnp.where(experts_M < count, experts_M // local, devices)
  place_M = grouped.places(target_M, devices).of_row_M
  kept_M = (place_M < slots) & (experts_M < count)
  at_M = jnp.where(kept_M, target_M * slots + place_M, devices * slots)
  source = sources(at_M, devices * slots)
  places_PxD = rows_at(flat_NxD, source // top_k)
  own_P = jnp.append(experts_M % local, local)[source]
  sent = per_device.exchange(places_PxD.reshape(devices, slots, width), 'experts')
  own_P = per_device.exchange(own_P.reshape(devices, slots), 'experts').reshape(-1)
  order = grouped.sort(own_P, local)
  results = apply(order.rows(sent.reshape(-1, width)), order.product, *matrices)
  back = per_device.exchange(order.back(results).reshape(devices, slots, width), 'experts')
  rows_MxD = rows_at(back.reshape(-1, width), at_M)
  kept_BxTxK = kept_M.reshape(choice.experts_BxTxK.shape)
  return Routed(_combine(rows_MxD, choice.gates_BxTxK, kept_BxTxK), kept_BxTxK)


def device_slots(config: GroupedConfig, choices: int, top_k: int, local: int, devices: int) -> int:
  """Return the places that a device has for the choices of another one.

  Args:
    config: how many.
    choices: tokens of a device, times `top_k`.
    top_k: the experts of a token.
    local: the experts of a device.
    devices: the number of devices that split the experts.
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
