"""Train one model that serves several sizes: some steps train its first groups alone.

Groups of parameter tokens add up, so a model without its last groups is a model: the same one as
with values of zero there. In a part of the steps only the first groups of every projection count, a
number drawn for the step (nested dropout, Rippel et al. 2014, arXiv 1402.0915, on groups). So the
model learns to be good with each number of groups, and `grow slice` can write each one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.errors import UserError
from tokenformer_jax.model.params import ParamInfo, Params, Role


def group_count(info: Params) -> int:
  """Return the largest number of groups of a projection; 0 for a model without parameter tokens."""
  return max(len(one.groups) for one in jax.tree.leaves(info))


def keep_first(params: Params, info: Params, count: jax.Array | int) -> Params:
  """Return parameters that compute the first `count` groups of each projection alone.

  The values of later groups are zero; no array changes its shape.

  Args:
    params: the parameters of a model.
    info: the `ParamInfo` of each array.
    count: a number of groups, at least 1; it may be traced.
  """

  def kept(one: ParamInfo, array: jax.Array) -> jax.Array:
    if one.role is not Role.VALUE or len(one.groups) < 2:
      return array
    ends = jnp.cumsum(jnp.asarray(one.groups))
    end = ends[jnp.minimum(count, len(one.groups)) - 1]
    place = jax.lax.broadcasted_iota(jnp.int32, array.shape, one.token_axis)
    return jnp.where(place < end, array, 0)

  return jax.tree.map(kept, info, params)


def with_dropped_groups(loss: Callable[..., Any], info: Params, rate: float) -> Callable[..., Any]:
  """Return the loss `(params, batch, key, …)` in which later groups are left out at random.

  Args:
    loss: the loss of the whole model.
    info: the `ParamInfo` of each array.
    rate: the probability that only some of the groups count; their number is drawn evenly from 1
      to the number of groups without the last.
  """
  groups = group_count(info)

  def dropped(params: Params, batch: Any, key: jax.Array, *same: Params) -> Any:
    key, of_rate, of_count = jax.random.split(key, 3)
    fewer = jax.random.randint(of_count, (), 1, groups)
    count = jnp.where(jax.random.bernoulli(of_rate, rate), fewer, groups)
    return loss(keep_first(params, info, count), batch, key, *same)

  return dropped


def check(rate: float, info: Params) -> None:
  """Check that there are groups to leave out if a part of the steps shall do so.

  Raises:
    UserError: no projection has several groups.
  """
  if rate and group_count(info) < 2:
    raise UserError(
      f'config.train.drop_groups is {rate}, and no projection of this model has several groups of '
      'tokens; grow it by method=group, give it groups (model.layer.ffn.groups), or set it to 0'
    )
