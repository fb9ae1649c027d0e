"""Compute the figures of a task on its validation split, during training and afterwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.tasks import Batch, Task


def figures(
  task: Task,
  eval_step: Callable[[Params, Batch], Any],
  versions: Mapping[str, Params],
  rows: Sequence[int],
  mesh: Mesh,
) -> dict[str, float]:
  """Run the validation split through the versions of a model; return figures such as `ema_loss`.

  `eval_step` is from `step.make_eval_step`. `versions` has parameters by the prefix of their
  figures' names. `rows` are the rows of every batch that this process's devices hold.
  """

  def sum_batch(params: Params, batch: Batch) -> Any:
    sums = eval_step(params, batch)
    # On a CPU, concurrent programs can deadlock in each other's collectives.
    return jax.block_until_ready(sums) if jax.default_backend() == 'cpu' else sums

  def sum_part(batches: Iterator[Batch]) -> Any:
    sums = []
    for batch in batches:
      on_devices = to_devices(batch, task.config.data.batch_size, rows, mesh)
      sums.append({prefix: sum_batch(params, on_devices) for prefix, params in versions.items()})
    return jax.tree.map(
      lambda *values: np.sum(values, axis=0, dtype=np.float64), *jax.device_get(sums)
    )

  sums = {name: sum_part(batches) for name, batches in task.validation_parts(rows).items()}
  return {
    _with_prefix(prefix, name): float(value)
    for prefix in versions
    for name, value in task.parts_figures({part: sums[part][prefix] for part in sums}).items()
  }


def _with_prefix(prefix: str, name: str) -> str:
  """Return the name of a figure of a version of the model, such as `law/ema_loss`."""
  part, slash, figure = name.rpartition('/')
  return f'{part}{slash}{prefix}{figure}'


def to_devices(local: Batch, batch_size: int, rows: Sequence[int], mesh: Mesh) -> Batch:
  """Return the global batch; `local` has the given rows of its arrays."""
  position = {row: i for i, row in enumerate(rows)}

  def whole(array: np.ndarray) -> jax.Array:
    shape = (batch_size, *array.shape[1:])

    def shard(index: Any) -> np.ndarray:
      first, stop, _ = index[0].indices(shape[0])
      return array[position[first] : position[stop - 1] + 1]

    return jax.make_array_from_callback(shape, sharding.batch_sharding(mesh), shard)

  return jax.tree.map(whole, local)
