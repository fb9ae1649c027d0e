"""The gradient of the logits in the dtype of activations."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from tokenformer_jax.model import loss


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
  halves = jnp.bfloat16(hidden), jnp.bfloat16(head)
  found = list(_products(jax.make_jaxpr(_gradient)(*halves, targets).jaxpr))
  assert found
  assert all(dtypes == {'bfloat16'} for dtypes in found)
  exact = _gradient(*(jnp.float32(x) for x in halves), targets)
  for rounded, reference in zip(_gradient(*halves, targets), exact, strict=True):
    error = np.linalg.norm(np.float32(rounded) - reference) / np.linalg.norm(reference)
    assert error < 6e-3
