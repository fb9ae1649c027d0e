"""Train only some parameter tokens, and leave everything else as it is.

The state of such a run has an entry `trained`, a tree like the parameters: 1 for each parameter
token that trains and 0 for the others, uint8 [..., N]; 0 for an array without tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.model.params import Definition, ParamInfo, Params


def shapes(definition: Definition) -> Params:
  """Return shapes and dtypes of the entry `trained`."""

  def shape(info: ParamInfo, array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(() if info.token_axis is None else array.shape[:-1], jnp.uint8)

  return jax.tree.map(shape, definition.info, definition.abstract)


def keep(state: dict[str, Any], info: Params, tree: Any) -> Any:
  """Return gradients or updates, with zeros in the place of all that does not train."""

  def kept(info: ParamInfo, trained: jax.Array, array: jax.Array) -> jax.Array:
    if info.token_axis is None:
      return jnp.zeros_like(array)
    return jnp.where(trained[..., None] == 1, array, 0)

  return jax.tree.map(kept, info, state['trained'], tree) if 'trained' in state else tree
