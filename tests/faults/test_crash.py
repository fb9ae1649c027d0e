"""kill -9 at any moment: the run ends bit for bit where an unbroken one does."""

import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_run

from tokenformer_jax.data import store
from tokenformer_jax.runs import checkpoint

pytestmark = pytest.mark.slow

STEPS = 300
CHANGES = {'train__steps': STEPS, 'train__checkpoint_every': 20, 'train__eval_every': 100}


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  root = tmp_path_factory.mktemp('crash')
  return root, tiny_run.write_corpus(root / 'corpus')


@pytest.fixture(scope='module')
def unbroken(corpus):
  """The checksums of the last state of a run that nothing interrupts."""
  root, source = corpus
  command = tiny_run.command(source, root / 'cache', root / 'unbroken', **CHANGES)
  done = tiny_run.run(command)
  assert done.returncode == 0, done.stderr
  return last_checksums(root / 'unbroken')


def last_checksums(workdir):
  checkpoints = checkpoint.Checkpoints(workdir)
  assert checkpoints.steps()[-1] == STEPS, 'the run did not reach its end'
  return checkpoints.meta(STEPS).checksums


def start_run(command):
  return subprocess.Popen(
    command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=tiny_run.environment()
  )


def kill_when(command, condition):
  """Starts a run and kills it as soon as the condition holds; False if it ended before."""
  process = start_run(command)
  while process.poll() is None:
    if condition():
      process.send_signal(signal.SIGKILL)
      process.wait()
      return True
    time.sleep(0.002)
  assert process.returncode == 0, 'the run failed by itself'
  return False


def finish(command, workdir):
  done = tiny_run.run(command)
  assert done.returncode == 0, done.stderr
  return last_checksums(workdir)


def test_kills_at_random_moments(corpus, unbroken):
  """Four kills of one run, each a random time after its first sign of progress in that life."""
  root, source = corpus
  workdir = root / 'random'
  command = tiny_run.command(source, root / 'cache', workdir, **CHANGES)
  rng = random.Random(0)
  kills = 0
  lines = workdir / 'metrics.jsonl'
  while kills < 4:
    seen = lines.stat().st_size if lines.exists() else 0
    wait, started = rng.uniform(0, 0.6), []

    def progressed(seen=seen, wait=wait, started=started):
      if not started and lines.exists() and lines.stat().st_size != seen:
        started.append(time.monotonic())
      return bool(started) and time.monotonic() - started[0] > wait

    if not kill_when(command, progressed):
      break
    kills += 1
  assert kills >= 3, f'the run ended after {kills} kills; make it longer'
  assert finish(command, workdir) == unbroken, 'a kill changed the result'


@pytest.mark.parametrize('step', [20, pytest.param(60, marks=pytest.mark.full_size)])
def test_a_kill_while_a_checkpoint_is_written(corpus, unbroken, step):
  root, source = corpus
  workdir = root / f'writing_{step}'
  command = tiny_run.command(source, root / 'cache', workdir, **CHANGES)
  pattern = f'{step}.orbax-checkpoint-tmp*'

  def writing():
    return any(Path(workdir, 'checkpoints').glob(pattern))

  assert kill_when(command, writing), 'the write was never seen'
  assert step not in checkpoint.Checkpoints(workdir).steps(), 'half a checkpoint counts as whole'
  assert finish(command, workdir) == unbroken, 'the kill changed the result'


def test_a_kill_while_the_token_store_is_made(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  for i in range(60, 1000):  # long enough to be caught
    (tmp_path / f'corpus/{i}.txt').write_text(f'def function_{i}(x): return x + {i}\n' * 40)
  config = tiny_run.config(source, tmp_path / 'clean', data__tokenizer='bpe:300')
  expected = store.prepare(config.data)
  command = tiny_run.command(
    source, tmp_path / 'cache', tmp_path / 'run', data__tokenizer='bpe:300', train__steps=1
  )

  def building():
    return any(path.is_dir() for path in Path(tmp_path, 'cache').glob('stores/*'))

  assert kill_when(command, building), 'the store was never seen in the making'
  done = tiny_run.run(command)
  assert done.returncode == 0, done.stderr
  config = tiny_run.config(source, tmp_path / 'cache', data__tokenizer='bpe:300')
  made = store.prepare(config.data)
  np.testing.assert_array_equal(
    made.train[:], expected.train[:], err_msg='the store is another one'
  )
