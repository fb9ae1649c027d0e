"""One process at a time owns a directory, whatever storage it is on and whatever clocks say."""

import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import claimants
import pytest
import tiny_run
from claimants import FAST, SLOW_BEAT, hold

from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.runs import claim
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop

IMPATIENT = claim.Timing(beat=0.1, silence=0.6, patience=1.2)
# A process that waits for silence waits for a minute.
LONG = claim.Timing(beat=0.1, silence=60, patience=90)


@pytest.fixture
def disk(tmp_path):
  return tmp_path / 'run' / 'claim'


@pytest.fixture(params=['disk', 'bucket'])
def directory(request, disk):
  if request.param == 'disk':
    return disk
  server = request.getfixturevalue('bucket')
  server.buckets['bucket'].clear()
  return paths.parse_path('gs://bucket/run') / 'claim'


def write_claim(directory, number=1, beat='7', **changes):
  """Write the claim of another process, which `changes` describe."""
  owner = dataclasses.replace(claim.this_process(), **changes)
  directory.mkdir(parents=True, exist_ok=True)
  (directory / f'{number}.json').write_text(json.dumps(dataclasses.asdict(owner)))
  (directory / f'{number}.beat').write_text(beat)


def names(directory):
  return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.fixture
def ended():
  """The number of a process that has ended."""
  process = subprocess.Popen(['true'])
  process.wait()
  return process.pid


def test_a_second_owner_is_refused_at_once_and_no_file_is_left(directory):
  with hold(directory) as held:
    began = time.monotonic()
    with (
      pytest.raises(
        UserError,
        match=rf'the folder is in use by process {os.getpid()} on .*1\.json.*or go elsewhere$',
      ),
      hold(directory, LONG),
    ):
      pass
    assert time.monotonic() - began < LONG.silence, 'an owner that is surely alive was waited for'
    held.check()
    assert '1.json' in names(directory), 'the refused process removed the claim of the owner'
  assert not names(directory), 'a claim that ended leaves files behind'
  assert not directory.parent.exists(), 'directories made for the claim alone are still there'
  with hold(directory) as held:
    held.check()


def test_an_owner_that_is_gone_is_replaced_at_once(directory, ended, capsys):
  write_claim(directory, number=3, process=ended)
  began = time.monotonic()
  with hold(directory, LONG) as held:
    assert time.monotonic() - began < LONG.silence, 'a process that is gone was waited for'
    held.check()
    said = capsys.readouterr().err
    assert f'was in use by process {ended} on ' in said, 'the dead owner is not named'
    assert 'which is gone; taking over' in said
    assert names(directory) == ['4.beat', '4.json']


def test_numbers_do_not_restart_after_a_takeover(directory, ended, capsys):
  """Then a process that acts on an old listing cannot create a valid claim."""
  write_claim(directory, number=3, process=ended)
  for number in (4, 5):
    with hold(directory, LONG):
      assert f'{number}.json' in names(directory)
  assert capsys.readouterr().err.count('taking over') == 1, 'an ended owner was called dead'
  late = claim.Claim(directory, 'the folder', FAST, ends_process=False)
  assert not late._create(4), 'a claim below the newest one counts'
  with hold(directory) as held:
    held.check()


def test_a_process_number_that_is_used_again_and_a_zombie_are_gone(disk):
  zombie = subprocess.Popen(['true'])
  started = claim.process_status(zombie.pid)[1]
  while claim.process_status(zombie.pid)[0] != 'Z':
    time.sleep(0.01)
  for owner in (
    {'process': os.getppid(), 'started': '1'},
    {'process': zombie.pid, 'started': started},
  ):
    write_claim(disk, number=9, **owner)
    with hold(disk, LONG) as held:
      held.check()
    (disk / '10.json').unlink()
  zombie.wait()


@pytest.mark.parametrize('content', ['', '{"id": "x"}'], ids=['empty', 'of another version'])
def test_an_owner_elsewhere_is_replaced_when_it_is_silent(disk, capsys, content):
  write_claim(disk, machine='elsewhere')
  if content:
    (disk / '2.json').write_text(content)
  began = time.monotonic()
  with hold(disk) as held:
    assert time.monotonic() - began >= FAST.silence, 'an owner was given up without watching it'
    held.check()
  assert 'which has been silent for' in capsys.readouterr().err


@contextlib.contextmanager
def beating(directory, jump):
  """Raise the counter of claim 1 from a thread, as its owner on another machine does."""
  ended, beats = threading.Event(), iter(range(10**6))

  def beat():
    while not ended.wait(FAST.beat):
      jump()
      paths.overwrite(directory / '1.beat', str(next(beats)))
      os.utime(directory / '1.beat', (0, 0))  # The clock of the storage says 1970.

  thread = threading.Thread(target=beat)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


@pytest.mark.slow
def test_times_of_files_and_clocks_mean_nothing(disk, monkeypatch, capsys):
  """An owner elsewhere that lives is waited for a while, whatever the clocks say."""
  jumps, real = [0.0], time.time
  monkeypatch.setattr(time, 'time', lambda: real() + jumps[0])
  write_claim(disk, machine='elsewhere', host='far', process=42, since='2099-01-01T00:00:00+00:00')

  def jump():
    jumps[0] += 86400 if jumps[0] <= 0 else -2 * 86400

  began = time.monotonic()
  with (
    beating(disk, jump),
    pytest.raises(UserError, match='in use by process 42 on far, since'),
    hold(disk, IMPATIENT),
  ):
    pass
  assert time.monotonic() - began >= IMPATIENT.patience
  assert 'waiting until it ends or falls silent, at most 1 s' in capsys.readouterr().err
  assert '1.json' in names(disk), 'the claim of a living owner was removed'


@pytest.mark.slow
def test_time_without_a_look_does_not_count_as_silence(disk, monkeypatch):
  """Storage that fails keeps the owner from beating as it keeps others from looking."""
  write_claim(disk, machine='elsewhere')
  read_newest, came_back = claim.read_newest, []

  def fail_at_first(directory):
    newest = read_newest(directory)
    if len(came_back) < 2:
      time.sleep(2 * FAST.silence)
      came_back.append(time.monotonic())
    return newest

  monkeypatch.setattr(claim, 'read_newest', fail_at_first)
  with hold(disk) as held:
    assert time.monotonic() - came_back[-1] >= FAST.silence, 'an owner had no time to come back'
    held.check()


@pytest.fixture
def unknown(monkeypatch):
  """The system does not know whether owners live, as on another machine."""
  monkeypatch.setattr(claim, '_is_alive', lambda owner: None)


def test_a_waiting_process_notices_the_end_of_the_owner(disk, unknown):
  first = contextlib.ExitStack()
  first.enter_context(hold(disk))
  threading.Timer(0.1, first.close).start()
  began = time.monotonic()
  with hold(disk, LONG) as held:
    assert time.monotonic() - began < LONG.silence, 'the end of the owner was not noticed'
    held.check()


def test_a_replaced_owner_stops_and_does_no_harm(directory, unknown):
  """It is like a process that was suspended: it has no heartbeat, and then it continues."""
  with contextlib.ExitStack() as ended:
    first = ended.enter_context(hold(directory, SLOW_BEAT))
    first.check()
    with hold(directory) as held:
      with pytest.raises(UserError, match=r'the folder was taken over by .* this process ends'):
        first.check()
      ended.close()
      held.check()
      assert '2.json' in names(directory), 'the replaced owner removed the new claim'
  with pytest.raises(UserError, match='was taken over by'):
    first.check()


def test_a_replaced_owner_notices_after_its_successor_has_ended(directory, unknown):
  with hold(directory, SLOW_BEAT) as first:
    with hold(directory):
      pass
    time.sleep(SLOW_BEAT.silence / 2)
    with pytest.raises(UserError, match='was taken over by'):
      first.check()


def test_a_run_cannot_write_while_its_claim_cannot_be_read(disk, monkeypatch):
  now = [0.0]
  monkeypatch.setattr(claim, '_now_awake', lambda: now[0])

  def fail(directory):
    raise PermissionError(errno.EACCES, 'no permission')

  with hold(disk, claim.Timing()) as held:
    with monkeypatch.context() as patch:
      patch.setattr(claim, 'read_newest', fail)
      held.check()
      now[0] += 31
      with pytest.raises(PermissionError):
        held.check()
    held.check()


def test_one_of_many_successors_wins(directory, ended):
  """They see the same claim of a dead process at the same time."""
  write_claim(directory, process=ended)
  together, over, won, refused = threading.Barrier(6), threading.Event(), [], []

  def succeed():
    together.wait()
    try:
      with hold(directory, claim.Timing(0.1, 30, 60)) as held:
        won.append(held)
        over.wait()
        held.check()
    except UserError as error:
      refused.append(error)

  threads = [threading.Thread(target=succeed) for _ in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    while thread.is_alive() and len(won) + len(refused) < 6:
      time.sleep(0.01)
  over.set()
  for thread in threads:
    thread.join()
  assert (len(won), len(refused)) == (1, 5), 'two processes own one claim, or none does'


@pytest.mark.slow
def test_sixty_takeovers_have_one_owner_each(tmp_path, ended):
  """Processes take over at the same instant. Those that end at once may follow each other."""
  rounds, processes, context = 60, 3, multiprocessing.get_context('spawn')
  for number in range(rounds):
    write_claim(tmp_path / str(number), process=ended)
  together, owners = context.Barrier(processes), context.Array('i', rounds)
  arguments = (tmp_path, rounds, together, owners)
  running = [context.Process(target=claimants.succeed, args=arguments) for _ in range(processes)]
  for process in running:
    process.start()
  for process in running:
    process.join(300)
  assert [process.exitcode for process in running] == [0] * processes, 'an owner was replaced'
  newest = [claim.read_newest(tmp_path / str(number)) for number in range(rounds)]
  # Numbers count the takeovers: every owner has its own.
  assert [entry.number - 1 for entry in newest] == list(owners)
  assert {entry.beat for entry in newest} == {'ended'}
  assert set(owners[1::2]) == {1}


@pytest.mark.slow
def test_a_suspended_owner_that_wakes_finds_its_successor(disk):
  context = multiprocessing.get_context('spawn')
  ready, result = context.Event(), context.Queue()
  owner = context.Process(target=claimants.own, args=(disk, ready, result), daemon=True)
  owner.start()
  assert ready.wait(60)
  os.kill(owner.pid, signal.SIGSTOP)
  while claim.process_status(owner.pid)[0] not in 'Tt':
    time.sleep(0.01)  # its threads stop one after the other
  with hold(disk) as held:
    os.kill(owner.pid, signal.SIGCONT)
    assert f'taken over by process {os.getpid()} on' in result.get(timeout=60)
    owner.join(60)
    held.check()


def test_a_heartbeat_that_fails_for_a_while_ends_nothing(disk, monkeypatch):
  write, failed = paths.overwrite, []

  def full(path, text):
    failed.append(path)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with hold(disk) as held:
    monkeypatch.setattr(paths, 'overwrite', full)
    while len(failed) < 3:
      held.check()
      time.sleep(0.02)
    monkeypatch.setattr(paths, 'overwrite', write)
    before, deadline = claim.read_newest(disk), time.monotonic() + 20
    while claim.read_newest(disk) == before:
      assert time.monotonic() < deadline, 'the counter does not rise again'
      time.sleep(0.02)
    held.check()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
  (tmp_path / 'run').write_text('')
  with (
    pytest.raises(UserError, match=r'the folder cannot be written \(.*\); go elsewhere'),
    hold(tmp_path / 'run' / 'claim'),
  ):
    pass


def test_a_full_disk_leaves_no_claim(tmp_path, monkeypatch):
  def full(file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, 'fsync', full)
  with (
    pytest.raises(UserError, match=r'cannot be written \(No space left'),
    hold(tmp_path / 'run' / 'claim'),
  ):
    pass
  assert not (tmp_path / 'run').exists(), 'an empty claim keeps the next process waiting'


@pytest.fixture
def make(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'corpus')
  return lambda **changes: tiny_run.config(source, tmp_path / 'cache', **changes)


def everything(directory):
  return {path: path.read_bytes() for path in directory.rglob('*') if path.is_file()}


def test_a_second_run_is_refused_before_it_touches_anything(make, tmp_path):
  workdir = tmp_path / 'run'
  with claim.hold(workdir / 'claim', 'the folder', 'go elsewhere'):
    before = everything(tmp_path)
    with pytest.raises(
      UserError, match=r'the work directory .*run is in use by process .* choose another workdir'
    ):
      loop.train(make(), workdir)
    assert everything(tmp_path) == before, 'a run that is refused writes'


def test_a_run_that_cannot_start_leaves_no_directory(make, tmp_path):
  with pytest.raises(UserError, match='mesh'):
    loop.train(make(mesh__fsdp=3), tmp_path / 'runs' / 'run')
  assert not (tmp_path / 'runs').exists(), 'a mistake leaves a work directory behind'


def test_a_target_is_written_by_one_process(directory):
  """Two commands have the same new target, and the same name for their unfinished files."""
  target = directory.parent / 'target'
  with grow_run.alone(target):
    with pytest.raises(UserError, match=r'target is being written by .* name another target'):
      grow_run.write(target, Meta(0, Config(), {}), {})
    target.mkdir()
    (target / 'config.json').write_text('{}')
  with pytest.raises(UserError, match='target exists; name a new directory'):
    grow_run.write(target, Meta(0, Config(), {}), {})
  assert names(target) == ['config.json'], 'the files of another process were touched'
  assert names(directory.parent) == ['target'], 'something is left in the folder of the target'
