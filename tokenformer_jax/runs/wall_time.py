"""Count what the wall time of a training process goes to.

`times.jsonl` in a work directory has a line for the start of every process and for each of its log
points: the step, the time in seconds since 1970, and the seconds since the line before, by kind.
No line is ever dropped, so the file also has the time of steps that a crash lost.

  starting     preparation of data and model, reading of a checkpoint
  compiling    tracing and compilation of any program
  data         the devices wait for batches; an estimate that is never too high (`lap`)
  evaluation   validation and samples
  saving       the loop waits for a checkpoint; most of the writing is in the background
  training     the rest
"""

import collections
import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import jax

KINDS = ('training', 'data', 'evaluation', 'saving', 'compiling', 'starting')

_T = TypeVar('_T')
_COMPILE_EVENTS = '/jax/core/compile/'
_CALL_SECONDS = 1e-3  # Events report their end this much late at most.


class WallTime:
  """A clock of one process. It never waits for a device.

  Attributes:
    doing: what the process does now, of `KINDS`, and since when, by the monotonic clock. It is
      replaced as a whole, so other threads may read it.
  """

  def __init__(self) -> None:
    """Start the clock."""
    self._compiling = _compiling()
    self._spent: dict[str, float] = collections.defaultdict(float)
    self._waited, self._compiled = 0.0, self._compiling.seconds
    self._last = time.monotonic()
    self._took: dict[str, collections.deque[float]] = collections.defaultdict(
      lambda: collections.deque(maxlen=16)
    )
    self.doing = ('starting', self._last)

  @property
  def compiled(self) -> float:
    """Return the seconds that this process has compiled."""
    return self._compiling.seconds

  def took(self, kind: str) -> list[float]:
    """Return the seconds of the last contexts of `spent_on` of a kind."""
    return [*self._took[kind]]

  @contextlib.contextmanager
  def spent_on(self, kind: str) -> Iterator[None]:
    """Count the time of the context, without that of compilation, as a kind."""
    begin, compiled, before = time.monotonic(), self._compiling.seconds, self.doing[0]
    self.doing = (kind, begin)
    try:
      yield
    finally:
      self.doing = (before, time.monotonic())
    seconds = time.monotonic() - begin - (self._compiling.seconds - compiled)
    self._spent[kind] += seconds
    self._took[kind].append(seconds)

  def reading(self, batches: Iterable[_T]) -> Iterator[_T]:
    """Yield batches, and count the time that the host waits for them."""
    begin = time.monotonic()
    for batch in batches:
      self._waited += time.monotonic() - begin
      yield batch
      begin = time.monotonic()

  def lap(self, rest: str = 'training', *, device_seconds: float = 0.0) -> dict[str, float]:
    """Return the time, and the seconds since the last lap by kind.

    While the host waits for a batch, the devices may still compute earlier steps. They have done so
    for `device_seconds` at most (`Window.device_seconds`), so the remainder of the lap was lost,
    though no more of it than the host waited.

    Args:
      rest: the kind of all time that is not counted otherwise.
      device_seconds: the longest time that the devices can have computed.
    """
    now, compiled = time.monotonic(), self._compiling.seconds
    if self.doing[0] == 'starting':
      self.doing = ('training', now)
    spent = {**self._spent, 'compiling': compiled - self._compiled}
    left = now - self._last - sum(spent.values())
    spent['data'] = min(self._waited, max(0.0, left - device_seconds))
    spent[rest] = left - spent['data']
    self._spent.clear()
    self._waited, self._compiled, self._last = 0.0, compiled, now
    seconds = {kind: round(spent[kind], 4) for kind in KINDS if spent.get(kind, 0.0) > 0}
    return {'time': round(time.time(), 3), **seconds}


class _Compiling:
  """The seconds that this process has compiled, by the events that JAX reports."""

  def __init__(self) -> None:
    self.seconds = 0.0
    self._spans: list[tuple[float, float]] = []  # beginning and length

  def add(self, event: str, duration_secs: float, **_: str | int) -> None:
    """Add an event that ends now. It replaces earlier ones that it contains: traces are nested."""
    if not event.startswith(_COMPILE_EVENTS):
      return
    begin = time.monotonic() - duration_secs
    while self._spans and self._spans[-1][0] >= begin - _CALL_SECONDS:
      self.seconds -= self._spans.pop()[1]
    self._spans.append((begin, duration_secs))
    self.seconds += duration_secs


@functools.cache
def _compiling() -> _Compiling:
  """Return the one listener of this process."""
  listener = _Compiling()
  jax.monitoring.register_event_duration_secs_listener(listener.add)
  return listener
