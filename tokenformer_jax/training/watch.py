"""Watch a run from threads of its own: stacks of a step that hangs, and a heartbeat for others.

A run that hangs cannot say so itself: its main thread waits for a device, for data or for storage.
One thread looks at the run every second. If a step takes ten times the median, it prints the stacks
of all threads, once until the run makes progress again. Evaluations and saves are compared with the
median of their own kind, and steps that compile are left out. Another thread writes
`WORKDIR/heartbeat/PROCESS.json`, which may wait for storage as long as it likes.

No device waits for this, and the main thread only hands over an array a step.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs.wall_time import WallTime
from tokenformer_jax.storage import paths

_KNOWN_STEPS, _KNOWN_OTHERS = 8, 3  # durations without which no median is trusted
_MOST_FILES = 20  # of stacks, of one start of a process


@dataclasses.dataclass(frozen=True)
class Timing:
  """The intervals of a watch, in seconds, and the factor on the median.

  Attributes:
    look: the time between two looks at the run.
    beat: the time between two heartbeats in a file system.
    beat_in_bucket: the same in a bucket, where each one is a request that costs.
    factor: how many medians make a stall.
    least: the shortest stall, so that a pause of the machine is none in a run of short steps.
  """

  look: float = 1
  beat: float = 10
  beat_in_bucket: float = 60
  factor: float = 10
  least: float = 10


class Watch:
  """The watch of one process of a run; a context."""

  def __init__(
    self,
    workdir: paths.Path,
    wall_time: WallTime,
    *,
    first: int,
    steps: int,
    check_lease: Callable[[], None] = lambda: None,
    timing: Timing = Timing(),
    now: Callable[[], float] = time.monotonic,
  ):
    """Prepare to watch a run that has made `first` of `steps` steps.

    `wall_time` says what the run does. `check_lease` raises if another process has taken over the
    work directory; nothing is written then. `now` is the clock of `wall_time.doing`.
    """
    self._workdir, self._wall_time, self._check_lease = workdir, wall_time, check_lease
    self._timing, self._steps, self._now = timing, steps, now
    self._pending: collections.deque[tuple[int, jax.Array]] = collections.deque()
    self._took: collections.deque[float] = collections.deque(maxlen=128)
    self._step, self._phase = first, wall_time.doing
    self._progress = self._looked = now()
    self._progress_time = time.time()
    self._compiled = self._compiled_before = wall_time.compiled
    self._dumped = False
    self._files: list[tuple[paths.Path, str]] = []
    self._written = 0
    self._ended = threading.Event()
    self._threads = [
      threading.Thread(target=target, name=name, daemon=True)
      for name, target in (('watch', self._watch), ('heartbeat', self._beat))
    ]

  def __enter__(self) -> 'Watch':
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._ended.set()
    for thread in self._threads:
      thread.join(self._timing.look)
    self._look()  # at the last steps
    self._write('ended' if exception[0] is None else 'failed')

  def made(self, step: int, figure: jax.Array) -> None:
    """Note that a step was started; `figure` is one of its results."""
    # Compilation reports its first part before its longest one, and all of it before this call.
    self._compiled_before = self._wall_time.compiled
    self._pending.append((step, figure))

  def _watch(self) -> None:
    while not self._ended.wait(self._timing.look):
      self._look()

  def _look(self) -> None:
    """See what progress the run has made, and dump stacks if it has made none for too long."""
    now, phase = self._now(), self._wall_time.doing
    doing, since = phase
    made = 0
    while self._pending and _is_ready(self._pending[0][1]):
      self._step, made = self._pending.popleft()[0], made + 1
    compiled, compiles = self._wall_time.compiled, self._wall_time.compiled != self._compiled_before
    if made and doing == 'training' and compiled == self._compiled:
      self._took.extend([(now - max(self._progress, since)) / made] * made)
    stopped = now - self._looked > 5 * self._timing.look + 1  # This process itself was suspended.
    if made or phase != self._phase or stopped:
      self._progress, self._progress_time = now, time.time()
      self._phase, self._dumped = phase, False
    self._looked, self._compiled = now, compiled
    typical, elapsed = self._typical(doing), now - max(self._progress, since)
    limit = max(self._timing.least, self._timing.factor * typical)
    if typical and elapsed > limit and not (self._dumped or compiles):
      self._dumped = True
      self._dump(doing, elapsed, typical)

  def _typical(self, doing: str) -> float:
    """Return the median of the seconds that a step, or work of another kind, takes; 0: unknown."""
    if doing == 'training':
      known, enough = [*self._took], _KNOWN_STEPS
    else:
      known, enough = self._wall_time.took(doing), _KNOWN_OTHERS
    return statistics.median(known) if len(known) >= enough else 0.0

  def _dump(self, doing: str, elapsed: float, typical: float) -> None:
    """Print the stacks of all threads, and have them written to a file."""
    what = f'step {self._step + 1}' if doing == 'training' else f'{doing} after step {self._step}'
    with tempfile.TemporaryFile('w+') as file:
      faulthandler.dump_traceback(file, all_threads=True)
      file.seek(0)
      stacks = file.read()
    text = (
      f'process {jax.process_index()} on {hosts.own_name()}: {what} has taken {elapsed:.0f} s, and '
      f'the median is {typical:.1f} s; the stacks of all threads:\n{stacks}'
    )
    print(text, file=sys.stderr, flush=True)
    if self._written < _MOST_FILES:
      self._written += 1
      # The step may stall again, in other work or in a run that has started again.
      name = f'stalls/{self._step}-{jax.process_index()}-{time.time():.0f}.txt'
      self._files.append((self._workdir / name, text))

  def _beat(self) -> None:
    """Write the heartbeat and the stacks until the run ends."""
    bucket = paths.in_bucket(self._workdir)
    beat = self._timing.beat_in_bucket if bucket else self._timing.beat
    written = -beat
    while not self._ended.is_set():
      if self._files or time.monotonic() - written >= beat:
        written = time.monotonic()
        self._write(self._wall_time.doing[0])
      self._ended.wait(min(beat, self._timing.look))

  def _write(self, doing: str) -> None:
    """Write the heartbeat, and stacks that wait; leave them out where storage fails."""
    beat = self._workdir / 'heartbeat' / f'{jax.process_index()}.json'
    with contextlib.suppress(UserError, paths.errors(self._workdir)):
      self._check_lease()
      for file in [*self._files]:  # The other thread may add some meanwhile.
        _write(*file)
        with contextlib.suppress(ValueError):  # The end of the run has written it too.
          self._files.remove(file)
      _write(beat, json.dumps(self._state(doing)) + '\n')

  def _state(self, doing: str) -> dict[str, Any]:
    return {
      'time': round(time.time(), 1),
      'progress': round(self._progress_time, 1),
      'step': self._step,
      'steps': self._steps,
      'doing': doing,
      'step_seconds': round(self._typical('training'), 4),
      'process': jax.process_index(),
      'processes': jax.process_count(),
      'host': hosts.own_name(),
      'pid': os.getpid(),
    }


def _write(path: paths.Path, text: str) -> None:
  if not paths.in_bucket(path):
    path.parent.mkdir(exist_ok=True)
  paths.replace(path, text)


def _is_ready(array: jax.Array) -> bool:
  """Return whether an array is computed, or never will be."""
  try:
    return array.is_ready()
  except RuntimeError:  # The main thread raises the error.
    return True
