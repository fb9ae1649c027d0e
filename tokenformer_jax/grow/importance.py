"""How much each parameter token does for the loss, by which tokens are dropped."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.params import Axes, Params, is_axes, token_axis


def of_tokens(
  loss: Callable[[Params, Any], jax.Array], params: Params, axes: Params, batch: Any
) -> Params:
  """The mean over examples of |⟨v, ∂loss/∂v⟩|, for the value v of every parameter token.

  To first order that is what the loss of an example changes by when the token's contribution to the
  output is taken away (Molchanov et al. 2019, arXiv 1906.10771, eq. 7, which squares it). A token
  whose key is zero has weight zero and importance zero.

  Args:
    loss: from parameters and a batch of one example to its mean loss.
    params: the model's.
    axes: their logical axes.
    batch: the calibration examples, a pytree of arrays [B, …].

  Returns:
    A tree like the parameters. For an array with parameter tokens, float32 [..., N], of a key that
    of its value; for another one a zero.
  """

  def add(total: Params, example: Any) -> tuple[Params, None]:
    gradient = jax.grad(loss)(params, jax.tree.map(lambda x: x[None], example))
    scores = jax.tree.map(score, axes, params, gradient, is_leaf=is_axes)
    return jax.tree.map(jnp.add, total, scores), None

  def score(names: Axes, array: jax.Array, gradient: jax.Array) -> jax.Array:
    if token_axis(names) is None:
      return jnp.zeros(())
    return jnp.abs(jnp.sum(array * gradient, axis=-1, dtype=jnp.float32))

  def zero(names: Axes, array: jax.Array) -> jax.Array:
    return jnp.zeros(() if token_axis(names) is None else array.shape[:-1], jnp.float32)

  start = jax.tree.map(zero, axes, params, is_leaf=is_axes)
  total, _ = jax.lax.scan(add, start, batch)
  count = len(jax.tree.leaves(batch)[0])
  return _of_values(jax.tree.map(lambda t: t / count, total))


def _of_values(tree: Params) -> Params:
  """Gives keys the importance of the values beside them."""
  if not isinstance(tree, dict):
    return tree
  if 'values' in tree:
    return {**tree, 'keys': tree['values']}
  return {key: _of_values(value) for key, value in tree.items()}
