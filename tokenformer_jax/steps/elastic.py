"""Train one model that serves several sizes: some steps train its first groups alone.

Outputs of groups of parameter tokens add up, so leaving out the last groups equals setting their
values to zero. Some steps keep only the first groups of every projection, a number drawn for the
step (nested dropout, Rippel et al. 2014, arXiv 1402.0915, on groups). So the model learns to be
good with each number of groups, and `grow slice` can write each one.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.config import groups
from tokenformer_jax.model import group_trees
from tokenformer_jax.model.layer import Counts
from tokenformer_jax.model.params import Definition, ParamInfo, Params, Role
from tokenformer_jax.tasks import Task


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


def with_nested_rows(task: Task, every: int) -> Callable[..., Any]:
  """Return the loss of a task in which some rows train the first groups alone.

  Of `every` rows of a batch, one trains the first group of each projection, one the first two, and
  so on; the others train the whole model. All rows divide by the counts of the whole batch, so that
  the results add up, figures as well. A row costs what its own size costs: the smaller models have
  slices of the parameters.
  """
  choices = [groups.first(count) for count in range(1, task.definition.group_count)]
  smaller = [task.with_model(groups.choose(task.config.model, choice)) for choice in choices]

  def nested(
    params: Params, batch: Any, key: jax.Array, *teacher: Params, counts: Counts | None = None
  ) -> Any:
    counts = counts or task.counts(batch)
    # Each device divides its own rows, so no row moves to another device.
    rows = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), batch)
    whole = jax.tree.map(lambda x: x[:, len(smaller) :].reshape(-1, *x.shape[2:]), rows)
    results = [task.loss(params, whole, key, *teacher, counts=counts)]
    for number, (choice, prefix) in enumerate(zip(choices, smaller, strict=True)):
      own = jax.tree.map(lambda x, number=number: x[:, number], rows)
      first = group_trees.take(params, task.definition.info, choice)
      own_key = jax.random.fold_in(key, number)
      results.append(prefix.loss(first, own, own_key, *teacher, counts=counts))
    return jax.tree.map(lambda *sums: functools.reduce(jnp.add, sums), *results)

  return nested
