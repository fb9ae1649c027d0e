"""Trackers that remember, fail, hang or are slow, to put into the table of trackers."""

import threading
import time

from tokenformer_jax.trackers.feed import TRACKERS, TrackerEntry
from tokenformer_jax.trackers.tracker import Tracker

hanging = threading.Event()  # a test sets it at its end, so that no thread stays


class Remembering(Tracker):
  """Keeps what it is given in `seen`, a list of all trackers of the class."""

  seen: list = []  # noqa: RUF012 (a test empties it)

  def __init__(self, run):
    self._kept = self.seen  # A thread that a test left behind writes to the list of its test.
    self._kept.append(('begin', run.first_step, run.id()))

  def figures(self, step, figures):
    self._kept.append(('figures', step, dict(figures)))

  def text(self, step, name, text):
    self._kept.append((name, step, text))

  def close(self, *, finished):
    self._kept.append(('close', finished))


class Unreachable(Remembering):
  def __init__(self, run):
    raise ConnectionError('no network')


class Failing(Remembering):
  """Fails at the second line."""

  def figures(self, step, figures):
    if any(entry[0] == 'figures' for entry in self._kept):
      raise OSError(28, 'No space left on device')
    super().figures(step, figures)


class Ending(Remembering):
  """Ends the process, as libraries that were written for commands do."""

  def figures(self, step, figures):
    raise SystemExit(3)


class Hanging(Remembering):
  def figures(self, step, figures):
    hanging.wait()


class HangingAtTheEnd(Remembering):
  def close(self, *, finished):
    hanging.wait()


class Slow(Remembering):
  def figures(self, step, figures):
    time.sleep(0.05)
    super().figures(step, figures)


def put(monkeypatch, tracker, name='wandb'):
  """Puts a class into the table under a name, for a test."""
  monkeypatch.setitem(TRACKERS, name, TrackerEntry(tracker, 'json'))
  monkeypatch.setattr(Remembering, 'seen', [])
