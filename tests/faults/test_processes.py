"""Processes that are killed at any moment, or that meet in one work directory."""

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import entry
import pytest
import tiny_run
from seeds import draw_seeds

from tokenformer_jax.runs import checkpoint, metrics

pytestmark = pytest.mark.slow

STEPS = 60
MISTAKE = 2  # the exit status
CHANGES = {'train__steps': STEPS, 'train__checkpoint_every': 5, 'train__keep_checkpoints': 99}


class Runs:
  """Runs of one config, each in processes of its own."""

  def __init__(self, root: Path):
    """Start the process that the others are forked from."""
    self.root, self._numbers = root, itertools.count()
    self._source = tiny_run.write_corpus(root / 'corpus')
    self._context = multiprocessing.get_context('forkserver')
    self._context.set_forkserver_preload(entry.PRELOAD)
    path = os.pathsep.join([str(tiny_run.ROOT), *map(str, Path(__file__).parents[:2])])
    environment = {**tiny_run.environment(), 'PYTHONPATH': path}
    with mock.patch.dict(os.environ, environment):
      multiprocessing.forkserver.ensure_running()

  def start(self, workdir: Path, cache: str = 'cache') -> multiprocessing.Process:
    """Start the run in a work directory."""
    argv = tiny_run.command(self._source, self.root / cache, workdir, **CHANGES)[1:]
    argv.insert(1, f'--config={tiny_run.ROOT}/configs/lm_stdlib.py')
    said = self.root / f'said_{next(self._numbers)}'
    process = self._context.Process(target=entry.main, args=(argv, str(said)), daemon=True)
    process.said = said
    process.start()
    return process

  def finish(self, workdir: Path, cache: str = 'cache') -> None:
    """Have the run come to its end."""
    process = self.start(workdir, cache)
    process.join(120)
    assert process.exitcode == 0, f'the run does not go on:\n{process.said.read_text()}'


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  return Runs(tmp_path_factory.mktemp('processes'))


@pytest.fixture(scope='module')
def unbroken(runs):
  """Return what an undisturbed run left."""
  runs.finish(runs.root / 'unbroken')
  return left(runs.root / 'unbroken')


def left(workdir: Path) -> tuple[dict[int, dict[str, int]], dict[int, float]]:
  """Return the checksums of all checkpoints and the losses of a run."""
  assert not (workdir / 'damaged').exists(), 'an intact checkpoint was put aside'
  checkpoints = checkpoint.Checkpoints(workdir)
  checksums = {step: checkpoints.meta(step).checksums for step in checkpoints.steps()}
  checkpoints.close()
  losses = [(line['step'], line.get('train/loss')) for line in metrics.read(workdir)]
  return checksums, losses


def check_as_unbroken(workdir: Path, unbroken: tuple) -> None:
  (checksums, losses), (their_checksums, their_losses) = left(workdir), unbroken
  assert max(checksums) == STEPS, f'the last step is not saved: {sorted(checksums)}'
  assert losses == their_losses, 'figures are lost, doubled, or others'
  for step, values in checksums.items():
    assert values == their_checksums[step], f'the state of step {step} is another one'


def wait_until(condition: Callable[[], bool], process: multiprocessing.Process) -> None:
  """Wait for something that a process does, or for its end."""
  while process.is_alive() and not condition():
    time.sleep(0.002)


@pytest.mark.parametrize('seed', draw_seeds(2, 30))
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


@pytest.mark.parametrize('step', [20, pytest.param(50, marks=pytest.mark.full_size)])
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


@pytest.mark.parametrize('seed', draw_seeds(2, 10))
def test_two_runs_in_one_work_directory(runs, unbroken, seed):
  """One trains, the other ends with a sentence; the figures are those of one run."""
  rng, workdir = random.Random(seed), runs.root / f'two_{seed}'
  first = runs.start(workdir)
  time.sleep(rng.choice([0, 0, rng.uniform(0, 3)]))
  second = runs.start(workdir)
  first.join(120)
  second.join(120)
  statuses = sorted([first.exitcode, second.exitcode])
  said = '\n'.join(process.said.read_text() for process in (first, second))
  if second.said.read_text().startswith(f'{workdir} is trained to step'):
    return  # It came after the end of the first.
  assert statuses == [0, MISTAKE], f'both runs train, or none does:\n{said}'
  assert said.count('error: ') == 1 and 'Traceback' not in said, said
  check_as_unbroken(workdir, unbroken)


@pytest.mark.parametrize('seed', draw_seeds(2, 10))
def test_a_successor_of_a_killed_run_that_meets_another(runs, unbroken, seed):
  """One of two successors takes over from a run that was killed."""
  rng, workdir = random.Random(seed), runs.root / f'successors_{seed}'
  killed = runs.start(workdir)
  wait_until((workdir / 'checkpoints' / '5').exists, killed)
  killed.kill()
  killed.join()
  successors = [runs.start(workdir) for _ in range(2)]
  time.sleep(rng.uniform(0, 1))
  for process in successors:
    process.join(120)
  statuses = sorted(process.exitcode for process in successors)
  said = '\n'.join(process.said.read_text() for process in successors)
  assert statuses in ([0, 0], [0, MISTAKE]), f'no successor trains to the end:\n{said}'
  assert 'Traceback' not in said, said
  check_as_unbroken(workdir, unbroken)
