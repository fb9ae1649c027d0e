"""Storage that fails for a while, is full, or forbids: no work is lost, no checkpoint condemned."""

import contextlib
import errno
import itertools
import os
import shutil
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_run
from outcomes import assert_same
from written_runs import EIO, FULL, HARM, assert_intact, meta, restore, save, state

from tokenformer_jax.cli import main as cli
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.runs import checkpoint, metrics
from tokenformer_jax.storage import paths, retry
from tokenformer_jax.training import loop

pytestmark = pytest.mark.usefixtures('short_pauses')

# Reading


@pytest.mark.parametrize('error', [OSError('503'), EIO, TimeoutError(), OSError('odd')], ids=repr)
def test_reading_is_tried_again(tmp_path, fail, error):
  save(tmp_path, [1.0])
  fail(ocp.Checkpointer, 'restore', [error] * 3)
  assert_intact(tmp_path, 1)


def test_a_checkpoint_that_cannot_be_read_for_long_is_not_taken_for_damaged(tmp_path, fail):
  save(tmp_path, [1.0])
  fail(ocp.Checkpointer, 'restore', itertools.repeat(OSError('503')))
  with pytest.raises(TransientError, match=r'reading .*checkpoints/1 failed 5 times .*503'):
    restore(tmp_path, 1)


def test_missing_rights_are_told(tmp_path, fail):
  save(tmp_path, [1.0])
  fail(ocp.Checkpointer, 'restore', itertools.repeat(PermissionError(errno.EACCES, 'denied')))
  with pytest.raises(UserError, match=r'checkpoints/1 cannot be read \(.*denied\); check its'):
    restore(tmp_path, 1)


@pytest.fixture(scope='module')
def large(tmp_path_factory):
  """A checkpoint of arrays that are too large to lie beside their names, and its files."""
  workdir, rng = tmp_path_factory.mktemp('large'), np.random.default_rng(0)
  arrays = {'a': jnp.asarray(rng.normal(size=(60, 40)), jnp.float32), 'b': jnp.arange(3000)}
  with contextlib.closing(checkpoint.Checkpoints(workdir, keep=1)) as checkpoints:
    checkpoints.save(meta(1), {'params': arrays}, 1.0, wait=True)
  files = sorted(p.relative_to(workdir) for p in workdir.rglob('*') if p.is_file())
  return workdir, arrays, files


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')  # reads that Orbax gave up
@pytest.mark.parametrize('name', HARM)
def test_any_file_of_a_checkpoint_may_be_harmed(large, tmp_path, monkeypatch, name):
  """The checkpoint is damaged, so that the one before it is used, or every bit is as it was."""
  monkeypatch.setattr(retry, 'PAUSES', (1000.0,))  # Damage does not pass.
  workdir, arrays, files = large
  single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = sharding.with_shardings(arrays, dict.fromkeys(arrays, single))
  outcomes = {}
  for i, file in enumerate(files):
    shutil.copytree(workdir, tmp_path / str(i))
    HARM[name](tmp_path / str(i) / file)
    checkpoints = checkpoint.Checkpoints(tmp_path / str(i))
    try:
      got = checkpoints.restore(checkpoints.meta(1), {'params': abstract})['params']
    except checkpoint.DamagedError:
      outcomes[file] = 'damaged'
      continue
    outcomes[file] = 'intact'
    for one, array in arrays.items():
      np.testing.assert_array_equal(got[one], array, err_msg=f'{file} {name} went unnoticed')
  largest = max(files, key=lambda file: (workdir / file).stat().st_size)
  assert 'ocdbt.process_0/d' in str(largest), f'{largest} is no file of arrays'
  for file in (largest, 'checkpoints/1/meta/metadata', 'checkpoints/1/tokenizer/metadata'):
    assert outcomes[Path(file)] == 'damaged', f'{file} {name} counts as {outcomes[Path(file)]}'


def test_a_directory_that_cannot_be_looked_at_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
  save(tmp_path, [1.0])
  monkeypatch.setattr(os.path, 'isdir', lambda path: False)  # as it answers to EIO, and Orbax asks
  with pytest.raises(TransientError, match='could not be read'):
    checkpoint.Checkpoints(tmp_path, keep=1).steps()


def test_all_processes_take_the_step_that_the_first_one_sees(tmp_path, monkeypatch):
  save(tmp_path, [1.0, 1.0])
  monkeypatch.setattr(hosts, 'from_first', lambda make: '[1]')
  _, chosen = checkpoint.open_source(tmp_path, None)
  assert chosen.step == 1, 'each process chooses the checkpoint by what itself sees'


# Writing


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory):
  """The config of a run, how to run it in another directory, and its last state."""
  root = tmp_path_factory.mktemp('unbroken')
  source = tiny_run.write_corpus(root / 'corpus')
  config = tiny_run.config(
    source, root / 'cache', train__log_every=1, train__trackers=('tensorboard',)
  )

  def run(workdir):
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
      return loop.train(config, workdir)

  return run, run(root / 'run')


def is_last_rename(source, target):
  """Whether it makes a checkpoint count, which is the last thing done for one."""
  name = Path(target).name
  return name.isdigit() and Path(source).name == f'{name}.orbax-checkpoint-tmp'


@pytest.mark.slow
def test_a_save_that_fails_is_made_again_and_the_run_is_the_same(unbroken, tmp_path, fail):
  run, want = unbroken
  fail(os, 'rename', [EIO, EIO], is_last_rename)
  fail(ocp.CheckpointManager, 'save', [None, None, OSError('503')])
  assert_same(run(tmp_path), want, 'the run')
  assert checkpoint.Checkpoints(tmp_path).steps()[-1] == 20
  lines = [line['step'] for line in metrics.read(tmp_path) if 'train/loss' in line]
  assert lines == list(range(1, 21)), 'figures are missing, or there twice'


KINDS = {'transient': (EIO, TransientError), 'full': (FULL, UserError)}


@pytest.mark.parametrize('kind', KINDS)
def test_the_last_checkpoint_stays_where_no_further_one_can_be_written(tmp_path, fail, kind):
  error, told = KINDS[kind]
  save(tmp_path, [None], keep=1)
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as checkpoints:
    fail(os, 'rename', itertools.repeat(error), is_last_rename)
    with pytest.raises(told, match=r'the last good checkpoint is step 1; ') as raised:
      checkpoints.save(meta(2), state(2), wait=True)
  assert raised.value.__cause__ is error
  assert_intact(tmp_path, 1)


def test_a_save_that_failed_in_the_background_is_asked_for_again(tmp_path, fail):
  fail(os, 'rename', [EIO, None], is_last_rename)
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as checkpoints:
    checkpoints.save(meta(1), state(1))
    assert until(checkpoints.failed), 'a save that failed is taken for a good one'
    checkpoints.save(meta(2), state(2))
    checkpoints.wait()
    assert not checkpoints.failed(), 'a good save is taken for one that failed'
    assert checkpoints.steps() == [2], 'what was never written is listed'
  assert_intact(tmp_path, 2)


def test_a_failed_save_is_asked_for_again_after_its_pause_and_not_before(
  tmp_path, fail, monkeypatch
):
  now, pauses = [100.0], []
  monkeypatch.setattr(checkpoint, 'time', types.SimpleNamespace(monotonic=lambda: now[0]))
  monkeypatch.setattr(retry, 'PAUSES', (5.0, 20.0))
  monkeypatch.setattr(retry, 'announce', lambda doing, pause, error: pauses.append(pause))
  fail(os, 'rename', [EIO, EIO], is_last_rename)
  with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=1)) as checkpoints:
    for number, pause in enumerate((5.0, 20.0), start=1):
      checkpoints.save(meta(number), state(1))
      assert until(lambda number=number: checkpoints.failed() or len(pauses) == number)
      assert pauses[-1] == pause and not checkpoints.failed(), 'it is asked for at once'
      now[0] += pause - 1
      assert not checkpoints.failed(), 'it is asked for before the end of the pause'
      now[0] += 1
      assert checkpoints.failed(), 'it is not asked for after the pause'
    checkpoints.save(meta(3), state(3), wait=True)
    assert not checkpoints.failed()
  assert_intact(tmp_path, 3)


def until(condition):
  """Whether it comes true within a minute."""
  deadline = time.monotonic() + 60
  while not (found := condition()) and time.monotonic() < deadline:
    time.sleep(0.01)
  return found


# Paths


def test_a_failed_check_does_not_count_as_absence(tmp_path, fail):
  assert paths.exists(tmp_path) and not paths.exists(tmp_path / 'x')
  fail(os, 'stat', itertools.repeat(EIO), lambda path, **_: path == tmp_path)
  with pytest.raises(TransientError, match='looking for'):
    paths.exists(tmp_path)


# The end of a command


ENDS = {
  'told': (TransientError('reading x failed 9 times'), 75, 'error: reading x failed 9 times\n'),
  'not caught': (OSError('503'), 75, 'error: OSError: 503; this may pass by itself: run the same'),
  'full': (FULL, 2, 'error: OSError: [Errno 28] No space left on device; free space'),
}


@pytest.mark.parametrize('name', ENDS)
def test_a_command_ends_with_a_sentence_and_a_status_that_says_whether_to_start_again(
  name, capsys, monkeypatch
):
  error, status, said = ENDS[name]

  def main(argv):
    raise error

  monkeypatch.setattr(cli.app, 'run', lambda run, **_: main(()))
  with pytest.raises(SystemExit) as ended:
    cli.run(main, on_all_hosts=False)
  assert ended.value.code == status
  printed = capsys.readouterr().err
  assert printed.startswith(said) and printed.count('\n') == 1, printed


def test_a_command_that_ctrl_c_ends_prints_nothing(capsys, monkeypatch):
  def interrupted(run, **_):
    raise KeyboardInterrupt

  monkeypatch.setattr(cli.app, 'run', interrupted)
  with pytest.raises(SystemExit) as ended:
    cli.run(lambda argv: None, on_all_hosts=False)
  assert ended.value.code == 130 and not capsys.readouterr().err
