"""Trackers that fail, hang or are slow end no run and slow none down."""

import threading
import time

import pytest

from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import metrics
from tokenformer_jax.trackers import feed
from tokenformer_jax.trackers.feed import TRACKERS, TrackerEntry
from tokenformer_jax.trackers.tracker import Tracker

LINES = 30
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


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
  monkeypatch.setattr(feed, 'CLOSE_SECONDS', 0.5)
  hanging.clear()
  yield
  hanging.set()


def write(workdir, first=0, last=LINES):
  """Writes a line for each step of a run; returns the seconds until its end and of all lines."""
  began = time.monotonic()
  figures = metrics.Metrics(workdir, first_step=first, steps=LINES, trackers=('wandb',))
  for step in range(first + 1, last + 1):
    figures.write(step, {'train/loss': 1 / step})
  written = time.monotonic()
  figures.close()
  assert [line['step'] for line in metrics.read(workdir)] == list(range(1, last + 1))
  return time.monotonic() - written, written - began


def test_a_tracker_gets_every_line_and_the_end_of_the_run(tmp_path, monkeypatch):
  put(monkeypatch, Slow)
  monkeypatch.setattr(feed, 'CLOSE_SECONDS', 60.0)
  write(tmp_path)
  begin, *lines, end = Remembering.seen
  assert begin[:2] == ('begin', 0)
  assert lines == [('figures', step, {'train/loss': 1 / step}) for step in range(1, LINES + 1)]
  assert end == ('close', True)


def test_a_run_that_goes_on_has_the_same_id_and_one_that_stops_has_not_finished(
  tmp_path, monkeypatch
):
  put(monkeypatch, Remembering)
  write(tmp_path, last=20)
  write(tmp_path, first=20)
  found = [entry for entry in Remembering.seen if entry[0] in ('begin', 'close')]
  identity = found[0][2]
  assert found == [
    ('begin', 0, identity),
    ('close', False),
    ('begin', 20, identity),
    ('close', True),
  ]


@pytest.mark.parametrize(
  ('tracker', 'said'),
  [
    (Unreachable, 'failed (ConnectionError: no network) and is left alone; it may lack all fig'),
    (Failing, 'failed (OSError: [Errno 28] No space left on device) and is left alone; it may'),
    (Ending, 'failed (SystemExit: 3) and is left alone; it may lack all figures of this start'),
    (Hanging, 'did not finish within 0.5 s and is left alone; it may lack all figures of this'),
    (HangingAtTheEnd, 'did not finish within 0.5 s and is left alone; it may lack figures after'),
    (Slow, 'did not finish within 0.5 s and is left alone; it may lack figures after step'),
  ],
)
def test_a_tracker_in_trouble_is_reported_once_and_left_alone(
  tmp_path, monkeypatch, capsys, tracker, said
):
  put(monkeypatch, tracker)
  to_end, _ = write(tmp_path)
  assert to_end < 5, 'the run waited for the tracker'
  told = capsys.readouterr().err
  assert f'wandb {said}' in told and told.count('left alone') == 1, told


def test_a_tracker_that_falls_behind_is_left_alone_at_once(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(feed, '_MOST_WAITING', 10)
  put(monkeypatch, Hanging)
  figures = metrics.Metrics(tmp_path, first_step=0, steps=LINES, trackers=('wandb',))
  for step in range(1, 30):
    figures.write(step, {'train/loss': 1.0})
  told = capsys.readouterr().err
  assert told.count('wandb is 10 lines behind and is left alone') == 1, told
  figures.close()
  assert 'left alone' not in capsys.readouterr().err


def test_one_tracker_in_trouble_is_nothing_to_another(tmp_path, monkeypatch):
  put(monkeypatch, Hanging)
  put(monkeypatch, Remembering, name='mlflow')
  figures = metrics.Metrics(tmp_path, first_step=0, steps=2, trackers=('wandb', 'mlflow'))
  figures.write(2, {'train/loss': 1.0})
  figures.close()
  assert Remembering.seen[-2:] == [
    ('figures', 2, {'train/loss': 1.0}),
    ('close', True),
  ]


@pytest.mark.parametrize('name', ['wandb', 'trackio', 'mlflow'])
def test_a_missing_package_is_one_sentence(monkeypatch, name):
  monkeypatch.setitem(TRACKERS, name, TRACKERS[name]._replace(package='no_such_package'))
  with pytest.raises(UserError) as raised:
    feed.check_installed(('tensorboard', name))
  assert str(raised.value) == (
    f'config.train.trackers has {name}, which needs the package no_such_package; run pip install '
    f'-e ".[{name}]", or leave {name} out'
  )
