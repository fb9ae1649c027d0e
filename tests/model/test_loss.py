"""The training loss, and the gradient of the logits in the dtype of activations."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tokenformer_jax.config import MeshConfig
from tokenformer_jax.model import loss
from tokenformer_jax.parallel import sharding


def _products(jaxpr):
  """Yield the dtypes of the operands of every matrix product."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      yield {str(operand.aval.dtype) for operand in equation.invars}
    for inner in jaxprs_in_params(equation.params):
      yield from _products(inner)


def _gradient(hidden, head, targets):
  def value(hidden, head):
    return loss.objective(hidden, head, targets, z_loss=1e-4, chunk=4)[0]

  return jax.grad(value, argnums=(0, 1))(hidden, head)


def test_no_product_of_the_head_is_in_float32():
  rng = np.random.default_rng(0)
  hidden, head = rng.normal(size=(2, 8, 16)), rng.normal(size=(24, 16))
  targets = rng.integers(-1, 24, (2, 8))
  halves = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
  found = list(_products(jax.make_jaxpr(_gradient)(*halves, targets).jaxpr))
  assert found
  assert all(dtypes == {'bfloat16'} for dtypes in found)
  gradient = jax.jit(_gradient)
  exact = gradient(*(np.float32(x) for x in halves), targets)
  for rounded, reference in zip(gradient(*halves, targets), exact, strict=True):
    error = np.linalg.norm(np.float32(rounded) - np.asarray(reference)) / np.linalg.norm(reference)
    assert error < 6e-3


@pytest.mark.parametrize(
  ('scale', 'cap', 'mesh'),
  [
    (1, 0.0, {'replica': 2, 'fsdp': 4}),
    (30, 0.0, {'fsdp': 2, 'tokens': 4}),
    (1, 3.0, None),
  ],
)
def test_the_training_loss_and_its_gradient_are_those_of_the_logits(scale, cap, mesh):
  rng = np.random.default_rng(1)
  hidden, head = rng.normal(size=(8, 8, 16)), scale * rng.normal(size=(24, 16))
  targets = rng.integers(-1, 24, (8, 8))
  hidden, head = np.float32(hidden), np.float32(head)
  if scale > 1:  # as late in training: the target has nearly all of the probability
    hidden = head[np.maximum(targets, 0)] / scale**2

  def plain(hidden, head):
    logits = jnp.einsum('BTD,VD->BTV', hidden, head, precision='highest')
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    log_z = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    counts = targets >= 0
    correct = counts & (jnp.argmax(logits, axis=-1) == targets)
    value = jnp.sum(jnp.where(counts, log_z - at_target + 1e-2 * log_z**2, 0))
    return value, (jnp.sum(counts), jnp.sum(correct))

  def ours(hidden, head):
    value, sums = loss.objective(hidden, head, targets, z_loss=1e-2, chunk=3, cap=cap)
    return value, (sums.tokens, sums.correct)

  plain, ours = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True)) for f in (plain, ours))
  (expected, counts), expected_gradient = plain(hidden, head)
  on = jax.set_mesh(sharding.make_mesh(MeshConfig(**mesh))) if mesh else contextlib.nullcontext()
  with on:
    (found, own_counts), gradient = ours(hidden, head)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert own_counts == counts
  for one, reference in zip(gradient, expected_gradient, strict=True):
    error = np.linalg.norm(np.asarray(one) - np.asarray(reference)) / np.linalg.norm(reference)
    assert error < 1e-5


def test_logits_far_above_the_target_keep_the_loss_finite():
  hidden, targets = np.full((1, 4, 2), 100, np.float32), np.zeros((1, 4), np.int32)
  head = np.float32([[-1, 0], [1, 0], [0, 0]])

  @jax.jit
  @jax.value_and_grad
  def both(hidden):
    return loss.objective(hidden, head, targets, z_loss=0.0, chunk=4)[0]

  value, gradient = map(np.asarray, both(hidden))
  assert 4 * 70 <= value < 4 * 72, 'a logit counts as at most 70 above that of the target'
  assert np.isfinite(gradient).all()
  assert (gradient[..., 0] > 0).all(), 'the target gains'
