"""A run that hangs prints its stacks once, and its heartbeat says how far it is."""

import contextlib
import json
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from outcomes import assert_same
from tiny_run import trainer

from tokenformer_jax.runs import claim
from tokenformer_jax.runs.wall_time import WallTime
from tokenformer_jax.training import loop, watch


@pytest.fixture
def fast(monkeypatch):
  """A watch that looks often, and calls a short pause a stall."""
  for name, value in {'LOOK_SECONDS': 0.02, 'FACTOR': 3, 'LEAST_SECONDS': 1}.items():
    monkeypatch.setattr(watch, f'_{name}', value)


def heartbeat(workdir: Path):
  return json.loads((workdir / 'heartbeat/0.json').read_text())


def stalls(workdir: Path) -> list[Path]:
  return sorted((workdir / 'stalls').glob('*.txt')) if (workdir / 'stalls').exists() else []


class Run:
  """A run by a clock that stands still between the calls of `wait`, and its watch."""

  def __init__(self, workdir):
    self.time, self.step, self.compiled = 0.0, 0, 0.0
    self.doing, self.durations = ('training', 0.0), {}
    self.watch = watch.Watch(workdir, self, None, first=0, steps=1000, now=lambda: self.time)

  def took(self, kind):
    return self.durations.get(kind, [])

  def wait(self, seconds):
    """Let time pass, in which the watch looks each second."""
    end = self.time + seconds
    while self.time < end:
      self.time = min(end, self.time + 1)
      self.watch._look()

  def make_steps(self, count, seconds):
    for _ in range(count):
      self.step += 1
      self.watch.made(self.step, jnp.zeros(()).block_until_ready())
      self.wait(seconds)

  def begin(self, doing):
    self.doing = (doing, self.time)


@pytest.fixture
def run(tmp_path):
  return Run(tmp_path)


def stalled(capfd):
  """The first lines of what was printed for stalls."""
  lines = capfd.readouterr().err.splitlines()
  return [line for line in lines if 'the stacks of all threads' in line]


@contextlib.contextmanager
def watched(workdir, *, steps=30):
  """A watch with its threads that has seen so many steps."""
  clock = WallTime()
  clock.lap('starting')
  timing = claim.Timing(beat=0.05)
  with (
    claim.hold(workdir / 'claim', 'the run', 'stop it', timing=timing) as held,
    watch.Watch(workdir, clock, held, first=0, steps=1000) as watching,
  ):
    for number in range(1, steps + 1):
      time.sleep(0.02)
      watching.made(number, jnp.zeros(()))
    yield watching


def wait_until(condition, seconds=20):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'nothing happens'
    time.sleep(0.01)


def test_a_step_that_hangs_prints_all_stacks_once(run, capfd):
  release = threading.Event()
  helper = threading.Thread(target=release.wait, name='helper')
  helper.start()
  run.make_steps(20, seconds=2)
  run.wait(17)
  assert not stalled(capfd)
  run.wait(3)
  text = capfd.readouterr().err
  release.set()
  assert 'step 21 has taken 21 s, and the median is 2.0 s; the stacks of all threads' in text
  assert 'test_a_step_that_hangs_prints_all_stacks_once' in text, 'the main thread is not in it'
  assert text.count('\nThread 0x') >= 1 and 'in wait' in text, 'the other threads are not in it'
  run.wait(1000)
  assert not stalled(capfd), 'one stall is printed twice'
  run.make_steps(3, seconds=2)
  run.wait(1000)
  assert len(stalled(capfd)) == 1, 'the next one is not'


def test_a_short_pause_of_short_steps_is_no_stall(run, capfd):
  run.make_steps(200, seconds=0.1)
  run.wait(9)
  assert not stalled(capfd)
  run.wait(3)
  assert len(stalled(capfd)) == 1


def test_the_first_steps_have_nothing_to_be_measured_by(run, capfd):
  run.make_steps(7, seconds=2)
  run.wait(1000)
  assert not stalled(capfd)


def test_an_evaluation_is_measured_by_evaluations(run, capfd):
  run.make_steps(20, seconds=2)
  run.durations['evaluation'] = [30.0, 40.0]
  run.begin('evaluation')
  run.wait(900)
  assert not stalled(capfd), 'two of them are no measure'
  run.durations['evaluation'] = [30.0, 40.0, 900.0]
  run.begin('training')
  run.make_steps(1, seconds=2)
  run.begin('evaluation')
  run.wait(390)
  assert not stalled(capfd)
  run.wait(20)
  (said,) = stalled(capfd)
  assert 'evaluation after step 21 has taken 401 s, and the median is 40.0 s' in said


def test_a_step_that_compiles_is_no_stall(run, capfd):
  run.make_steps(20, seconds=2)
  run.compiled += 0.1  # The trace is reported, and the longest part is not.
  run.wait(1000)
  assert not stalled(capfd)
  run.compiled += 1000
  run.make_steps(1, seconds=2)
  run.wait(30)
  assert len(stalled(capfd)) == 1, 'the step that compiled changes the median'


def test_a_process_that_was_suspended_has_not_hung(run, capfd):
  run.make_steps(20, seconds=2)
  run.time += 3600
  run.wait(5)
  assert not stalled(capfd)


def test_the_heartbeat_tells_progress_from_life(tmp_path, fast):
  with watched(tmp_path):
    wait_until(lambda: (tmp_path / 'heartbeat/0.json').exists())
    wait_until(lambda: heartbeat(tmp_path)['step'] == 30)
    before = heartbeat(tmp_path)
    wait_until(lambda: heartbeat(tmp_path)['time'] > before['time'] + 0.2)
    after = heartbeat(tmp_path)
  assert after['progress'] == before['progress'], 'the run seems to make progress'
  assert 0.01 < after['step_seconds'] < 5
  assert (after['doing'], after['steps'], after['process']) == ('training', 1000, 0)
  assert heartbeat(tmp_path)['doing'] == 'ended'


def test_a_stall_is_written_to_a_file_on_disks(run, tmp_path):
  run.make_steps(20, seconds=2)
  run.wait(1000)
  assert not stalls(tmp_path), 'the thread that watches touches storage'
  run.watch.write('training')
  assert 'step 21 has taken' in stalls(tmp_path)[0].read_text()


def test_storage_that_fails_does_not_matter(tmp_path, fast, capfd):
  (tmp_path / 'heartbeat').write_text('a file where the folder should be')
  with watched(tmp_path):
    time.sleep(0.5)
  assert 'Traceback' not in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_has_a_heartbeat_and_the_result_of_one_without(
  make, tmp_path, one_device, monkeypatch
):
  ended = loop.train(make(), tmp_path / 'run')
  last = heartbeat(tmp_path / 'run')
  assert (last['step'], last['steps'], last['doing']) == (20, 20, 'ended')
  assert not (tmp_path / 'run/stalls').exists()
  monkeypatch.setattr(watch.Watch, '__enter__', lambda self: self)
  monkeypatch.setattr(watch.Watch, '__exit__', lambda self, *exception: None)
  assert_same(ended, loop.train(make(), tmp_path / 'plain'), 'a run that is watched')


@pytest.mark.slow
def test_a_run_whose_data_hangs_prints_the_stack_of_its_main_thread(
  make, tmp_path, one_device, fast, capfd
):
  run, printed = trainer(make(), tmp_path / 'run'), []
  make_batches = run.batches

  def is_printed():
    printed.append(capfd.readouterr().err)
    return 'step 18 has taken' in ''.join(printed)

  def batches(first, say):
    with contextlib.closing(make_batches(first, say)) as given:
      for step, batch in enumerate(given, start=first + 1):
        time.sleep(0.03)
        if step == 18:
          wait_until(is_printed, seconds=120)
        yield batch

  run.batches = batches
  with jax.set_mesh(run.mesh), contextlib.closing(run.checkpoints):
    run.train(*run.first_state())
  assert 'in wait_until' in ''.join(printed)


@pytest.mark.slow
def test_a_run_that_fails_says_so_in_its_heartbeat(make, tmp_path, one_device):
  run = trainer(make(), tmp_path / 'run')
  run.train_step = None
  with jax.set_mesh(run.mesh), contextlib.closing(run.checkpoints), pytest.raises(TypeError):
    run.train(*run.first_state())
  assert heartbeat(tmp_path / 'run')['doing'] == 'failed'
