"""Processes that are killed at any moment, suspended, or that meet in one work directory."""

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import entry
import pytest
import tiny_run
from seeds import take

from tokenformer_jax.runs import checkpoint, claim, metrics
from tokenformer_jax.storage import paths

pytestmark = pytest.mark.slow

STEPS = 60
MISTAKE = 2  # the exit status
LIMIT = 400  # seconds until a process has ended, on a machine that does much else
CHANGES = {'train__steps': STEPS, 'train__checkpoint_every': 10, 'train__keep_checkpoints': 99}
FULL_SIZE = pytest.mark.full_size


class Runs:
  """Runs of one config, each in processes of its own."""

  def __init__(self, root: Path):
    """Start the process that the others are forked from."""
    self.root, self._numbers = root, itertools.count()
    self.environment: dict[str, str] = {}  # variables that name the server of a bucket
    self._source = tiny_run.write_corpus(root / 'corpus')
    self._context = multiprocessing.get_context('forkserver')
    self._context.set_forkserver_preload(entry.PRELOAD)
    path = os.pathsep.join([str(tiny_run.ROOT), *map(str, Path(__file__).parents[:2])])
    environment = {**tiny_run.environment(), 'PYTHONPATH': path}
    with mock.patch.dict(os.environ, environment):
      multiprocessing.forkserver.ensure_running()

  def start(
    self, workdir: paths.Path, cache: str = 'cache', *, fast: bool = False
  ) -> multiprocessing.Process:
    """Start the run in a work directory."""
    argv = tiny_run.command(self._source, self.root / cache, workdir, **CHANGES)[1:]
    argv.insert(1, f'--config={tiny_run.ROOT}/configs/lm_stdlib.py')
    said = self.root / f'said_{next(self._numbers)}'
    arguments = (argv, str(said), self.environment, fast)
    process = self._context.Process(target=entry.main, args=arguments, daemon=True)
    process.said = said
    process.start()
    return process

  def finish(self, workdir: paths.Path, cache: str = 'cache') -> None:
    """Have the run come to its end."""
    process = self.start(workdir, cache)
    process.join(LIMIT)
    assert process.exitcode == 0, f'the run does not go on:\n{process.said.read_text()}'


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  return Runs(tmp_path_factory.mktemp('processes'))


@pytest.fixture(scope='module')
def unbroken(runs):
  """Return what an undisturbed run left."""
  runs.finish(runs.root / 'unbroken')
  return left(runs.root / 'unbroken')


@pytest.fixture
def workdir(request, runs, tmp_path):
  """A work directory on a disk or in a bucket, as the test asks."""
  if request.param == 'disk':
    return tmp_path / 'run'
  server = request.getfixturevalue('bucket')
  server.buckets['bucket'].clear()
  runs.environment = server.environment
  return paths.parse_path('gs://bucket/run')


IN_BUCKET = pytest.mark.parametrize(
  'workdir', ['bucket', pytest.param('disk', marks=FULL_SIZE)], indirect=True
)


def left(workdir: paths.Path) -> tuple[dict[int, dict[str, int]], dict[int, float]]:
  """Return the checksums of all checkpoints and the losses of a run."""
  assert not (workdir / 'damaged').exists(), 'an intact checkpoint was put aside'
  checkpoints = checkpoint.Checkpoints(workdir)
  checksums = {step: checkpoints.meta(step).checksums for step in checkpoints.steps()}
  checkpoints.close()
  losses = [(line['step'], line.get('train/loss')) for line in metrics.read(workdir)]
  return checksums, losses


def check_as_unbroken(workdir: paths.Path, unbroken: tuple, *, killed: bool = True) -> None:
  """Check what a run left. A killed one in a bucket may lack the figures of its last minute."""
  (checksums, losses), (their_checksums, their_losses) = left(workdir), unbroken
  assert max(checksums) == STEPS, f'the last step is not saved: {sorted(checksums)}'
  if not (killed and paths.in_bucket(workdir)):
    assert losses == their_losses, 'figures are lost, doubled, or others'
  for step, values in checksums.items():
    assert values == their_checksums[step], f'the state of step {step} is another one'
  check_claim_is_given_back(workdir)


def check_claim_is_given_back(workdir: paths.Path) -> None:
  newest = claim.read_newest(workdir / 'claim')
  assert newest is None or newest.beat == 'ended', 'the claim was not given back'


def wait_until(condition: Callable[[], bool], process: multiprocessing.Process) -> None:
  """Wait for something that a process does, or for its end."""
  while process.is_alive() and not condition():
    time.sleep(0.002)


def saves_beyond(workdir: paths.Path, step: int) -> Callable[[], bool]:
  """Return the condition that a checkpoint of a later step is complete."""
  return lambda: max(paths.steps(workdir / 'checkpoints'), default=0) > step


@pytest.mark.parametrize('seed', take(range(30), range(1)))
def test_kill_9_at_any_moment(runs, unbroken, seed):
  """Two lives end at a random moment, each in a place of its own: the start, steps, a save."""
  rng, workdir = random.Random(seed), runs.root / f'killed_{seed}'
  cache = rng.choice(['cache', f'cache_{seed}'])
  for _ in range(2):
    sign = rng.choice(['', 'checkpoints', 'config.json', 'metrics.jsonl', 'checkpoints/20'])
    process = runs.start(workdir, cache)
    wait_until(lambda sign=sign: (workdir / sign).exists(), process)
    process.join(rng.uniform(0, 1.5 if sign else 3))
    process.kill()
    process.join()
  runs.finish(workdir, cache)
  check_as_unbroken(workdir, unbroken)


@pytest.mark.parametrize('step', [20, pytest.param(50, marks=FULL_SIZE)])
def test_kill_9_while_a_checkpoint_is_written(runs, unbroken, step):
  workdir = runs.root / f'writing_{step}'
  process = runs.start(workdir)
  directory, pattern = workdir / 'checkpoints', f'{step}.orbax-checkpoint-tmp*'
  wait_until(lambda: any(directory.glob(pattern)), process)
  assert process.is_alive(), 'the write was never seen'
  process.kill()
  process.join()
  assert step not in checkpoint.Checkpoints(workdir).steps(), 'half a checkpoint counts as whole'
  runs.finish(workdir)
  check_as_unbroken(workdir, unbroken)


@pytest.mark.parametrize(
  ('workdir', 'seconds'),
  [
    ('disk', 0),
    ('bucket', 1.5),
    *(
      pytest.param(place, 0.3 * i, marks=FULL_SIZE)
      for place in ('disk', 'bucket')
      for i in range(9)
    ),
  ],
  indirect=['workdir'],
)
def test_one_of_two_runs_in_one_work_directory_trains(runs, unbroken, workdir, seconds):
  """The other ends with a sentence; the figures are those of one run."""
  running = [runs.start(workdir)]
  time.sleep(seconds)
  running.append(runs.start(workdir))
  for process in running:
    process.join(LIMIT)
  said = [process.said.read_text() for process in running]
  if f'{workdir} is trained to step' in said[1]:
    return  # It came after the end of the first.
  assert sorted(process.exitcode for process in running) == [0, MISTAKE], said
  (refused,) = (text for text in said if 'error: ' in text)
  (line,) = refused.splitlines()
  assert line.startswith(f'error: the work directory {workdir} is in use by process ')
  assert line.endswith('wait until it ends, stop it, or choose another --workdir')
  check_as_unbroken(workdir, unbroken, killed=False)


@IN_BUCKET
def test_one_of_two_successors_of_a_killed_run_goes_on_at_once(runs, unbroken, workdir):
  killed = runs.start(workdir)
  wait_until(saves_beyond(workdir, 0), killed)
  killed.kill()
  killed.join()
  successors = [runs.start(workdir) for _ in range(2)]
  for process in successors:
    process.join(LIMIT)
  said = '\n'.join(process.said.read_text() for process in successors)
  statuses = sorted(process.exitcode for process in successors)
  assert statuses in ([0, 0], [0, MISTAKE]), f'no successor trains to the end:\n{said}'
  assert f'was in use by process {killed.pid} on ' in said
  assert 'which is gone; taking over' in said
  assert 'waiting' not in said, 'a process that is gone was waited for'
  assert 'Traceback' not in said, said
  check_as_unbroken(workdir, unbroken)


@IN_BUCKET
def test_an_orphan_ends_and_its_successor_trains_as_if_alone(runs, unbroken, workdir):
  """It is suspended while it trains, replaced, and goes on while its successor trains.

  It may spoil the checkpoint in the middle of which it was suspended: see docs/reliability.md.
  """
  orphan = runs.start(workdir, fast=True)
  try:
    wait_until(saves_beyond(workdir, 0), orphan)
    os.kill(orphan.pid, signal.SIGSTOP)
    before = max(paths.steps(workdir / 'checkpoints'))
    assert before < STEPS, 'the run was over before it could be suspended; make it longer'
    successor = runs.start(workdir, fast=True)
    wait_until(saves_beyond(workdir, before), successor)
    os.kill(orphan.pid, signal.SIGCONT)
    orphan.join(LIMIT)
    assert successor.is_alive(), 'the successor was done before; make the run longer'
    successor.join(LIMIT)
  finally:
    orphan.kill()
  said, said_by_successor = orphan.said.read_text(), successor.said.read_text()
  assert orphan.exitcode == MISTAKE, said
  assert f'the work directory {workdir} was taken over by process {successor.pid}' in said
  assert successor.exitcode == 0, said_by_successor
  assert 'which has been silent for' in said_by_successor
  last = checkpoint.Checkpoints(workdir).meta(STEPS)
  assert last.checksums == unbroken[0][STEPS], 'the last state is another one'
  check_claim_is_given_back(workdir)
