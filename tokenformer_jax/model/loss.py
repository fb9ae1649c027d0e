"""Logits, and cross-entropy over a large vocabulary: its sums, and their gradient."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.model.chunks import Objective, Rows, in_chunks, minimized, sum_chunks
from tokenformer_jax.model.kernels import soft_cap
from tokenformer_jax.model.products import product
from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.sharding import constrain

_MOST = 70.0  # exp of it, times the size of a vocabulary, is a finite float32


@jax.named_scope('head_and_loss')
def logits(hidden_BxTxD: jax.Array, embedding_VxD: jax.Array, cap: float = 0.0) -> jax.Array:
  """Return the scores of all tokens [B, T, V], in float32; `cap` is `LMConfig.logit_cap`.

  Their gradient is rounded to the dtype of the input, as a matrix unit would round it. Otherwise a
  GPU multiplies float32 with float32, at half the speed.
  """
  scores_BxTxV = _scores(hidden_BxTxD, embedding_VxD)
  return constrain(soft_cap(scores_BxTxV, cap), 'batch', 'slots', 'vocab')


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
  cap: float = 0.0,
) -> tuple[jax.Array, LossSums]:
  """Return the training objective of a batch, Σ −log p(target) + z_loss (log Z)², in float32.

  It has a gradient by the input and the matrix of the head: see `minimized`. The target −1 marks a
  position that does not count. `chunk` is the number of positions of each sequence in a chunk,
  and `cap` is that of `logits`.

  Returns:
    The objective, and the sums that it consists of, without a gradient.
  """
  sums = functools.partial(_plain_sums, cap) if cap else _training_sums
  plain = Objective(sums, functools.partial(_weighted, z_loss))
  return minimized(plain, (hidden_BxTxD, targets_BxT), embedding_VxD, chunk=chunk)


def weighted_objective(
  hidden_BxTxD: jax.Array,
  embedding_VxD: jax.Array,
  targets_BxT: jax.Array,
  weights_B: jax.Array,
  *,
  chunk: int,
  cap: float = 0.0,
) -> jax.Array:
  """Return the sum over rows of their weight · Σ −log p(target), in float32.

  It has a gradient by the input and the matrix of the head, none by the weights: see `objective`.
  """
  sums = functools.partial(_plain_sums, cap) if cap else _training_sums

  def weighted(head_VxD: jax.Array, *chunks: jax.Array) -> jax.Array:
    *inputs, weights_BxC = chunks
    return weights_BxC[:, 0] * sums(head_VxD, *inputs).nats

  weights_BxT = jnp.broadcast_to(weights_B[:, None], targets_BxT.shape)
  rows = hidden_BxTxD, targets_BxT, weights_BxT
  return minimized(Objective(weighted, jnp.sum), rows, embedding_VxD, chunk=chunk)[0]


def loss_sums(
  hidden_BxTxD: jax.Array, embedding_VxD: jax.Array, targets_BxT: jax.Array, **how: Any
) -> LossSums:
  """Return the cross-entropy in nats of a whole batch; for the arguments see `row_loss_sums`."""
  rows = row_loss_sums(hidden_BxTxD, embedding_VxD, targets_BxT, **how)
  return jax.tree.map(jnp.sum, rows)


def row_loss_sums(
  hidden_BxTxD: jax.Array,
  embedding_VxD: jax.Array,
  targets_BxT: jax.Array,
  *,
  chunk: int,
  cap: float = 0.0,
) -> LossSums:
  """Return the cross-entropy in nats of every sequence; for the arguments see `objective`.

  The sums are float32 [B]. Only [B, chunk, V] logits are in memory at once.
  """
  on_rows = functools.partial(sum_chunks, functools.partial(_plain_sums, cap))
  return in_chunks(on_rows, (hidden_BxTxD, targets_BxT), embedding_VxD, (), chunk)


def _weighted(z_loss: float, sums: LossSums) -> jax.Array:
  return jnp.sum(sums.nats + z_loss * sums.log_z_squared)


def _plain_sums(
  cap: float, head_VxD: jax.Array, hidden_BxCxD: jax.Array, targets_BxC: jax.Array
) -> LossSums:
  logits_BxCxV = logits(hidden_BxCxD, head_VxD, cap)
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
  nats_grad, target_grad, _ = changes
  share = nats_grad / total_BxC
  at_target, others = share - nats_grad + target_grad, odds_BxCxV.astype(jnp.float32)
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
