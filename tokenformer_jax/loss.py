"""Logits and cross-entropy over a large vocabulary, a chunk of positions at a time."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.products import product
from tokenformer_jax.sharding import constrain


def logits(hidden_BxTxD: jax.Array, embedding_VxD: jax.Array) -> jax.Array:
  """Scores of all tokens [B, T, V], in float32."""
  logits_BxTxV = product(
    'BTD,VD->BTV', hidden_BxTxD, embedding_VxD, preferred_element_type=jnp.float32
  )
  return constrain(logits_BxTxV, 'batch', None, 'vocab')


class LossSums(NamedTuple):
  """Sums over predicted tokens, so that parts add up: one number each, or one for every row."""

  nats: jax.Array  # Σ −log p(target)
  log_z_squared: jax.Array  # Σ (log Σ exp logits)², for the z-loss
  tokens: jax.Array  # number of targets
  correct: jax.Array  # number of targets that have the largest logit


def loss_sums(
  hidden_BxTxD: jax.Array, embedding_VxD: jax.Array, targets_BxT: jax.Array, *, chunk: int
) -> LossSums:
  """Cross-entropy in nats of a whole batch; for the arguments see `row_loss_sums`."""
  rows = row_loss_sums(hidden_BxTxD, embedding_VxD, targets_BxT, chunk=chunk)
  return jax.tree.map(jnp.sum, rows)


def row_loss_sums(
  hidden_BxTxD: jax.Array, embedding_VxD: jax.Array, targets_BxT: jax.Array, *, chunk: int
) -> LossSums:
  """Cross-entropy in nats of every sequence, a chunk of positions at a time.

  Only [B, chunk, V] logits are alive at once, in the backward pass too, which computes them again.

  Args:
    hidden_BxTxD: what the head reads.
    embedding_VxD: the head's matrix.
    targets_BxT: the next tokens; −1 marks a position that does not count.
    chunk: positions of each sequence in a part; the last part may be shorter.

  Returns:
    Float32 sums [B] over the positions that count.
  """
  batch, length, width = hidden_BxTxD.shape
  chunk = min(chunk, length)
  if padding := -length % chunk:
    hidden_BxTxD = jnp.pad(hidden_BxTxD, ((0, 0), (0, padding), (0, 0)))
    targets_BxT = jnp.pad(targets_BxT, ((0, 0), (0, padding)), constant_values=-1)
  parts = (length + padding) // chunk
  # Gathered once over the axis that splits its width, and not again for every part. The gradient
  # is summed over parts in the head's own dtype.
  gathered_VxD = constrain(embedding_VxD.astype(hidden_BxTxD.dtype), 'vocab', None)
  embedding_VxD = gathered_VxD.astype(embedding_VxD.dtype)
  if parts == 1:
    return _part_sums(embedding_VxD, hidden_BxTxD, targets_BxT)
  hidden_PxBxCxD = hidden_BxTxD.reshape(batch, parts, chunk, width).swapaxes(0, 1)
  targets_PxBxC = targets_BxT.reshape(batch, parts, chunk).swapaxes(0, 1)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def body(sums, part):
    return jax.tree.map(jnp.add, sums, _part_sums(embedding_VxD, *part)), None

  zero = LossSums(*(jnp.zeros(batch, jnp.float32),) * 4)
  return jax.lax.scan(body, zero, (hidden_PxBxCxD, targets_PxBxC))[0]


def _part_sums(embedding_VxD: jax.Array, hidden_BxCxD: jax.Array, targets_BxC: jax.Array):
  logits_BxCxV = logits(hidden_BxCxD, embedding_VxD)
  log_z = jax.nn.logsumexp(logits_BxCxV, axis=-1)
  at_target = jnp.take_along_axis(
    logits_BxCxV, jnp.maximum(targets_BxC, 0)[..., None], axis=-1
  ).squeeze(-1)
  counts = (targets_BxC >= 0).astype(jnp.float32)
  # The target has the largest logit; no argmax over a vocabulary that may be split over devices.
  correct = (at_target >= jnp.max(logits_BxCxV, axis=-1)).astype(jnp.float32)
  return LossSums(
    nats=jnp.sum(counts * (log_z - at_target), axis=-1),
    log_z_squared=jnp.sum(counts * jnp.square(log_z), axis=-1),
    tokens=jnp.sum(counts, axis=-1),
    correct=jnp.sum(counts * jax.lax.stop_gradient(correct), axis=-1),
  )
