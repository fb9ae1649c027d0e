"""Train only some parameter tokens, and leave everything else as it is.

For each array of parameter tokens an array [..., N] of 1 and 0, uint8, says which tokens train. The
state of a run has them as `trained`: they are stored, sharded and restored as its other arrays are.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.model.params import Definition, ParamInfo, Params


def no_tokens(definition: Definition) -> Params:
  """Return a tree like the parameters: 0 [..., N] for tokens, 0 for other arrays."""

  def none(info: ParamInfo, array: jax.Array) -> jax.Array:
    return jnp.zeros(() if info.token_axis is None else array.shape[:-1], jnp.uint8)

  return jax.tree.map(none, definition.info, definition.abstract)


def axes(definition: Definition) -> Params:
  """Return the logical axes of each array of `no_tokens`."""
  return jax.tree.map(
    lambda info: () if info.token_axis is None else info.axes[:-1], definition.info
  )


def keep(trained: Params, info: Params, tree: Any) -> Any:
  """Return a tree like the parameters, with zeros in the place of all that does not train."""

  def kept(info: ParamInfo, trained: jax.Array, array: jax.Array) -> jax.Array:
    if info.token_axis is None:
      return jnp.zeros_like(array)
    return jnp.where(trained[..., None] == 1, array, 0)

  return jax.tree.map(kept, info, trained, tree)
