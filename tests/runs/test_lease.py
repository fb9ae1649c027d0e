"""One process at a time works in a directory, whatever storage it is on and whatever clocks say."""

import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import threading
import time

import jax
import pytest
import tiny_run

from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import files
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint, lease
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop

FAST = lease.Timing(beat=0.1, silence=0.6, patience=20)
IMPATIENT = lease.Timing(beat=0.1, silence=0.6, patience=1.2)
# Whoever waits for a silence waits for a minute.
LONG = lease.Timing(beat=0.1, silence=60, patience=90)
SLOW_HEART = lease.Timing(beat=60, silence=0.6, patience=20)


@pytest.fixture
def disk(tmp_path):
  return tmp_path / 'run' / 'lease'


@pytest.fixture(params=['disk', 'bucket'])
def directory(request, disk):
  if request.param == 'disk':
    return disk
  server = request.getfixturevalue('bucket')
  server.buckets['bucket'].clear()
  return paths.parse_path('gs://bucket/run') / 'lease'


def hold(directory, timing=FAST, **options):
  return lease.hold(directory, 'the place', 'go elsewhere', timing=timing, **options)


def left_by(directory, number=1, beat='7', **changes):
  """Write the claim of another process, which `changes` describe."""
  owner = dataclasses.replace(lease._this_process(), **changes)
  directory.mkdir(parents=True, exist_ok=True)
  (directory / f'{number}.json').write_text(json.dumps(dataclasses.asdict(owner)))
  (directory / f'{owner.name}.beat').write_text(beat)
  return owner


def names(directory):
  return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.fixture
def ended():
  """The number of a process that is gone."""
  process = subprocess.Popen(['true'])
  process.wait()
  return process.pid


def test_a_second_owner_is_refused_at_once_and_nothing_is_left(directory):
  with hold(directory) as check:
    began = time.monotonic()
    with (
      pytest.raises(
        UserError,
        match=rf'the place is in use by process {os.getpid()} on .*1\.json.*or go elsewhere$',
      ),
      hold(directory, LONG),
    ):
      pass
    assert time.monotonic() - began < LONG.silence, 'an owner that is surely alive was waited for'
    check()
    assert '1.json' in names(directory), 'who was refused took the lease of its owner along'
  assert not names(directory), 'a lease that was given back leaves files behind'
  assert not directory.parent.exists(), 'directories made for the lease alone are still there'
  with hold(directory) as check:
    check()


def test_an_owner_that_is_gone_is_replaced_at_once(directory, ended, capsys):
  left_by(directory, number=3, process=ended)
  began = time.monotonic()
  with hold(directory, LONG) as check:
    assert time.monotonic() - began < LONG.silence, 'a process that is gone was waited for'
    check()
    said = capsys.readouterr().err
    assert f'was in use by process {ended} on ' in said, 'nothing says whose place was taken'
    assert 'which is gone; taking over' in said
    assert '3.json' not in names(directory), 'the old claim is still there'


def test_a_number_that_another_process_has_now_is_not_its_owner(disk):
  left_by(disk, process=os.getppid(), started='1')
  with hold(disk) as check:
    check()


def test_a_zombie_is_gone(disk):
  process = subprocess.Popen(['true'])
  started = lease._stat(process.pid)[1]
  while lease._stat(process.pid)[0] != 'Z':
    time.sleep(0.01)
  left_by(disk, process=process.pid, started=started)
  with hold(disk) as check:
    check()
  process.wait()


@pytest.mark.parametrize('content', ['', '{"name": "x"}'], ids=['empty', 'of another version'])
def test_an_owner_elsewhere_is_replaced_when_it_is_silent(disk, capsys, content):
  left_by(disk, machine='elsewhere')
  if content:
    (disk / '2.json').write_text(content)
  began = time.monotonic()
  with hold(disk) as check:
    assert time.monotonic() - began >= FAST.silence, 'an owner was given up without watching it'
    check()
  assert 'which has been silent for' in capsys.readouterr().err


@pytest.mark.slow
def test_an_owner_elsewhere_that_lives_is_waited_for_a_while(disk, capsys):
  owner = left_by(disk, machine='elsewhere', host='far', process=42)
  ended = threading.Event()

  def live():
    beats = 0
    while not ended.wait(FAST.beat):
      paths.replace(disk / f'{owner.name}.beat', str(beats := beats + 1))

  thread = threading.Thread(target=live)
  thread.start()
  began = time.monotonic()
  with (
    pytest.raises(UserError, match='in use by process 42 on far, since'),
    hold(disk, IMPATIENT),
  ):
    pass
  ended.set()
  thread.join()
  assert time.monotonic() - began >= IMPATIENT.patience
  assert 'waiting until it ends or falls silent, at most 1 s' in capsys.readouterr().err
  assert '1.json' in names(disk), 'the claim of an owner that lives was removed'


@pytest.mark.slow
def test_time_in_which_nobody_could_look_is_no_silence(disk, monkeypatch):
  """Storage that is away keeps the owner from beating as it keeps others from looking."""
  left_by(disk, machine='elsewhere')
  newest, came_back = lease._newest, []

  def away_at_first(directory):
    found = newest(directory)
    if len(came_back) < 2:
      time.sleep(2 * FAST.silence)
      came_back.append(time.monotonic())
    return found

  monkeypatch.setattr(lease, '_newest', away_at_first)
  with hold(disk) as check:
    assert time.monotonic() - came_back[-1] >= FAST.silence, 'an owner had no time to come back'
    check()


def test_an_owner_that_ends_makes_room_for_who_waits(disk, monkeypatch):
  monkeypatch.setattr(lease, '_life', lambda claim: 'unknown')  # as on another machine
  first = lease._Lease(disk, 'the place', 'go elsewhere', 'in use', False, False, FAST).take()
  threading.Timer(0.3, first.release).start()
  began = time.monotonic()
  with hold(disk, LONG) as check:
    assert time.monotonic() - began < LONG.silence, 'the end of the owner was not noticed'
    check()


def test_who_was_replaced_stops_and_harms_nothing(directory, monkeypatch):
  """As a process that was suspended: no heartbeat, and then it goes on."""
  monkeypatch.setattr(lease, '_life', lambda claim: 'unknown')
  first = lease._Lease(
    directory, 'the place', 'go elsewhere', 'in use', False, False, SLOW_HEART
  ).take()
  first.check()
  with hold(directory) as check:
    with pytest.raises(UserError, match=r'the place was taken over by process .* this process end'):
      first.check()
    first.release()
    check()
    assert '2.json' in names(directory), 'who was replaced removed the claim of its successor'
    with pytest.raises(UserError, match='was taken over by'):
      first.check()
  assert not names(directory)


def test_who_was_replaced_notices_after_its_successor_is_done(directory, monkeypatch):
  """The numbers start from 1 again then, so that a number alone says nothing."""
  monkeypatch.setattr(lease, '_life', lambda claim: 'unknown')
  first = lease._Lease(
    directory, 'the place', 'go elsewhere', 'in use', False, False, SLOW_HEART
  ).take()
  with hold(directory):
    pass
  with hold(directory) as check:
    assert '1.json' in names(directory), 'the test wants the number that was used before'
    with pytest.raises(UserError, match='was taken over by'):
      first.check()
    first.release()
    check()
    assert '1.json' in names(directory), 'who was replaced removed a claim that is not its own'


def test_of_many_successors_one_wins(directory, ended):
  """They see the same claim of a dead process at the same time."""
  for _ in range(3):
    left_by(directory, process=ended)
    together, over, won, refused = threading.Barrier(6), threading.Event(), [], []

    def succeed(together=together, over=over, won=won, refused=refused):
      together.wait()
      try:
        with hold(directory, lease.Timing(0.1, 30, 60)) as check:
          won.append(check)
          over.wait()
          check()
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
    assert (len(won), len(refused)) == (1, 5), 'two processes hold one lease, or none does'


def test_a_heartbeat_that_fails_for_a_while_ends_nothing(disk, monkeypatch):
  write, failed = paths.replace, []

  def full(path, text):
    failed.append(path)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with hold(disk) as check:
    monkeypatch.setattr(paths, 'replace', full)
    while len(failed) < 3:
      check()
      time.sleep(0.02)
    monkeypatch.setattr(paths, 'replace', write)
    before, deadline = lease.state(disk), time.monotonic() + 20
    assert before is None or before[0] == '1'
    beat = next(path for path in disk.iterdir() if path.name.endswith('.beat'))
    text = beat.read_text()
    while beat.read_text() == text:
      assert time.monotonic() < deadline, 'the heart does not beat again'
      time.sleep(0.02)
    check()


@pytest.mark.slow
def test_times_of_files_and_clocks_mean_nothing(tmp_path, monkeypatch):
  directory = tmp_path / 'lease'
  jump = [0.0]
  real = time.time
  monkeypatch.setattr(time, 'time', lambda: real() + jump[0])
  owner = left_by(directory, machine='elsewhere', since='2099-01-01T00:00:00+00:00')
  for path in directory.iterdir():
    os.utime(path, (0, 0))  # Its owner's clock says 1970, as does that of the storage.
  ended = threading.Event()

  def live():
    while not ended.wait(FAST.beat):
      jump[0] += 86400 if jump[0] <= 0 else -2 * 86400
      paths.replace(directory / f'{owner.name}.beat', f'{jump[0]}')
      os.utime(directory / f'{owner.name}.beat', (0, 0))

  thread = threading.Thread(target=live)
  thread.start()
  try:
    with pytest.raises(UserError, match='is in use by'), hold(directory, IMPATIENT):
      pass
  finally:
    ended.set()
    thread.join()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
  (tmp_path / 'run').write_text('')
  with (
    pytest.raises(UserError, match=r'the place cannot be written \(.*\); go elsewhere'),
    hold(tmp_path / 'run' / 'lease'),
  ):
    pass


def test_a_bucket_that_does_not_exist_is_an_error(bucket):
  with (
    pytest.raises(UserError, match=r'the place cannot be written \(it does not exist\)'),
    hold(paths.parse_path('gs://another/run') / 'lease'),
  ):
    pass


def test_a_full_disk_leaves_no_claim(tmp_path, monkeypatch):
  def full(file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, 'fsync', full)
  with (
    pytest.raises(UserError, match=r'cannot be written \(No space left'),
    hold(tmp_path / 'run' / 'lease'),
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
  with lease.hold(workdir / 'lease', 'the place', 'go elsewhere'):
    before = everything(tmp_path)
    with pytest.raises(
      UserError, match=r'the work directory .*run is in use by process .* choose another --workdir'
    ):
      loop.train(make(), workdir)
    assert everything(tmp_path) == before, 'a run that is refused writes'


def test_a_run_that_cannot_start_leaves_no_directory(make, tmp_path):
  with pytest.raises(UserError, match='mesh'):
    loop.train(make(mesh__fsdp=3), tmp_path / 'runs' / 'run')
  assert not (tmp_path / 'runs').exists(), 'a mistake leaves a work directory behind'


@pytest.mark.parametrize('when', [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_run_that_was_replaced_writes_nothing_more(make, tmp_path, monkeypatch, when):
  """It finds out when it is about to write figures (2), or a checkpoint (3)."""
  asked = []

  @contextlib.contextmanager
  def lost_later(*arguments, **options):
    def check():
      if threading.current_thread() is threading.main_thread() and len(asked) < when:
        asked.append(everything(tmp_path / 'run'))
      if len(asked) == when:  # for the heartbeat as well
        raise UserError('taken over')

    yield check

  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])  # compiles faster
  monkeypatch.setattr(lease, 'hold_together', lost_later)
  with pytest.raises(UserError, match='taken over'):
    loop.train(make(train__log_every=4), tmp_path / 'run')
  written = everything(tmp_path / 'run')
  assert len(asked) == when
  before = {path: content for path, content in asked[-1].items() if 'checkpoints' not in str(path)}
  after = {path: content for path, content in written.items() if 'checkpoints' not in str(path)}
  assert after == before, 'figures were written after the work directory was lost'
  assert checkpoint.Checkpoints(tmp_path / 'run').steps() == [], 'a checkpoint was written'


def test_a_target_is_written_by_one_process(directory):
  """Two commands with the same new target: what they write beside it has the same name."""
  target = directory.parent / 'target'
  with files.alone(target):
    with pytest.raises(UserError, match=r'target is being written by .* name another --target'):
      files.write(target, {}, None, {}, lineage=(), step=0)
    target.mkdir()
    (target / 'config.json').write_text('{}')
  with pytest.raises(UserError, match='target exists; name a new directory'):
    files.write(target, {}, None, {}, lineage=(), step=0)
  assert names(target) == ['config.json'], 'what another process wrote was touched'
  assert names(directory.parent) == ['target'], 'something is left beside the target'
