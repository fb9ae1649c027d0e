"""Hand the figures of a run to its trackers, each on a thread of its own.

The run never waits for a tracker but for a few seconds at its end. A tracker that raises an
exception, hangs or falls behind is reported once and left alone.
"""

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import retry
from tokenformer_jax.trackers.tracker import TrackedRun, Tracker
from tokenformer_jax.trackers.wandb import Trackio, Wandb

_MOST_WAITING = 10_000  # lines that a tracker may be behind: some megabytes
CLOSE_SECONDS = 15.0  # for all trackers together, at the end of a run


def _tensorboard(run: TrackedRun) -> Tracker:
  # Its package imports PyTorch if that is installed.
  from tokenformer_jax.trackers.tensorboard import TensorBoard  # noqa: PLC0415

  return TensorBoard(run)


def _mlflow(run: TrackedRun) -> Tracker:
  from tokenformer_jax.trackers.mlflow import MLflow  # noqa: PLC0415 (from an extra)

  return MLflow(run)


class TrackerEntry(NamedTuple):
  """A tracker, and the package that it imports when it is made."""

  make: Callable[[TrackedRun], Tracker]
  package: str
  extra: str = ''  # the extra of this package that installs it; '': it is always installed


# The trackers by their names in `train.trackers`.
TRACKERS = {
  'tensorboard': TrackerEntry(_tensorboard, 'tensorboardX'),
  'wandb': TrackerEntry(Wandb, 'wandb', 'wandb'),
  'trackio': TrackerEntry(Trackio, 'trackio', 'trackio'),
  'mlflow': TrackerEntry(_mlflow, 'mlflow', 'mlflow'),
}


def check_installed(names: Sequence[str]) -> None:
  """Check that the packages of these trackers are installed; import none of them."""
  for name in names:
    entry = TRACKERS[name]
    spec = importlib.util.find_spec(entry.package)
    # A folder of that name in the current directory has a specification as well, but no origin.
    if spec is None or spec.origin is None:
      raise UserError(
        f'config.train.trackers has {name}, which needs the package {entry.package}; run pip '
        f'install -e ".[{entry.extra}]", or leave {name} out'
      )


class Feed:
  """The queue of calls to one tracker, and the thread that empties it."""

  def __init__(self, name: str, run: TrackedRun, say: Callable[[str], None]):
    """Start the thread, which makes the tracker. `say` prints a line and is safe to call there."""
    self._name, self._run, self._say = name, run, say
    self._waiting: queue.SimpleQueue[tuple[str, int, tuple[Any, ...]]] = queue.SimpleQueue()
    self._left_alone = threading.Event()
    self._reached: int | None = None  # the last step that the tracker took
    self._thread = threading.Thread(target=self._work, name=f'tracker {name}', daemon=True)
    self._thread.start()

  def put(self, method: str, step: int, *content: Any) -> None:
    """Have a method of the tracker called with a step and content, soon; return at once."""
    if self._left_alone.is_set():
      return
    if self._waiting.qsize() >= _MOST_WAITING:
      self._leave_alone(f'is {_MOST_WAITING:,} lines behind')
      return
    self._waiting.put((method, step, content))

  def end(self, *, finished: bool) -> None:
    """Have the tracker closed after all that was put; return at once."""
    self._waiting.put(('close', 0, (finished,)))

  def wait(self, until: float) -> None:
    """Wait until the tracker is closed, or until a time of the monotonic clock."""
    self._thread.join(max(0.0, until - time.monotonic()))
    if self._thread.is_alive():
      self._leave_alone(f'did not finish within {CLOSE_SECONDS:g} s')

  def _work(self) -> None:
    try:
      tracker = TRACKERS[self._name].make(self._run)
      if tracker.where:
        self._say(f'{self._name}: {tracker.where}')
      while not self._left_alone.is_set():
        method, step, content = self._waiting.get()
        if method == 'close':
          tracker.close(finished=content[0])
          return
        getattr(tracker, method)(step, *content)
        self._reached = step
    except BaseException as error:  # Libraries end the thread by SystemExit as well.
      self._leave_alone(f'failed ({retry.one_line(error)})')

  def _leave_alone(self, why: str) -> None:
    """Stop to feed the tracker, and print why, once."""
    if self._left_alone.is_set():
      return
    self._left_alone.set()
    reached = self._reached
    lacks = 'all figures of this start' if reached is None else f'figures after step {reached}'
    self._say(f'{self._name} {why} and is left alone; it may lack {lacks}; metrics.jsonl has them')


def close(feeds: Sequence[Feed], *, finished: bool) -> None:
  """Close trackers, and wait for them for at most `CLOSE_SECONDS`. `finished`: see `Tracker`."""
  for feed in feeds:
    feed.end(finished=finished)
  until = time.monotonic() + CLOSE_SECONDS
  for feed in feeds:
    feed.wait(until)
