"""Choose groups of parameter tokens in trees of arrays.

The functions are pure and can be traced under jit. Groups are counted from 1 in each projection:
see `config/groups.py`. Trees are of parameters, or of anything of their shapes, such as moments.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config.groups import Choice
from tokenformer_jax.model.params import ParamInfo, Params, Role


def mask(info: Params, numbers: Collection[int]) -> Params:
  """Return which parameter tokens belong to the named groups.

  Args:
    info: `Definition.info` of the model.
    numbers: of the groups; a projection may have fewer.

  Returns:
    A tree of booleans that broadcast to the parameters, such as [1, N, 1]; False for an array
    without parameter tokens. They are computed from positions, so a program holds no constants.
  """

  def of_array(one: ParamInfo) -> jax.Array | np.bool_:
    axis, ends = one.token_axis, np.cumsum(one.groups)
    if axis is None:
      return np.False_
    shape = [int(ends[-1]) if i == axis else 1 for i in range(len(one.axes))]
    position = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    found = jnp.zeros(shape, bool)
    for number in numbers:
      if number <= len(ends):
        start, end = int(ends[number - 1]) - one.groups[number - 1], int(ends[number - 1])
        found |= (position >= start) & (position < end)
    return found

  return jax.tree.map(of_array, info)


def take(tree: Params, info: Params, choice: Choice) -> Params:
  """Return a tree with the chosen groups of each array of parameter tokens, as `config.choose`."""

  def of_array(one: ParamInfo, array: jax.Array) -> jax.Array:
    axis = one.token_axis
    if axis is None:
      return array
    numbers, ends = list(choice(len(one.groups))), np.cumsum(one.groups)
    if numbers == list(range(1, len(one.groups) + 1)):
      return array
    parts = [
      jax.lax.slice_in_dim(array, int(ends[i - 1]) - one.groups[i - 1], int(ends[i - 1]), axis=axis)
      for i in numbers
    ]
    return jnp.concatenate(parts, axis)

  return jax.tree.map(of_array, info, tree)


def scale(params: Params, info: Params, numbers: Collection[int], factor: float) -> Params:
  """Multiply the values of the named groups, and with them what these groups add to an output."""

  def of_array(one: ParamInfo, array: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.where(chosen, factor * array, array) if one.role is Role.VALUE else array

  return jax.tree.map(of_array, info, params, mask(info, numbers))
