"""Logits and cross-entropy over a large vocabulary, a chunk of positions at a time."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.model.products import product
from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.sharding import constrain


def logits(hidden_BxTxD: jax.Array, embedding_VxD: jax.Array) -> jax.Array:
  """Return the scores of all tokens [B, T, V], in float32."""
  logits_BxTxV = product(
    'BTD,VD->BTV', hidden_BxTxD, embedding_VxD, preferred_element_type=jnp.float32
  )
  return constrain(logits_BxTxV, 'batch', None, 'vocab')


class LossSums(NamedTuple):
  """Sums over predicted tokens: one number each, or one per row. Sums of parts add up."""

  nats: jax.Array  # Σ −log p(target)
  log_z_squared: jax.Array  # Σ (log Σ exp logits)², for the z-loss
  tokens: jax.Array  # number of targets
  correct: jax.Array  # number of targets that have the largest logit


def objective(
  hidden_BxTxD: jax.Array,
  embedding_VxD: jax.Array,
  targets_BxT: jax.Array,
  *,
  z_loss: float,
  chunk: int,
) -> tuple[jax.Array, LossSums]:
  """Return the training objective of a batch, Σ −log p(target) + z_loss (log Z)², in float32.

  The forward pass computes the gradient of each chunk of positions together with its logits. So the
  logits are neither saved nor recomputed; recomputing would be a fourth product with the head.

  Args:
    hidden_BxTxD: the input of the head.
    embedding_VxD: the matrix of the head.
    targets_BxT: the next tokens; −1 marks a position that does not count.
    z_loss: the weight of (log Z)².
    chunk: the number of positions of each sequence in a chunk; the last chunk may be shorter.

  Returns:
    The objective, and the sums that it consists of, without a gradient.
  """
  on_rows = functools.partial(_objective, z_loss)
  parts, sums = _in_chunks(on_rows, hidden_BxTxD, embedding_VxD, targets_BxT, chunk)
  return jnp.sum(parts), jax.lax.stop_gradient(jax.tree.map(jnp.sum, sums))


def loss_sums(
  hidden_BxTxD: jax.Array, embedding_VxD: jax.Array, targets_BxT: jax.Array, *, chunk: int
) -> LossSums:
  """Return the cross-entropy in nats of a whole batch; for the arguments see `objective`."""
  rows = row_loss_sums(hidden_BxTxD, embedding_VxD, targets_BxT, chunk=chunk)
  return jax.tree.map(jnp.sum, rows)


def row_loss_sums(
  hidden_BxTxD: jax.Array, embedding_VxD: jax.Array, targets_BxT: jax.Array, *, chunk: int
) -> LossSums:
  """Return the cross-entropy in nats of every sequence; for the arguments see `objective`.

  Only [B, chunk, V] logits are in memory at once.

  Returns:
    Float32 sums [B] over the positions that count.
  """
  return _in_chunks(_sums, hidden_BxTxD, embedding_VxD, targets_BxT, chunk)


def _in_chunks(
  on_rows: Callable[[tuple[jax.Array, jax.Array], jax.Array], Any],
  hidden_BxTxD: jax.Array,
  embedding_VxD: jax.Array,
  targets_BxT: jax.Array,
  chunk: int,
) -> Any:
  """Apply `on_rows` to P chunks [P, B, C, D] and [P, B, C], and the head [V, D]."""
  batch, length, width = hidden_BxTxD.shape
  chunk = min(chunk, length)
  if padding := -length % chunk:
    hidden_BxTxD = jnp.pad(hidden_BxTxD, ((0, 0), (0, padding), (0, 0)))
    targets_BxT = jnp.pad(targets_BxT, ((0, 0), (0, padding)), constant_values=-1)
  rows = hidden_BxTxD.reshape(batch, -1, chunk, width), targets_BxT.reshape(batch, -1, chunk)

  def on_device(rows: tuple[jax.Array, jax.Array], head_VxD: jax.Array) -> Any:
    # Gather the head once, not for every chunk.
    head_VxD = constrain(head_VxD, 'vocab', None)
    return on_rows(jax.tree.map(lambda rows: rows.swapaxes(0, 1), rows), head_VxD)

  head_VxD = embedding_VxD.astype(hidden_BxTxD.dtype)
  return per_device.on_each_device(on_device, rows, head_VxD, ('vocab', 'width'))


def _sums(rows: tuple[jax.Array, jax.Array], head_VxD: jax.Array) -> LossSums:
  return _summed(jax.lax.map(lambda part: _part_sums(head_VxD, *part), rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _objective(
  z_loss: float, rows: tuple[jax.Array, jax.Array], head_VxD: jax.Array
) -> tuple[jax.Array, LossSums]:
  """Return the objective [1] of all rows, and the sums [B]."""
  sums = _sums(rows, head_VxD)
  return _weighted(sums, z_loss)[None], sums


def _objective_forward(
  z_loss: float, rows: tuple[jax.Array, jax.Array], head_VxD: jax.Array
) -> tuple[tuple[jax.Array, LossSums], tuple[jax.Array, jax.Array]]:
  @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
  def gradient(
    head_VxD: jax.Array, hidden_BxCxD: jax.Array, targets_BxC: jax.Array
  ) -> tuple[jax.Array, LossSums]:
    sums = _part_sums(head_VxD, hidden_BxCxD, targets_BxC)
    return _weighted(sums, z_loss), sums

  def body(
    total_VxD: jax.Array, part: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, tuple[LossSums, jax.Array]]:
    (d_head_VxD, d_hidden_BxCxD), sums = gradient(head_VxD, *part)
    return total_VxD + d_head_VxD.astype(total_VxD.dtype), (sums, d_hidden_BxCxD)

  zero = jnp.zeros_like(head_VxD, jnp.float32)
  d_head_VxD, (sums, d_hidden_PxBxCxD) = jax.lax.scan(body, zero, rows)
  sums = _summed(sums)
  return (_weighted(sums, z_loss)[None], sums), (d_hidden_PxBxCxD, d_head_VxD)


def _objective_backward(
  z_loss: float,
  gradients: tuple[jax.Array, jax.Array],
  change: tuple[jax.Array, LossSums],
) -> tuple[tuple[jax.Array, None], jax.Array]:
  del z_loss
  dtype = gradients[0].dtype  # also the dtype of the head, whose gradient was summed in float32
  d_hidden, d_head = ((g.astype(jnp.float32) * change[0][0]).astype(dtype) for g in gradients)
  return (d_hidden, None), d_head


_objective.defvjp(_objective_forward, _objective_backward)


def _weighted(sums: LossSums, z_loss: float) -> jax.Array:
  return jnp.sum(sums.nats + z_loss * sums.log_z_squared)


def _summed(sums_PxB: LossSums) -> LossSums:
  return jax.tree.map(functools.partial(jnp.sum, axis=0), sums_PxB)


def _part_sums(head_VxD: jax.Array, hidden_BxCxD: jax.Array, targets_BxC: jax.Array) -> LossSums:
  logits_BxCxV = logits(hidden_BxCxD, head_VxD)
  vocab, ids_BxC = logits_BxCxV.shape[-1], targets_BxC
  top = jnp.max(jax.lax.stop_gradient(logits_BxCxV), axis=-1)
  if per_device.is_split('vocab'):
    ids_BxC = ids_BxC - per_device.first_index('vocab', vocab)
    top = per_device.largest(top, 'vocab')
  total = jnp.sum(jnp.exp(logits_BxCxV - top[..., None]), axis=-1)
  at_target = jnp.take_along_axis(logits_BxCxV, jnp.clip(ids_BxC, 0, vocab - 1)[..., None], axis=-1)
  at_target = jnp.where((ids_BxC >= 0) & (ids_BxC < vocab), at_target.squeeze(-1), 0)
  if per_device.is_split('vocab'):
    total, at_target = per_device.total((total, at_target), 'vocab')
  log_z = top + jnp.log(total)
  counts = (targets_BxC >= 0).astype(jnp.float32)
  correct = (jax.lax.stop_gradient(at_target) >= top).astype(jnp.float32)
  return LossSums(
    nats=jnp.sum(counts * (log_z - at_target), axis=-1),
    log_z_squared=jnp.sum(counts * jnp.square(log_z), axis=-1),
    tokens=jnp.sum(counts, axis=-1),
    correct=jnp.sum(counts * correct, axis=-1),
  )
