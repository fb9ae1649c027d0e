"""Two runs in one work directory: one trains, and nothing that it writes is lost."""

import signal
import subprocess
import sys
import time

import pytest
import tiny_hosts
import tiny_run

from tokenformer_jax.runs import checkpoint, claim, metrics
from tokenformer_jax.storage import paths

pytestmark = pytest.mark.slow

STEPS = 160
CHANGES = {'train__steps': STEPS, 'train__checkpoint_every': 20, 'train__log_every': 1}

# train.py with a heart that beats fast, so that a silence is short.
_FAST = """
import functools, runpy, sys
from tokenformer_jax.runs import claim
claim.hold = functools.partial(claim.hold, timing=claim.Timing(beat=0.3, silence=4, patience=8))
runpy.run_path(sys.argv.pop(1), run_name='__main__')
"""


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  root = tmp_path_factory.mktemp('two')
  return root, tiny_run.write_corpus(root / 'corpus')


@pytest.fixture(scope='module')
def unbroken(corpus):
  """The checksums and the losses of a run that is alone."""
  root, source = corpus
  done = tiny_run.run(tiny_run.command(source, root / 'cache', root / 'unbroken', **CHANGES))
  assert done.returncode == 0, done.stderr
  return outcome(root / 'unbroken')


@pytest.fixture(params=['bucket', pytest.param('disk', marks=pytest.mark.full_size)])
def workdir(request, tmp_path):
  if request.param == 'disk':
    return tmp_path / 'run'
  request.getfixturevalue('bucket').buckets['bucket'].clear()
  return 'gs://bucket/run'


@pytest.fixture
def command(corpus, workdir):
  root, source = corpus
  return tiny_run.command(source, root / 'cache', workdir, **CHANGES)


def outcome(workdir):
  checkpoints = checkpoint.Checkpoints(paths.parse_path(workdir))
  assert checkpoints.steps()[-1] == STEPS, 'the run did not reach its end'
  lines = [line for line in metrics.read(workdir) if 'train/loss' in line]
  losses = [(line['step'], line['train/loss']) for line in lines]
  return checkpoints.meta(STEPS).checksums, losses


def start(command):
  return subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=tiny_run.environment(),
  )


def complete(workdir):
  """The steps whose checkpoints are complete."""
  directory = paths.parse_path(workdir) / 'checkpoints'
  found = (
    [path for path in directory.iterdir() if path.name.isdigit()] if directory.exists() else []
  )
  if paths.in_bucket(directory):
    found = [path for path in found if (path / 'commit_success.txt').exists()]
  return sorted(int(path.name) for path in found)


def wait_until_it_trains(process, workdir, first=0):
  """Waits until a step beyond `first` is saved."""
  deadline = time.monotonic() + 200
  while max(complete(workdir), default=0) <= first:
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline, 'the run makes no progress'
    time.sleep(0.02)


def assert_nothing_lost(workdir, unbroken, lines=True):
  checksums, losses = outcome(workdir)
  assert checksums == unbroken[0], 'the last state is not that of a run that is alone'
  if lines:
    assert losses == unbroken[1], 'figures are lost, or there twice'
  newest = claim.read_newest(paths.parse_path(workdir) / 'claim')
  assert newest is None or newest.beat == 'ended', 'the claim was not given back'


@pytest.mark.parametrize('seconds', [0, 1.5])
def test_one_of_two_that_start_together_trains(command, workdir, unbroken, seconds):
  running = [start(command)]
  time.sleep(seconds)
  running.append(start(command))
  ended = [(*process.communicate(timeout=300), process.returncode) for process in running]
  assert sorted(status for *_, status in ended) == [0, 2], ended
  ((_, error, _),) = [end for end in ended if end[2] == 2]
  (line,) = error.splitlines()
  assert line.startswith(f'error: the work directory {workdir} is in use by process ')
  assert line.endswith('wait until it ends, stop it, or choose another --workdir')
  assert_nothing_lost(workdir, unbroken)


def test_after_kill_9_the_same_command_goes_on_at_once(command, workdir, unbroken):
  with start(command) as process:
    wait_until_it_trains(process, workdir)
    process.kill()
  done = tiny_run.run(command)
  assert done.returncode == 0, done.stderr
  assert f'was in use by process {process.pid} on ' in done.stderr
  assert 'which is gone; taking over' in done.stderr
  assert 'waiting' not in done.stderr, 'a process that is gone was waited for'
  assert_nothing_lost(workdir, unbroken, lines=not paths.in_bucket(workdir))


def test_an_orphan_harms_nothing(command, workdir, unbroken):
  """It is suspended while it trains, replaced, and goes on while its successor trains."""
  fast = [sys.executable, '-c', _FAST, *command[1:]]
  with start(fast) as orphan:
    try:
      wait_until_it_trains(orphan, workdir)
      orphan.send_signal(signal.SIGSTOP)
      before = complete(workdir)[-1]
      assert before < STEPS, 'the run was over before it could be suspended; make it longer'
      with start(fast) as successor:
        wait_until_it_trains(successor, workdir, first=before)
        orphan.send_signal(signal.SIGCONT)
        _, said = orphan.communicate(timeout=60)
        assert successor.poll() is None, 'the successor was done before; make the run longer'
        _, said_by_successor = successor.communicate(timeout=300)
    finally:
      orphan.kill()
  assert orphan.returncode == 2, said
  assert f'the work directory {workdir} was taken over by process {successor.pid}' in said
  assert successor.returncode == 0, said_by_successor
  assert 'which has been silent for' in said_by_successor
  assert_nothing_lost(workdir, unbroken, lines=not paths.in_bucket(workdir))


def test_two_runs_of_two_processes(corpus, tmp_path):
  """The first process of each claims the directory; the others learn the outcome."""
  root, source = corpus
  changes = {**CHANGES, 'mesh__fsdp': 2, 'train__steps': 10**6}
  command = tiny_run.command(source, root / 'cache', tmp_path / 'run', **changes)
  with tiny_hosts.started(command, 2, 1) as running:
    wait_until_it_trains(running[0], tmp_path / 'run')
    with tiny_hosts.started(command, 2, 1) as others:
      first, second = tiny_hosts.ends(others)
    assert (first.status, second.status) == (2, 2), first.err + second.err
    assert f'is in use by process {running[0].pid} on ' in first.err
    assert 'process 0 could not go on; its output says why' in second.err
    running[0].send_signal(signal.SIGTERM)
    ended = tiny_hosts.ends(running)
  assert [process.status for process in ended] == [0, 0], [process.err for process in ended]
  assert not (tmp_path / 'run' / 'claim').exists()
