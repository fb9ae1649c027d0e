"""Configure Orbax for checkpoints: the reader, the manager, and which checkpoints stay.

Only this file and the other checkpoint files use Orbax, and `parallel/hosts.py` its barrier.
"""

import dataclasses
import logging as std_logging
import math
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts  # comes with Orbax
from absl import logging
from orbax.checkpoint import checkpoint_managers, future

from tokenformer_jax.runs import checksum
from tokenformer_jax.storage import paths

_RESTORE_GB = 1  # the amount that Orbax reads at a time


@dataclasses.dataclass(frozen=True)
class Deferred:
  """An array that is created only while it is written, so that memory holds a chunk of it.

  Attributes:
    shape: the shape of the whole array.
    dtype: the dtype that it is stored in.
    read: returns the array or, if it is stacked, the layer of a number; the same each time.
    stacked: whether the first axis numbers layers.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[int | None], np.ndarray]
  stacked: bool = False

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize

  def chunks(self) -> Iterator[tuple[int | EllipsisType, np.ndarray]]:
    """Yield the array in order, a layer at a time if it is stacked, with each chunk's index."""
    if not self.stacked:
      yield ..., self.read(None)
      return
    for layer in range(self.shape[0]):
      yield layer, self.read(layer)


class _ChunkByChunk(ocp.type_handlers.NumpyHandler):
  """A type handler that writes deferred arrays one after the other, each in its chunks."""

  async def serialize(
    self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[future.Future]:
    write = super().serialize

    async def one_by_one() -> None:
      for value, info, arg in zip(values, infos, args or [], strict=True):
        for written in await write([value], [info], [arg]):
          written.result()

    return [future.CommitFutureAwaitingContractedSignals(one_by_one(), name='one_by_one')]

  async def _open_and_write(
    self, value: Any, tspec: dict[str, Any], ts_context: ts.Context
  ) -> None:
    """Write the chunks of an array; Orbax calls this method with the array's specification."""
    store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
    for index, chunk in value.chunks():
      await store[index].write(chunk, can_reference_source_data_indefinitely=True)


def make_reader() -> ocp.Checkpointer:
  """Return a reader of checkpoint items that does not synchronise with other processes.

  Orbax's manager synchronises the processes at the end of `restore`, so a process that failed would
  leave the others waiting for ever.
  """
  this = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
    handler_registry=_handlers(),
  )
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read_arrays(reader: ocp.Checkpointer, path: paths.Path, abstract: Any) -> Any:
  """Read the arrays of `abstract`, `jax.ShapeDtypeStruct`s, directly into their shardings."""
  args = ocp.args.PyTreeRestore(
    abstract,
    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    partial_restore=True,
  )
  return reader.restore(path, args=ocp.args.Composite(state=args))['state']


def make_manager(
  directory: paths.Path, keep: int, *, metrics: bool = True
) -> ocp.CheckpointManager:
  """Return a manager that writes checkpoints, and deletes all but those that `Checkpoints` keeps.

  This function does not synchronise processes, so one process can retry by itself. The directory
  must exist. With `metrics` the manager reads the losses, which determine the best checkpoint.
  """
  logging.get_absl_logger().addFilter(_is_no_missing_loss)  # The same filter is added once.
  policies = checkpoint_managers.AnyPreservationPolicy(
    [
      checkpoint_managers.LatestN(keep),
      checkpoint_managers.BestN(
        get_metric_fn=sound_loss,
        reverse=True,  # Orbax keeps the last in the order, which is then the lowest loss.
        n=1,
        keep_checkpoints_without_metrics=False,
      ),
    ]
  )
  return ocp.CheckpointManager(
    directory,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=policies,
      best_fn=sound_loss,  # Without it Orbax forgets the losses at the end of the run.
      best_mode='min',
      create=False,
      cleanup_tmp_directories=True,
      save_root_metadata=False,
      lightweight_initialize=not metrics,
    ),
    handler_registry=_handlers(),
  )


def _is_no_missing_loss(record: std_logging.LogRecord) -> bool:
  """Drop what Orbax warns of each checkpoint between evaluations: that it has no loss."""
  return record.msg != 'Requested `tracked_metric`; did not provide metrics.'


def _handlers() -> ocp.handlers.CheckpointHandlerRegistry:
  handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
  kinds = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
    (Deferred, _ChunkByChunk(deepcopy_host_arrays=False)),
  )
  arrays = ocp.PyTreeCheckpointHandler(
    type_handler_registry=kinds,
    restore_concurrent_gb=_RESTORE_GB,
  )
  handlers.add('state', ocp.args.PyTreeSave, arrays)
  handlers.add('state', ocp.args.PyTreeRestore, arrays)
  for item in ('meta', 'tokenizer'):
    handlers.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler)
    handlers.add(item, ocp.args.JsonRestore, ocp.JsonCheckpointHandler)
  return handlers


def sound_loss(metrics: Any) -> float:
  """Return the loss that ranks a checkpoint: infinity, the last rank, unless it is sound.

  A sound loss is finite and, by its digest, unchanged since it was written.
  """
  match metrics:
    case {'loss': float(loss), 'digest': str(digest), **rest} if not rest:
      return loss if math.isfinite(loss) and digest == checksum.digest(loss) else math.inf
    case _:
      return math.inf
