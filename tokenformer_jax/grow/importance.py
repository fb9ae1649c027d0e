"""The importance of each parameter token for the loss; `grow shrink` drops the least important."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.model.params import ParamInfo, Params, Path, Role, lookup


def score_tokens(
  loss: Callable[[Params, Any], jax.Array], params: Params, info: Params, batch: Any
) -> Params:
  """Return the mean over examples of |⟨v, ∂loss/∂v⟩|, for the value v of every parameter token.

  To first order, this is the change of an example's loss when the token's contribution to the
  output is removed (Molchanov et al. 2019, arXiv 1906.10771, eq. 7, which squares it). A token
  whose key is zero has weight zero and importance zero.

  Args:
    loss: maps parameters and a batch of one example to its mean loss.
    params: the parameters of the model.
    info: the `ParamInfo` of each array.
    batch: the calibration examples, a pytree of arrays [B, …].

  Returns:
    A tree like the parameters: float32 [..., N] for an array of parameter tokens, where a key has
    the importance of its value; zero for other arrays.
  """

  def add(total: Params, example: Any) -> tuple[Params, None]:
    gradient = jax.grad(loss)(params, jax.tree.map(lambda x: x[None], example))
    scores = jax.tree.map(score, info, params, gradient)
    return jax.tree.map(jnp.add, total, scores), None

  def score(info: ParamInfo, array: jax.Array, gradient: jax.Array) -> jax.Array:
    if info.token_axis is None:
      return jnp.zeros(())
    return jnp.abs(jnp.sum(array * gradient, axis=-1, dtype=jnp.float32))

  def zero(info: ParamInfo, array: jax.Array) -> jax.Array:
    return jnp.zeros(() if info.token_axis is None else array.shape[:-1], jnp.float32)

  start = jax.tree.map(zero, info, params)
  total, _ = jax.lax.scan(add, start, batch)
  count = len(jax.tree.leaves(batch)[0])
  values = {
    path[:-1]: lookup(total, path)
    for path, one in jax.tree_util.tree_leaves_with_path(info)
    if one.role is Role.VALUE
  }

  def mean(path: Path, info: ParamInfo, sums: jax.Array) -> jax.Array:
    return (values[path[:-1]] if info.role is Role.KEY else sums) / count

  return jax.tree.map_with_path(mean, info, total)
