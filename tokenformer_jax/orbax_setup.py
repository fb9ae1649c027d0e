"""Orbax as checkpoints need it: what reads, what writes, and what is kept.

No other file knows Orbax, but for those of checkpoints and, for checkpoints that are not ours,
`released_tpu.py`.
"""

import dataclasses
import logging as std_logging
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers

from tokenformer_jax import paths

_RESTORE_GB = 1  # read at a time
# What Orbax raises, or what is raised in it, where the content of a file is not what it has to be.
FORMAT_ERRORS = (
  *(ValueError, TypeError, AttributeError, LookupError, AssertionError, EOFError, RecursionError),
  *(FileNotFoundError, NotADirectoryError, IsADirectoryError),
)


@dataclasses.dataclass(frozen=True)
class Deferred:
  """An array of a state to save that is made when it is written, so that one is there at a time."""

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]  # gives the same array each time

  @property
  def size(self) -> int:
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize


class _OneByOne(ocp.type_handlers.NumpyHandler):
  """Writes deferred arrays one after the other, each as an array of numpy."""

  async def serialize(
    self, values: Sequence[Deferred], infos: Sequence[Any], args: Sequence[Any] | None = None
  ) -> Sequence[ocp.future.Future]:
    write = super().serialize

    async def one_by_one() -> None:
      for value, info, arg in zip(values, infos, args, strict=True):
        for written in await write([value.read()], [info], [arg]):
          written.result()

    return [ocp.future.CommitFutureAwaitingContractedSignals(one_by_one(), name='one_by_one')]


class _ToldElsewhere(std_logging.Filter):
  """Drops tracebacks of Orbax and its tasks, which `Checkpoints` raises, too, and what we know."""

  def filter(self, record: std_logging.LogRecord) -> bool:
    of_orbax = 'orbax' in record.pathname or record.name == 'asyncio'
    known = ('read only', 'preemption', 'tracked_metric')
    return not (of_orbax and (record.exc_info or any(k in record.getMessage() for k in known)))


@dataclasses.dataclass(frozen=True)
class _WithoutTheOthers:
  """Drops what Python prints for each read and write that fails beside the one that is raised."""

  otherwise: Callable[[Any], None]  # the hook before

  def __call__(self, unraisable: Any) -> None:
    frames = [frame for frame, _ in traceback.walk_tb(unraisable.exc_traceback)]
    of_orbax = bool(frames) and 'orbax' in frames[-1].f_code.co_filename
    if not of_orbax and str(unraisable.exc_value) != 'Event loop is closed':  # TensorStore's
      self.otherwise(unraisable)


_TOLD_ELSEWHERE = _ToldElsewhere()  # one object: a logger takes it once, however often given


def make_reader() -> ocp.Checkpointer:
  """Return what reads items of a checkpoint in this process, without meeting the others.

  Orbax's manager has the processes meet at the end of `restore`: one that failed would leave the
  others there for ever.
  """
  this = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
    handler_registry=_handlers(None),
  )
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


def make_manager(
  directory: paths.Path, keep: int | None, save_gb: int | None, *, metrics: bool
) -> ocp.CheckpointManager:
  """Return what lists checkpoints and, with `keep`, writes and deletes them.

  The processes do not meet in here, so that one can try again by itself.

  Args:
    directory: of all checkpoints; must exist.
    keep: how many of the newest stay, besides the one of the lowest loss.
    save_gb: how much of a state is copied at a time, or None: all of it, before `save` returns.
    metrics: whether to read the losses, which say which checkpoint is the best.
  """
  writes = keep is not None
  policies = checkpoint_managers.AnyPreservationPolicy(
    [
      checkpoint_managers.LatestN(keep),
      checkpoint_managers.BestN(
        get_metric_fn=_loss,
        reverse=True,  # the last in the order is the best
        n=1,
        keep_checkpoints_without_metrics=False,
      ),
    ]
  )
  return ocp.CheckpointManager(
    directory,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=policies,
      best_fn=_loss,  # Without it Orbax forgets the losses when the run ends.
      best_mode='min',
      create=False,
      read_only=not writes,
      save_interval_steps=1 if writes else 0,
      cleanup_tmp_directories=writes,
      save_root_metadata=False,
      lightweight_initialize=not metrics,
    ),
    handler_registry=_handlers(save_gb),
  )


def quiet() -> None:
  """Keep Orbax from logging what `Checkpoints` raises."""
  for logger in (logging.get_absl_logger(), std_logging.getLogger('asyncio')):
    logger.addFilter(_TOLD_ELSEWHERE)
  if not isinstance(sys.unraisablehook, _WithoutTheOthers):
    sys.unraisablehook = _WithoutTheOthers(sys.unraisablehook)


def _handlers(save_gb: int | None) -> ocp.handlers.CheckpointHandlerRegistry:
  handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
  kinds = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.get_type_handler(jax.Array)),
    (Deferred, _OneByOne(deepcopy_host_arrays=False)),
  )
  arrays = ocp.PyTreeCheckpointHandler(
    type_handler_registry=kinds,
    restore_concurrent_gb=_RESTORE_GB,
    save_device_host_concurrent_gb=save_gb,
    # Arrays that are not to be copied at once, before `save` returns.
    is_prioritized_key_fn=None if save_gb is None else lambda path: False,
  )
  strict = ocp.StandardCheckpointHandler(restore_concurrent_gb=_RESTORE_GB)
  handlers.add('state', ocp.args.PyTreeSave, arrays)
  handlers.add('state', ocp.args.PyTreeRestore, arrays)
  handlers.add('state', ocp.args.StandardRestore, strict)
  for item in ('meta', 'tokenizer'):
    handlers.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler)
    handlers.add(item, ocp.args.JsonRestore, ocp.JsonCheckpointHandler)
  return handlers


def _loss(metrics: dict[str, float]) -> float:
  """Return the loss that a checkpoint is judged by; one that is not a number is the worst."""
  return metrics['loss'] if math.isfinite(metrics['loss']) else math.inf
