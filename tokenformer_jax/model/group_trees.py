"""Choose groups of parameter tokens in trees of arrays.

The functions are pure and can be traced under jit. Groups are counted from 1 in each projection:
see `config/groups.py`. A tree holds parameters, or arrays of their shapes, such as moments.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config.groups import Choice
from tokenformer_jax.model.params import ParamInfo, Params, Role


def mask(info: Params, numbers: Collection[int]) -> Params:
  """Return a tree of booleans: whether each parameter token is in one of the numbered groups.

  They broadcast to the parameters, such as [1, N, 1], and are False for an array without parameter
  tokens. They are computed from positions, so a program holds no constants. `info` is
  `Definition.info`; a projection may have fewer groups than the numbers name.
  """

  def is_in_groups(info: ParamInfo) -> jax.Array | np.bool_:
    axis, ends = info.token_axis, np.cumsum(info.groups)
    if axis is None:
      return np.False_
    shape = [int(ends[-1]) if i == axis else 1 for i in range(len(info.axes))]
    position = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    found = jnp.zeros(shape, bool)
    for number in numbers:
      if number <= len(ends):
        start, end = int(ends[number - 1]) - info.groups[number - 1], int(ends[number - 1])
        found |= (position >= start) & (position < end)
    return found

  return jax.tree.map(is_in_groups, info)


def take(tree: Params, info: Params, choice: Choice) -> Params:
  """Return a tree with the chosen groups of each array of parameter tokens, as `config.choose`."""

  def take_from(info: ParamInfo, array: jax.Array) -> jax.Array:
    axis, groups = info.token_axis, info.groups
    if axis is None:
      return array
    numbers, ends = list(choice(len(groups))), np.cumsum(groups)
    if numbers == list(range(1, len(groups) + 1)):
      return array
    parts = [
      jax.lax.slice_in_dim(array, int(ends[i - 1]) - groups[i - 1], int(ends[i - 1]), axis=axis)
      for i in numbers
    ]
    return jnp.concatenate(parts, axis)

  return jax.tree.map(take_from, info, tree)


def scale(params: Params, info: Params, numbers: Collection[int], factor: float) -> Params:
  """Multiply the values of the numbered groups, and thereby these groups' share of an output."""

  def scale_chosen(info: ParamInfo, array: jax.Array, chosen: jax.Array) -> jax.Array:
    return jnp.where(chosen, factor * array, array) if info.role is Role.VALUE else array

  return jax.tree.map(scale_chosen, info, params, mask(info, numbers))
