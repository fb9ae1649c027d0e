"""Multiply each row by the matrix of its expert.

On TPUs, kernels multiply rows sorted by expert (`grouped_tpu.py`), on GPUs `jax.lax.ragged_dot`. On
CPUs `ragged_dot` costs as much as a product of all rows with all matrices (30 times as much with 16
experts), so there zeros fill the rows of each expert up to whole blocks, and each block is
multiplied by its expert's matrix.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.model import grouped_tpu
from tokenformer_jax.parallel.sharding import platform


def rows_at(rows_NxD: jax.Array, numbers_P: jax.Array) -> jax.Array:
  """Return the rows of these numbers [P, D], with zeros for the number N."""
  return jnp.take(rows_NxD, numbers_P, axis=0, mode='fill', fill_value=0)


def sources(slot_M: jax.Array, slots: int) -> jax.Array:
  """Return the row in each slot, given the slot of each row; M for an empty slot."""
  number_M = jnp.arange(len(slot_M), dtype=jnp.int32)
  return jnp.full(slots, len(slot_M), jnp.int32).at[slot_M].set(number_M, mode='drop')


class Ranks(NamedTuple):
  """The rank of each row among the rows of its expert."""

  rank_M: jax.Array  # the number of earlier rows of the same expert
  sizes_E: jax.Array  # the number of rows of each expert


def rank(experts_M: jax.Array, count: int) -> Ranks:
  """Return the rank of each row, in the order of the rows; `count` stands for no expert."""
  order_M = jnp.argsort(experts_M, stable=True)
  sorted_M = experts_M[order_M]
  starts = jnp.searchsorted(sorted_M, jnp.arange(count + 2, dtype=experts_M.dtype))
  sorted_rank_M = jnp.arange(len(experts_M), dtype=jnp.int32) - starts[sorted_M].astype(jnp.int32)
  rank_M = jnp.zeros_like(sorted_rank_M).at[order_M].set(sorted_rank_M, unique_indices=True)
  return Ranks(rank_M, jnp.diff(starts[: count + 1]).astype(jnp.int32))


class Sorted(NamedTuple):
  """Rows in the order of their experts."""

  source_P: jax.Array  # the row in each slot; M for none
  slot_M: jax.Array  # the slot of each row; P for a row without an expert
  sizes_E: jax.Array  # the number of slots of each expert
  block: int  # the number of slots that share a matrix; 0: no fill between experts
  tile: int  # the number of rows that a TPU's kernel multiplies at once; 0: no TPU

  def rows(self, x_MxD: jax.Array) -> jax.Array:
    """Return the rows in their slots [P, D], with zeros in empty slots."""
    return rows_at(x_MxD, self.source_P)

  def back(self, rows_PxD: jax.Array) -> jax.Array:
    """Return the rows in their first order [M, D], with zeros for those without an expert."""
    return rows_at(rows_PxD, self.slot_M)

  def product(self, rows_PxI: jax.Array, matrices_ExIxO: jax.Array) -> jax.Array:
    """Return each row times the matrix of its expert, [P, O]."""
    if self.tile:
      return grouped_tpu.product(rows_PxI, matrices_ExIxO, self.sizes_E, self.tile)
    if not self.block:
      return jax.lax.ragged_dot(rows_PxI, matrices_ExIxO, self.sizes_E)
    blocks_NxSxI = rows_PxI.reshape(-1, self.block, rows_PxI.shape[-1])
    ends_E = jnp.cumsum(self.sizes_E)
    first_N = self.block * jnp.arange(len(blocks_NxSxI))
    expert_N = jnp.searchsorted(ends_E, first_N, side='right')
    # Take in float32, so that the gradients of an expert's blocks are summed in float32.
    wide_ExIxO = matrices_ExIxO.astype(jnp.float32)
    matrices_NxIxO = jnp.take(wide_ExIxO, expert_N, axis=0, mode='clip')
    matrices_NxIxO = matrices_NxIxO.astype(matrices_ExIxO.dtype)
    return jnp.einsum('NSI,NIO->NSO', blocks_NxSxI, matrices_NxIxO).reshape(len(rows_PxI), -1)


def sort(experts_M: jax.Array, count: int) -> Sorted:
  """Return the order of rows by expert; `count` stands for no expert."""
  number, block, tile = len(experts_M), 0, 0
  rank_M, sizes_E = rank(experts_M, count)
  if platform() == 'cpu':
    block = _block(number, count)
    sizes_E = -(-sizes_E // block) * block
    number = -(-(number + count * (block - 1)) // block) * block
  elif platform() == 'tpu':
    tile = grouped_tpu.row_tile(number, count)
    number = -(-number // tile) * tile
  starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes_E)])
  slot_M = jnp.where(experts_M < count, starts[experts_M] + rank_M, number)
  return Sorted(sources(slot_M, number), slot_M, sizes_E, block, tile)


@functools.cache
def _block(rows: int, count: int) -> int:
  """Return the rows of a block: about a quarter of an expert's at even load, from 4 to 128."""
  block = 4
  while block < 128 and 8 * block * count <= rows:
    block *= 2
  return block
