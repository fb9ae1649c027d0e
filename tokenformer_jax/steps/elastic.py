"""Train one model that serves several sizes: some steps train its first groups alone.

Outputs of groups of parameter tokens add up, so leaving out the last groups equals setting their
values to zero. Some steps keep only the first groups of every projection, a number drawn for the
step (nested dropout, Rippel et al. 2014, arXiv 1402.0915, on groups). So the model learns to be
good with each number of groups, and `grow slice` can write each one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.model.params import Definition, ParamInfo, Params, Role


def keep_first(params: Params, info: Params, count: jax.Array | int) -> Params:
  """Return parameters that compute the first `count` groups of each projection alone.

  The values of later groups are zero; no array changes its shape. `count` is at least 1, and may be
  traced.
  """

  def kept(info: ParamInfo, array: jax.Array) -> jax.Array:
    if info.role is not Role.VALUE or len(info.groups) < 2:
      return array
    ends = jnp.cumsum(jnp.asarray(info.groups))
    end = ends[jnp.minimum(count, len(info.groups)) - 1]
    position = jax.lax.broadcasted_iota(jnp.int32, array.shape, info.axes.index('param_tokens'))
    return jnp.where(position < end, array, 0)

  return jax.tree.map(kept, info, params)


def with_dropped_groups(
  loss: Callable[..., Any], definition: Definition, rate: float
) -> Callable[..., Any]:
  """Return the loss `(params, batch, key, …)` with later groups left out at random.

  With the probability `rate` only the first groups count; their number is drawn evenly from 1 to
  one less than all.
  """
  info, groups = definition.info, definition.group_count

  def dropped(params: Params, batch: Any, key: jax.Array, *same: Params, **counts: Any) -> Any:
    key, rate_key, count_key = jax.random.split(key, 3)
    fewer = jax.random.randint(count_key, (), 1, groups)
    count = jnp.where(jax.random.bernoulli(rate_key, rate), fewer, groups)
    return loss(keep_first(params, info, count), batch, key, *same, **counts)

  return dropped
