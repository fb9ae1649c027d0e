"""Logits and cross-entropy over a large vocabulary, a chunk of positions at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.model.products import product
from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.sharding import constrain

Rows = tuple[jax.Array, ...]  # arrays [B, T, …], the input of the head first

_MOST = 70.0  # exp of it, times the size of a vocabulary, is a finite float32


@jax.named_scope('head_and_loss')
def logits(hidden_BxTxD: jax.Array, embedding_VxD: jax.Array) -> jax.Array:
  """Return the scores of all tokens [B, T, V], in float32.

  Their gradient is rounded to the dtype of the input, as a matrix unit would round it. Otherwise a
  GPU multiplies float32 with float32, at half the speed.
  """
  return constrain(_scores(hidden_BxTxD, embedding_VxD), 'batch', 'slots', 'vocab')


@jax.custom_vjp
def _scores(hidden_BxTxD: jax.Array, embedding_VxD: jax.Array) -> jax.Array:
  return product('BTD,VD->BTV', hidden_BxTxD, embedding_VxD, preferred_element_type=jnp.float32)


def _scores_forward(hidden_BxTxD: jax.Array, embedding_VxD: jax.Array) -> tuple[jax.Array, Rows]:
  return _scores(hidden_BxTxD, embedding_VxD), (hidden_BxTxD, embedding_VxD)


def _scores_backward(inputs: Rows, change_BxTxV: jax.Array) -> tuple[jax.Array, jax.Array]:
  hidden_BxTxD, embedding_VxD = inputs
  _, gradient = jax.vjp(functools.partial(product, 'BTD,VD->BTV'), hidden_BxTxD, embedding_VxD)
  return gradient(change_BxTxV.astype(hidden_BxTxD.dtype))


_scores.defvjp(_scores_forward, _scores_backward)


class LossSums(NamedTuple):
  """Sums over predicted tokens: one number each, or one per row. Sums of chunks add up."""

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

  It has a gradient by the input and the matrix of the head: see `minimized`. The target −1 marks a
  position that does not count. `chunk` is the number of positions of each sequence in a chunk.

  Returns:
    The objective, and the sums that it consists of, without a gradient.
  """
  plain = Objective(_training_sums, functools.partial(_weighted, z_loss))
  return minimized(plain, (hidden_BxTxD, targets_BxT), embedding_VxD, chunk=chunk)


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

  The sums are float32 [B]. Only [B, chunk, V] logits are in memory at once.
  """
  on_rows = functools.partial(_sums, _plain_sums)
  return _in_chunks(on_rows, (hidden_BxTxD, targets_BxT), embedding_VxD, (), chunk)


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
  values, sums = _in_chunks(on_rows, rows, embedding_VxD, fixed, chunk)
  return jnp.sum(values), jax.lax.stop_gradient(jax.tree.map(jnp.sum, sums))


def _in_chunks(
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


def _sums(
  chunk_sums: Callable[..., Any], rows: Rows, head_VxD: jax.Array, fixed: Sequence[jax.Array]
) -> Any:
  return _summed(jax.lax.map(lambda chunk: chunk_sums(head_VxD, *fixed, *chunk), rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(
  objective: Objective, rows: Rows, head_VxD: jax.Array, fixed: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
  """Return the value [1] of all rows, and the sums [B]."""
  sums = _sums(objective.sums, rows, head_VxD, fixed)
  return objective.weigh(sums)[None], sums


def _forward(
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


def _backward(
  objective: Objective, saved: Any, change: tuple[jax.Array, Any]
) -> tuple[Any, jax.Array, None]:
  del objective
  gradients, no_gradients = saved
  dtype = gradients[0].dtype  # also the dtype of the head, whose gradient was summed in float32
  d_hidden, d_head = ((g.astype(jnp.float32) * change[0][0]).astype(dtype) for g in gradients)
  return (d_hidden, *no_gradients), d_head, None


_with_gradient.defvjp(_forward, _backward)


def _weighted(z_loss: float, sums: LossSums) -> jax.Array:
  return jnp.sum(sums.nats + z_loss * sums.log_z_squared)


def _summed(sums_PxB: Any) -> Any:
  return jax.tree.map(functools.partial(jnp.sum, axis=0), sums_PxB)


def _plain_sums(head_VxD: jax.Array, hidden_BxCxD: jax.Array, targets_BxC: jax.Array) -> LossSums:
  logits_BxCxV = logits(hidden_BxCxD, head_VxD)
  return chunk_sums(logits_BxCxV, largest(logits_BxCxV), targets_BxC)


def _training_sums(
  head_VxD: jax.Array, hidden_BxCxD: jax.Array, targets_BxC: jax.Array
) -> LossSums:
  """Return the sums of `_plain_sums`, with a gradient made in fewer passes over the logits."""
  ids_BxC = targets_BxC
  if per_device.is_split('vocab'):
    ids_BxC = ids_BxC - per_device.first_index('vocab', len(head_VxD))
  nats, at_target, rival = _compare(hidden_BxCxD, head_VxD, ids_BxC)
  is_correct = (jax.lax.stop_gradient(rival) <= 1).astype(jnp.float32)
  return _counted(nats, at_target + nats, is_correct, targets_BxC)


@jax.custom_vjp
def _compare(
  hidden_BxCxD: jax.Array, head_VxD: jax.Array, ids_BxC: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Compare the logits of all tokens with the target's.

  With exp(logit − target's logit) for each other token, the sum S of these is all that the loss
  needs: −log p(target) is log(1 + S). So one pass makes S and the numbers for the gradient from the
  product of the head, in the dtype of activations, and a TPU writes no logits to memory. A logit
  counts as at most `_MOST` above the target's, which keeps S finite.

  The ids are relative to this device's shard of the vocabulary.

  Returns:
    −log p(target), the logit of the target, and the largest exp(logit − target's logit) of another
    token, float32 [B, C].
  """
  return _compared(hidden_BxCxD, head_VxD, ids_BxC)[0]


def _compared(
  hidden_BxCxD: jax.Array, head_VxD: jax.Array, ids_BxC: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  """Return the result of `_compare`, exp(logit − target's logit) [B, C, V], and 1 + S."""
  targets_BxCxD = jnp.take(head_VxD, ids_BxC, axis=0, mode='clip').astype(jnp.float32)
  at_target_BxC = jnp.sum(hidden_BxCxD.astype(jnp.float32) * targets_BxCxD, axis=-1)
  if is_split := per_device.is_split('vocab'):
    is_here = (ids_BxC >= 0) & (ids_BxC < len(head_VxD))
    at_target_BxC = per_device.total(jnp.where(is_here, at_target_BxC, 0), 'vocab')
  logits_BxCxV = logits(hidden_BxCxD, head_VxD)
  above = jnp.minimum(logits_BxCxV - at_target_BxC[..., None], _MOST)
  odds_BxCxV = jnp.where(_is_target(ids_BxC, head_VxD), 0, jnp.exp(above))
  total, rival = jnp.sum(odds_BxCxV, axis=-1), jnp.max(odds_BxCxV, axis=-1)
  if is_split:
    total, rival = per_device.total(total, 'vocab'), per_device.largest(rival, 'vocab')
  results = jnp.log1p(total), at_target_BxC, rival
  # The barrier keeps the compiler for TPUs from leaving out the rounding and saving float32.
  kept_BxCxV = jax.lax.optimization_barrier(odds_BxCxV.astype(hidden_BxCxD.dtype))
  return results, (kept_BxCxV, 1 + total)


def _is_target(ids_BxC: jax.Array, head_VxD: jax.Array) -> jax.Array:
  return ids_BxC[..., None] == jnp.arange(len(head_VxD))[None, None]


def _compare_forward(hidden_BxCxD: jax.Array, head_VxD: jax.Array, ids_BxC: jax.Array):
  results, odds = _compared(hidden_BxCxD, head_VxD, ids_BxC)
  return results, (hidden_BxCxD, head_VxD, ids_BxC, *odds)


def _compare_backward(saved: Rows, changes: Rows) -> tuple[jax.Array, jax.Array, None]:
  hidden_BxCxD, head_VxD, ids_BxC, odds_BxCxV, total_BxC = saved
  of_nats, of_target, _ = changes
  share = of_nats / total_BxC
  at_target, others = share - of_nats + of_target, odds_BxCxV.astype(jnp.float32)
  change_BxCxV = jnp.where(
    _is_target(ids_BxC, head_VxD), at_target[..., None], others * share[..., None]
  )
  return *_scores_backward((hidden_BxCxD, head_VxD), change_BxCxV), None


_compare.defvjp(_compare_forward, _compare_backward)


def largest(logits_BxCxV: jax.Array) -> jax.Array:
  """Return the largest logit of each position [B, C], without a gradient."""
  top = jnp.max(jax.lax.stop_gradient(logits_BxCxV), axis=-1)
  return per_device.largest(top, 'vocab') if per_device.is_split('vocab') else top


def chunk_sums(logits_BxCxV: jax.Array, top: jax.Array, targets_BxC: jax.Array) -> LossSums:
  """Return the sums [B] of a chunk of positions; `top` is from `largest`."""
  vocab, ids_BxC = logits_BxCxV.shape[-1], targets_BxC
  if per_device.is_split('vocab'):
    ids_BxC = ids_BxC - per_device.first_index('vocab', vocab)
  total = jnp.sum(jnp.exp(logits_BxCxV - top[..., None]), axis=-1)
  at_target = jnp.take_along_axis(logits_BxCxV, jnp.clip(ids_BxC, 0, vocab - 1)[..., None], axis=-1)
  at_target = jnp.where((ids_BxC >= 0) & (ids_BxC < vocab), at_target.squeeze(-1), 0)
  if per_device.is_split('vocab'):
    total, at_target = per_device.total((total, at_target), 'vocab')
  log_z = top + jnp.log(total)
  is_correct = (jax.lax.stop_gradient(at_target) >= top).astype(jnp.float32)
  return _counted(log_z - at_target, log_z, is_correct, targets_BxC)


def _counted(
  nats_BxC: jax.Array, log_z_BxC: jax.Array, is_correct_BxC: jax.Array, targets_BxC: jax.Array
) -> LossSums:
  """Return the sums [B] over the positions that have a target."""
  counts = (targets_BxC >= 0).astype(jnp.float32)
  return LossSums(
    nats=jnp.sum(counts * nats_BxC, axis=-1),
    log_z_squared=jnp.sum(counts * jnp.square(log_z_BxC), axis=-1),
    tokens=jnp.sum(counts, axis=-1),
    correct=jnp.sum(counts * is_correct_BxC, axis=-1),
  )
