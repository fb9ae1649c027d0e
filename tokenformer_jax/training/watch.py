"""Watch a run: print the stacks of a step that hangs, and write a heartbeat for other programs.

A run that hangs cannot report it: its main thread waits for a device, for data or for storage. A
thread, which never touches storage, looks at the run every second. If a step takes ten times the
median, it prints the stacks of all threads, once until the run makes progress again. Evaluations
and saves are compared with the median of their own kind, and steps that compile are left out. The
thread of the run's claim writes `WORKDIR/heartbeat/PROCESS.json`.

The main thread only hands over an array a step, and no device waits.
"""

import collections
import contextlib
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
from tokenformer_jax.runs.claim import Claim
from tokenformer_jax.runs.wall_time import WallTime
from tokenformer_jax.storage import paths

_LOOK_SECONDS = 1  # between two looks at the run
_BUCKET_SECONDS = 60  # between two heartbeats in a bucket, where each one is a request that costs
_FACTOR = 10  # the medians that make a stall
_LEAST_SECONDS = 10  # the shortest stall, longer than a pause of the machine
_KNOWN_STEPS, _KNOWN_OTHERS = 8, 3  # the durations without which no median is trusted


class Watch:
  """The watch of one process of a run; a context."""

  def __init__(
    self,
    workdir: paths.Path,
    wall_time: WallTime,
    claim: Claim | None,
    *,
    first: int,
    steps: int,
    now: Callable[[], float] = time.monotonic,
  ):
    """Prepare to watch a run that has made `first` of `steps` steps.

    `wall_time` says what the run does, and `now` is its clock. Without a claim, the heartbeat is
    written at the end only.
    """
    self._workdir, self._wall_time, self._claim = workdir, wall_time, claim
    self._steps, self._now = steps, now
    self._pending: collections.deque[tuple[int, Any]] = collections.deque()
    self._took: collections.deque[float] = collections.deque(maxlen=128)
    self._stacks: collections.deque[tuple[int, str]] = collections.deque()  # to be written
    self._step, self._phase = first, wall_time.doing
    self._progress = self._looked = now()
    self._progress_time, self._written = time.time(), 0.0
    self._compiled = self._compiled_before = wall_time.compiled
    self._printed = False
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._watch, name='watch', daemon=True)
    self._beating = contextlib.ExitStack()

  def __enter__(self) -> 'Watch':
    self._thread.start()
    if self._claim:
      self._beating.enter_context(self._claim.at_each_beat(self._beat))
    return self

  def __exit__(self, *exception: object) -> None:
    self._ended.set()
    self._thread.join(_LOOK_SECONDS)
    self._beating.close()
    self._look()  # at the last steps
    with contextlib.suppress(UserError):
      if self._claim:
        self._claim.check()
      self.write('ended' if exception[0] is None else 'failed')

  def made(self, step: int, figure: jax.Array) -> None:
    """Note that a step was started; `figure` is one of its results."""
    # Compilation reports its trace before its longest phase, and all of it before this call.
    self._compiled_before = self._wall_time.compiled
    self._pending.append((step, figure))

  def write(self, doing: str) -> None:
    """Write the heartbeat, and on disks the stacks; leave them out where storage fails."""
    with contextlib.suppress(paths.errors(self._workdir)):
      if not paths.in_bucket(self._workdir):
        (self._workdir / 'heartbeat').mkdir(exist_ok=True)
        while self._stacks:
          (self._workdir / 'stalls').mkdir(exist_ok=True)
          step, text = self._stacks.popleft()
          (self._workdir / 'stalls' / f'{step}-{jax.process_index()}.txt').write_text(text)
      state = {
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
      path = self._workdir / 'heartbeat' / f'{jax.process_index()}.json'
      paths.overwrite(path, json.dumps(state) + '\n')

  def _beat(self) -> None:
    pause = _BUCKET_SECONDS if paths.in_bucket(self._workdir) else 0
    if not self._written or time.monotonic() - self._written >= pause:
      self._written = time.monotonic()
      self.write(self._wall_time.doing[0])

  def _watch(self) -> None:
    while not self._ended.wait(_LOOK_SECONDS):
      self._look()

  def _look(self) -> None:
    """See what progress the run has made, and print stacks if it has made none for too long."""
    now, phase = self._now(), self._wall_time.doing
    doing, since = phase
    made = 0
    while self._pending and _is_ready(self._pending[0][1]):
      self._step, made = self._pending.popleft()[0], made + 1
    compiled, compiles = self._wall_time.compiled, self._wall_time.compiled != self._compiled_before
    if made and doing == 'training' and compiled == self._compiled:
      self._took.extend([(now - max(self._progress, since)) / made] * made)
    suspended = now - self._looked > 5 * _LOOK_SECONDS + 1  # this process itself
    if made or phase != self._phase or suspended:
      self._progress, self._progress_time = now, time.time()
      self._phase, self._printed = phase, False
    self._looked, self._compiled = now, compiled
    typical, elapsed = self._typical(doing), now - max(self._progress, since)
    is_stall = typical and elapsed > max(_LEAST_SECONDS, _FACTOR * typical)
    if is_stall and not (self._printed or compiles):
      self._printed = True
      self._print_stacks(doing, elapsed, typical)

  def _typical(self, doing: str) -> float:
    """Return the median of the seconds that a step, or work of another kind, takes; 0: unknown."""
    if doing == 'training':
      known, enough = [*self._took], _KNOWN_STEPS
    else:
      known, enough = self._wall_time.took(doing), _KNOWN_OTHERS
    return statistics.median(known) if len(known) >= enough else 0.0

  def _print_stacks(self, doing: str, elapsed: float, typical: float) -> None:
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
    self._stacks.append((self._step, text))


def _is_ready(array: Any) -> bool:
  """Return whether an array is computed, or never will be."""
  try:
    return array.is_ready()
  except RuntimeError:  # The main thread raises the error.
    return True
