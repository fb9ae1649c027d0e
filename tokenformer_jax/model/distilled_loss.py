"""Cross-entropy to a teacher's probabilities, in the chunks of positions of the ordinary loss."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.model.chunks import Objective, minimized
from tokenformer_jax.model.loss import LossSums, chunk_sums, largest, logits
from tokenformer_jax.parallel import per_device


class DistilledSums(NamedTuple):
  """Sums over predicted tokens. Sums of chunks add up."""

  student: LossSums
  teacher: LossSums
  # Σ −Σ_v p(v) log q(v), with p of the teacher and q of the student at the temperature
  soft_nats: jax.Array


class Heads(NamedTuple):
  """The input of a model's head [B, T, D] and its matrix [V, D]; the width is each model's own."""

  hidden_BxTxD: jax.Array
  embedding_VxD: jax.Array


def distilled_objective(
  student: Heads,
  teacher: Heads,
  targets_BxT: jax.Array,
  *,
  weight: float,
  temperature: float,
  z_loss: float,
  chunk: int,
  caps: tuple[float, float] = (0.0, 0.0),
) -> tuple[jax.Array, DistilledSums]:
  """Return the training objective of a batch with a teacher, in float32.

  It is Σ weight · T² · soft + (1 − weight) · nats + z_loss · (log Z)² over the positions whose
  target is not −1. Here soft is the cross-entropy to the teacher's probabilities, with both models'
  logits divided by the temperature T, nats is the cross-entropy to the targets, Z is the student's,
  and `weight` is from 0 to 1. `caps` are those of the student's and of the teacher's logits. Only
  [B, chunk, V] logits of each model are in memory at once. Only the student gets a gradient: see
  `chunks.minimized`.

  Returns:
    The objective, and the sums that it consists of, without a gradient.
  """

  def weigh(sums: DistilledSums) -> jax.Array:
    plain, soft = sums.student, sums.soft_nats
    return jnp.sum(
      weight * temperature**2 * soft + (1 - weight) * plain.nats + z_loss * plain.log_z_squared
    )

  fixed = jax.lax.stop_gradient(teacher)
  return minimized(
    Objective(functools.partial(_chunk_sums, temperature, caps), weigh),
    (student.hidden_BxTxD, targets_BxT, fixed.hidden_BxTxD),
    student.embedding_VxD,
    (fixed.embedding_VxD,),
    chunk=chunk,
  )


def _chunk_sums(
  temperature: float,
  caps: tuple[float, float],
  head_VxD: jax.Array,
  teacher_head_VxE: jax.Array,
  hidden_BxCxD: jax.Array,
  targets_BxC: jax.Array,
  teacher_hidden_BxCxE: jax.Array,
) -> DistilledSums:
  student = logits(hidden_BxCxD, head_VxD, caps[0])
  teacher = jax.lax.stop_gradient(logits(teacher_hidden_BxCxE, teacher_head_VxE, caps[1]))
  tops = largest(student), largest(teacher)
  soft_BxC = _cross_entropy(student, teacher, tops, temperature)
  return DistilledSums(
    student=chunk_sums(student, tops[0], targets_BxC),
    teacher=chunk_sums(teacher, tops[1], targets_BxC),
    soft_nats=jnp.sum(jnp.where(targets_BxC >= 0, soft_BxC, 0), axis=-1),
  )


def _cross_entropy(
  student_BxCxV: jax.Array,
  teacher_BxCxV: jax.Array,
  tops: tuple[jax.Array, jax.Array],
  temperature: float,
) -> jax.Array:
  """Return the cross-entropy [B, C] to the teacher's probabilities, from logits and their maxima.

  With s and t relative to their maxima it is log Σ exp(s/T) − Σ exp(t/T) s/T / Σ exp(t/T).
  """
  student = (student_BxCxV - tops[0][..., None]) / temperature
  weights = jnp.exp((teacher_BxCxV - tops[1][..., None]) / temperature)
  sums = tuple(jnp.sum(x, axis=-1) for x in (jnp.exp(student), weights, weights * student))
  if per_device.is_split('vocab'):
    sums = per_device.total(sums, 'vocab')
  total_student, total_teacher, product = sums
  return jnp.log(total_student) - product / total_teacher
