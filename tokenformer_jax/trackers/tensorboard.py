"""TensorBoard: a file of events in the work directory."""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

# These modules import PyTorch if it is installed, so only a run with this tracker imports them.
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2

from tokenformer_jax.storage import retry
from tokenformer_jax.trackers.tracker import TrackedRun, Tracker

_protos: Any = event_pb2  # Its classes are made when it is imported.


class TensorBoard(Tracker):
  """A TensorBoard event file, `tensorboard/events…`.

  The thread of tensorboardX's SummaryWriter dies when the disk is full, and later events then hang;
  its EventsWriter has no thread.
  """

  def __init__(self, run: TrackedRun):
    directory = run.directory / 'tensorboard'
    directory.mkdir(parents=True, exist_ok=True)
    # The name has the time in seconds only; the suffix separates runs of the same second.
    suffix = f'.{os.getpid()}.{time.monotonic_ns():020}'
    self._writer = event_file_writer.EventsWriter(str(directory / 'events'), suffix)
    # Hides events whose work a crash lost.
    self._add(run.first_step + 1, session_log={'status': 'START'})
    config = _as_block(json.dumps(run.about.config, indent=2))
    self._add(run.first_step, summary=summary.text('config', f'{run.about.notes}\n\n{config}'))
    self._flush()

  def figures(self, step: int, figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
      self._add(step, summary=summary.scalar(name, value))
    self._flush()

  def text(self, step: int, name: str, text: str) -> None:
    self._add(step, summary=summary.text(name, _as_block(text)))
    self._flush()

  def close(self, *, finished: bool) -> None:
    del finished
    self._writer.close()

  def _add(self, step: int, **content: Any) -> None:
    self._writer.write_event(_protos.Event(wall_time=time.time(), step=step, **content))

  def _flush(self) -> None:
    retry.retried(self._writer.flush, 'writing the events of TensorBoard')


def _as_block(text: str) -> str:
  return f'```\n{text}\n```'
