"""Choose groups of parameter tokens in arrays.

Groups are counted from 1 in each projection: see `config/groups.py`. Arrays hold parameters, or
have their shapes, such as moments. The functions are pure and can be traced under jit.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config.groups import Choice
from tokenformer_jax.model.params import ParamInfo, Params


def take(tree: Params, info: Params, choice: Choice) -> Params:
  """Return a tree with the chosen groups of each array of tokens, as `config.groups.choose`."""
  return jax.tree.map(lambda one, array: take_groups(array, one, choice), info, tree)


def take_groups(array: jax.Array, info: ParamInfo, choice: Choice) -> jax.Array:
  """Return an array with the chosen groups of its parameter tokens."""
  axis, groups = info.token_axis, info.groups
  if axis is None:
    return array
  numbers, ends = list(choice(len(groups))), np.cumsum(groups)
  if numbers == list(range(1, len(groups) + 1)):
    return array
  kept = [
    jax.lax.slice_in_dim(array, int(ends[i - 1]) - groups[i - 1], int(ends[i - 1]), axis=axis)
    for i in numbers
  ]
  return jnp.concatenate(kept, axis)
