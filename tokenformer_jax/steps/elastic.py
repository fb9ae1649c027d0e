"""Train one model that serves several sizes: some rows of each batch train its first groups alone.

Outputs of groups of parameter tokens add up, so the first groups of every projection are a smaller
model, which `grow slice` writes. Some rows of every batch go through it (nested dropout, Rippel et
al. 2014, arXiv 1402.0915, on groups, with fixed rows in place of random steps).
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.config import groups
from tokenformer_jax.model import group_trees
from tokenformer_jax.model.layer import Counts
from tokenformer_jax.model.params import Params
from tokenformer_jax.tasks import Task


def with_nested_rows(task: Task, every: int) -> Callable[..., Any]:
  """Return the loss of a task in which some rows train the first groups alone.

  Of `every` rows of a batch, one trains the first group of each projection, one the first two, and
  so on, the first rows the fewest groups; the others train the whole model. All rows divide by the
  counts of the whole batch, so that the results add up, figures as well. A row costs what its own
  size costs: the smaller models have slices of the parameters.
  """
  choices = [groups.first(count) for count in range(1, task.definition.group_count)]
  smaller = [task.with_model(groups.choose(task.config.model, choice)) for choice in choices]

  def nested(
    params: Params, batch: Any, key: jax.Array, *teacher: Params, counts: Counts | None = None
  ) -> Any:
    counts = counts or task.counts(batch)
    size = jax.tree.leaves(batch)[0].shape[0] // every
    # Rows that lie together are those of every microbatch as well: see `step._gradient`.
    ends = itertools.pairwise([*(size * n for n in range(len(smaller) + 1)), None])
    *rows, whole = [jax.tree.map(operator.itemgetter(slice(*end)), batch) for end in ends]
    results = [task.loss(params, whole, key, *teacher, counts=counts)]
    for number, (choice, prefix) in enumerate(zip(choices, smaller, strict=True)):
      first = group_trees.take(params, task.definition.info, choice)
      own_key = jax.random.fold_in(key, number)
      results.append(prefix.loss(first, rows[number], own_key, *teacher, counts=counts))
    return jax.tree.map(lambda *sums: functools.reduce(jnp.add, sums), *results)

  return nested
