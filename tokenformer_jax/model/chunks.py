"""Sums over chunks of positions, whose logits over a large vocabulary fit in memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.sharding import constrain

Rows = tuple[jax.Array, ...]  # arrays [B, T, …], the input of the head first


class Objective(NamedTuple):
  """A training objective, as sums over chunks of positions."""

  # Maps the head [V, D], other fixed heads, and a chunk of each row, of the student's input of the
  # head first, to sums [B] in a pytree.
  sums: Callable[..., Any]
  weigh: Callable[[Any], jax.Array]  # maps such sums to the value, a number


@jax.named_scope('head_and_loss')
def minimized(
  objective: Objective,
  rows: Rows,
  embedding_VxD: jax.Array,
  fixed: Sequence[jax.Array] = (),
  *,
  chunk: int,
) -> tuple[jax.Array, Any]:
  """Return the value of an objective, with a gradient by the head and by the first of the rows.

  The forward pass computes the gradient of each chunk of positions together with its logits. So the
  logits are neither saved nor recomputed; recomputing would be a fourth product with the head.

  `rows` are the input of the head [B, T, D], and other arrays [B, T, …] without a gradient. The
  last chunk is padded: integers with −1, other arrays with 0. `fixed` are matrices of other heads
  [V, …] without a gradient.

  Returns:
    The value, and the sums over the batch that it consists of, without a gradient.
  """
  on_rows = functools.partial(_with_gradient, objective)
  values, sums = in_chunks(on_rows, rows, embedding_VxD, fixed, chunk)
  return jnp.sum(values), jax.lax.stop_gradient(jax.tree.map(jnp.sum, sums))


def in_chunks(
  on_rows: Callable[..., Any],
  rows: Rows,
  embedding_VxD: jax.Array,
  fixed: Sequence[jax.Array],
  chunk: int,
) -> Any:
  """Apply `on_rows` to P chunks [P, B, C, …] of the rows, the head, and the fixed heads."""

  def cut(row: jax.Array) -> jax.Array:
    length = row.shape[1]
    size = min(chunk, length)
    if padding := -length % size:
      filler = -1 if jnp.issubdtype(row.dtype, jnp.integer) else 0
      widths = ((0, 0), (0, padding), *[(0, 0)] * (row.ndim - 2))
      row = jnp.pad(row, widths, constant_values=filler)
    return row.reshape(row.shape[0], -1, size, *row.shape[2:]).swapaxes(0, 1)

  def on_device(rows: Rows, *heads: jax.Array) -> Any:
    # Gather the heads once, not for every chunk.
    head_VxD, *fixed = (constrain(head, 'vocab', None) for head in heads)
    sums = on_rows(tuple(map(cut, rows)), head_VxD, tuple(fixed))
    return jax.tree.map(lambda x: x[:, None], sums)

  dtype = rows[0].dtype
  head_VxD, *others = (head.astype(dtype) for head in (embedding_VxD, *fixed))
  axes = ('vocab', 'width')
  sums = per_device.on_each_device(on_device, rows, head_VxD, axes, fixed=others)
  return jax.tree.map(lambda x: jnp.sum(x, axis=1), sums)  # over the devices that split a row


def sum_chunks(
  chunk_sums: Callable[..., Any], rows: Rows, head_VxD: jax.Array, fixed: Sequence[jax.Array]
) -> Any:
  """Return the sums [B] over P chunks [P, B, C, …] of rows, whose logits are not kept."""
  return _summed(jax.lax.map(lambda chunk: chunk_sums(head_VxD, *fixed, *chunk), rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(
  objective: Objective, rows: Rows, head_VxD: jax.Array, fixed: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
  """Return the value [1] of all rows, and the sums [B]."""
  sums = sum_chunks(objective.sums, rows, head_VxD, fixed)
  return objective.weigh(sums)[None], sums


def _with_gradient_forward(
  objective: Objective, rows: Rows, head_VxD: jax.Array, fixed: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, Any], Any]:
  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def gradient(head_VxD: jax.Array, hidden_BxCxD: jax.Array, others: Rows) -> tuple[jax.Array, Any]:
    sums = objective.sums(head_VxD, *fixed, hidden_BxCxD, *others)
    return objective.weigh(sums), sums

  def body(total_VxD: jax.Array, chunk: Rows) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    (d_head_VxD, d_hidden_BxCxD), sums = gradient(head_VxD, chunk[0], chunk[1:])
    return total_VxD + d_head_VxD.astype(total_VxD.dtype), (sums, d_hidden_BxCxD)

  zero = jnp.zeros_like(head_VxD, jnp.float32)
  d_head_VxD, (sums, d_hidden_PxBxCxD) = jax.lax.scan(body, zero, rows)
  sums = _summed(sums)
  return (objective.weigh(sums)[None], sums), (
    (d_hidden_PxBxCxD, d_head_VxD),
    tuple(None for _ in rows[1:]),
  )


def _with_gradient_backward(
  objective: Objective, saved: Any, change: tuple[jax.Array, Any]
) -> tuple[Any, jax.Array, None]:
  del objective
  gradients, no_gradients = saved
  dtype = gradients[0].dtype  # also the dtype of the head, whose gradient was summed in float32
  d_hidden, d_head = ((g.astype(jnp.float32) * change[0][0]).astype(dtype) for g in gradients)
  return (d_hidden, *no_gradients), d_head, None


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


def _summed(sums_PxB: Any) -> Any:
  return jax.tree.map(functools.partial(jnp.sum, axis=0), sums_PxB)
