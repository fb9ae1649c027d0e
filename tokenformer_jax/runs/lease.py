"""A lease on a directory, local, shared or in a bucket: one process at a time works there.

The lease of a work directory is in WORKDIR/lease. A claim, `N.json`, names its owner: host,
process, time. A claim is created only if the file does not exist, which every storage does in one
operation, and it never changes. The claim with the highest number is valid. `OWNER.beat` holds a
counter that its owner raises every few seconds; no other process writes it. So two processes never
write the same file, and a suspended process cannot harm its successor.

The operating system reports whether an owner on the same machine is alive. An owner elsewhere
counts as dead when its counter stands still for a while by the clock of the watching process.
Clocks of two machines are never compared, and no clock has to be right. A process that finds itself
replaced stops before it writes anything more.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.storage import paths, retry

_T = TypeVar('_T')
_CLAIM = re.compile(r'(\d+)\.json')
_ACTIVE: set[str] = set()  # names under which this process owns leases


@dataclasses.dataclass(frozen=True)
class Timing:
  """The intervals of a lease, in seconds.

  Attributes:
    beat: the time between two raises of an owner's counter.
    silence: the time after which an owner whose counter stands still counts as dead.
    patience: the time that a process waits for an owner on another machine to end.
  """

  beat: float = 10
  silence: float = 60
  patience: float = 120


@dataclasses.dataclass(frozen=True)
class _Owner:
  """The owner that a claim names. `since` is for messages only."""

  name: str
  host: str
  machine: str  # the machine and its process namespace (see `_machine`), or ''
  process: int
  started: str  # the start time of the process, by the system's count
  since: str

  def __str__(self) -> str:
    return f'process {self.process} on {self.host}, since {self.since}'


@dataclasses.dataclass(frozen=True)
class _Claim:
  number: int
  owner: _Owner | None  # None: not readable, for example while the claim is being written
  beat: str = ''

  def __str__(self) -> str:
    return str(self.owner or 'an unknown process')


@contextlib.contextmanager
def hold(
  directory: paths.Path,
  subject: str,
  advice: str,
  *,
  doing: str = 'in use',
  waits: bool = False,
  ends_process: bool = False,
  timing: Timing = Timing(),
) -> Iterator[Callable[[], None]]:
  """Hold the lease in a directory for the duration of the context.

  Args:
    directory: the directory for the lease's files alone. It is created, and removed at the end.
    subject: the name of the leased thing, for messages.
    advice: the remedy in the message if another process holds the lease.
    doing: the state of the leased thing, for messages: "it is … by process N".
    waits: whether to wait without limit for a living owner.
    ends_process: whether to end this process as soon as another one takes over, even in the middle
      of a background write. Otherwise the next check raises.
    timing: the intervals of the lease.

  Yields:
    A function that raises a UserError if another process has taken over the lease. It costs nothing
    while the heartbeat runs.

  Raises:
    UserError: another process holds the lease, or the directory cannot be written.
  """
  lease = _Lease(directory, subject, advice, doing, waits, ends_process, timing)
  try:
    lease.take()
    yield lease.check
  finally:
    lease.release()


@contextlib.contextmanager
def hold_together(
  directory: paths.Path,
  subject: str,
  advice: str,
  *,
  doing: str = 'in use',
  ends_process: bool = False,
  timing: Timing = Timing(),
) -> Iterator[Callable[[], None]]:
  """Hold a lease for all processes of a program. The first process takes it, as `hold` does.

  Raises:
    UserError: the lease could not be taken; all processes raise it.
  """
  lease = _Lease(directory, subject, advice, doing, False, ends_process, timing)
  try:
    hosts.first_then_others(lambda: lease.take() if hosts.is_first() else lease)
    yield lease.check
  finally:
    lease.release()


def directory_beside(path: paths.Path) -> paths.Path:
  """Return the folder of the lease for building something at a path."""
  return path.with_name(f'{path.name}.lease')


def state(directory: paths.Path) -> tuple[str, ...] | None:
  """Return a value that changes while the lease's owner lives, or None if it surely has no owner.

  Raises:
    OSError, or any error of a bucket: the directory cannot be read.
  """
  claim = _newest(directory)
  if claim is None or _life(claim) == 'gone':
    return None
  return (str(claim.number), claim.owner.name if claim.owner else '', claim.beat)


class _Lease:
  """One process's side of a lease."""

  def __init__(
    self,
    directory: paths.Path,
    subject: str,
    advice: str,
    doing: str,
    waits: bool,
    ends_process: bool,
    timing: Timing,
  ):
    self._directory = paths.absolute(directory)
    self._subject, self._advice, self._doing = subject, advice, doing
    self._waits, self._ends_process, self._timing = waits, ends_process, timing
    self._me = _this_process()
    self._number = 0  # the number of our claim, or 0 without a claim
    self._beats = 0
    self._lost = ''
    self._looked = 0.0  # when the thread last finished a look and a beat
    self._busy = threading.Lock()
    self._released = threading.Event()
    self._thread = threading.Thread(target=self._live, name='lease', daemon=True)
    self._made: list[paths.Path] = []

  def take(self) -> '_Lease':
    """Wait for the lease as the timing allows, claim it, and start the heartbeat."""
    try:
      self._retried(self._make_directory)
      while not self._claim(self._wait_until_free()):
        time.sleep(self._timing.beat / 100)  # Another process was faster, or gave up.
      self._retried(self._beat)
      with contextlib.suppress(paths.errors(self._directory)):  # Old claims do no harm.
        self._remove_others()
    except (UserError, TransientError):
      raise
    except paths.errors(self._directory) as error:
      raise UserError(
        f'{self._subject} cannot be written ({paths.reason(error)}); {self._advice}'
      ) from error
    self._looked = _awake()
    self._thread.start()
    return self

  def check(self) -> None:
    """Raise a UserError if another process has taken over the lease."""
    # A long time without a look means that this process or its machine was suspended.
    overdue = self._number and not self._lost and _awake() - self._looked > self._timing.silence / 2
    if overdue and self._busy.acquire(blocking=False):
      with contextlib.suppress(paths.errors(self._directory)):
        self._look()
      self._busy.release()
    if self._lost:
      raise UserError(self._lost)

  def release(self) -> None:
    """Give the lease back. Files that cannot be removed count as those of a dead process."""
    self._released.set()
    if self._thread.is_alive():
      self._thread.join(self._timing.beat)
    if self._number:
      with contextlib.suppress(paths.errors(self._directory)):
        self._look()
        if not self._lost:
          self._path(self._number).unlink(missing_ok=True)
        self._beat_path(self._me).unlink(missing_ok=True)
    _ACTIVE.discard(self._me.name)
    if (self._number or self._made) and not paths.in_bucket(self._directory):
      with contextlib.suppress(OSError):
        for directory in [self._directory, *self._made]:
          directory.rmdir()  # Raises if the directory is not empty; then its parents also stay.

  def _make_directory(self) -> None:
    if paths.in_bucket(self._directory):
      return  # Buckets have no directories.
    parents = self._directory.parents
    self._made = self._made or [parent for parent in parents if not parent.exists()]
    self._directory.mkdir(parents=True, exist_ok=True)

  def _wait_until_free(self) -> _Claim | None:
    """Wait until the newest claim is free, and return it; return None if there is no claim.

    Raises:
      UserError: the claim's owner is alive.
    """
    began = changed = looked = time.monotonic()
    seen, announced = None, False
    while (claim := self._retried(lambda: _newest(self._directory))) is not None:
      now, life = time.monotonic(), _life(claim)
      # Restart the clock after a gap in looking, in which the owner may also have been suspended.
      if claim != seen or now - looked > self._timing.silence / 2:
        seen, changed = claim, now
      looked = now
      if life == 'gone':
        say(f'{self._subject} was {self._doing} by {claim}, which is gone; taking over')
        return claim
      if life == 'unknown' and now - changed >= self._timing.silence:
        say(
          f'{self._subject} was {self._doing} by {claim}, which has been silent for '
          f'{now - changed:.0f} s; taking over'
        )
        return claim
      patience = 0 if life == 'alive' else self._timing.patience
      if not self._waits and now - began >= patience:
        raise UserError(
          f'{self._subject} is {self._doing} by {claim} ({self._path(claim.number)}); wait until '
          f'it ends, stop it, or {self._advice}'
        )
      if not announced and (
        claim.owner or now - began > 1
      ):  # An unreadable claim may be half written.
        most = '' if self._waits else f', at most {patience:.0f} s'
        say(
          f'{self._subject} is {self._doing} by {claim}; waiting until it ends or falls '
          f'silent{most}'
        )
        announced = True
      time.sleep(self._timing.beat / 20)
    return None

  def _claim(self, free: _Claim | None) -> bool:
    """Claim the lease after a free claim. Return False if another process was faster."""
    self._number = free.number + 1 if free else 1
    _ACTIVE.add(self._me.name)
    if self._retried(self._create) and self._retried(lambda: self._is_alone(free)):
      return True
    self._number = 0
    return False

  def _create(self) -> bool:
    """Create the claim. Return False if another process has this number."""
    path, content = self._path(self._number), json.dumps(dataclasses.asdict(self._me))
    for more_tries in (2, 1, 0):
      try:
        paths.create(path, content)
        break
      except FileExistsError:
        break  # The file may be ours, if the reply to a first try was lost.
      except FileNotFoundError:
        if not more_tries:
          raise
        self._make_directory()  # Another process has just removed the directory.
    mine = _read(self._directory, self._number)
    return mine is not None and mine.owner == self._me

  def _is_alone(self, free: _Claim | None) -> bool:
    """Return whether the free claim is the only other one. If not, withdraw our claim.

    If two processes claim at the same time, at least one of them sees the other's claim here.
    """
    for number in _numbers(self._directory):
      theirs = _read(self._directory, number) if number != self._number else None
      if theirs and not (free and (number < free.number or theirs.owner == free.owner)):
        self._path(self._number).unlink(missing_ok=True)
        return False
    return True

  def _retried(self, action: Callable[[], _T]) -> _T:
    return retry.retried(action, f'taking the lease {self._directory}')

  def _look(self) -> None:
    """Find out whether another process has taken over the lease. Raise if it cannot be read."""
    claims = [_read(self._directory, number) for number in _numbers(self._directory)]
    mine = any(claim and claim.owner == self._me for claim in claims)
    others = [claim for claim in claims if claim and claim.owner != self._me]
    if others and (others[0].number > self._number or not mine):
      self._lost = (
        f'{self._subject} was taken over by {others[0]}, '
        f'because this process had been silent for {self._timing.silence:.0f} s or more, as if '
        'suspended; this process ends, and the other one continues'
      )

  def _beat(self) -> None:
    self._beats += 1
    paths.replace(self._beat_path(self._me), f'{self._beats}')  # There is no time for retries.

  def _live(self) -> None:
    """Look at the claims and raise the counter until the lease is released or lost."""
    while not self._released.wait(self._timing.beat) and not self._lost:
      with self._busy:
        # Storage may fail for a while; the next round tries again.
        with contextlib.suppress(paths.errors(self._directory)):
          self._look()
          if not self._lost:
            self._beat()
        self._looked = _awake()
    if self._lost and self._ends_process and not self._released.is_set():
      with contextlib.suppress(OSError, ValueError):
        print(f'error: {self._lost}', file=sys.stderr, flush=True)
      os._exit(2)

  def _remove_others(self) -> None:
    """Remove the files of earlier owners."""
    ours = self._path(self._number).name, self._beat_path(self._me).name
    for path in list(self._directory.iterdir()):
      found = _CLAIM.fullmatch(path.name)
      if path.name not in ours and not (found and int(found[1]) > self._number):
        path.unlink(missing_ok=True)

  def _path(self, number: int) -> paths.Path:
    return self._directory / f'{number}.json'

  def _beat_path(self, owner: _Owner) -> paths.Path:
    return _beat_path(self._directory, owner)


def _beat_path(directory: paths.Path, owner: _Owner) -> paths.Path:
  return directory / f'{owner.name}.beat'


def _numbers(directory: paths.Path) -> list[int]:
  """Return the numbers of all claims, the highest first."""
  try:
    names = [path.name for path in directory.iterdir()]
  except FileNotFoundError:
    return []
  return sorted((int(found[1]) for n in names if (found := _CLAIM.fullmatch(n))), reverse=True)


def _read(directory: paths.Path, number: int) -> _Claim | None:
  """Return a claim, or None if it does not exist."""
  try:
    owner = _Owner(**json.loads((directory / f'{number}.json').read_text()))
  except FileNotFoundError:
    return None
  except (ValueError, TypeError):
    return _Claim(number, None)
  try:
    return _Claim(number, owner, _beat_path(directory, owner).read_text())
  except FileNotFoundError:
    return _Claim(number, owner)


def _newest(directory: paths.Path) -> _Claim | None:
  """Return the valid claim, or None if there is no claim."""
  while numbers := _numbers(directory):
    for number in numbers:
      if (claim := _read(directory, number)) is not None:
        return claim
    time.sleep(0.01)  # All claims were removed after they were listed.
  return None


def _this_process() -> _Owner:
  return _Owner(
    name=uuid.uuid4().hex,
    host=socket.gethostname(),
    machine=_machine(),
    process=os.getpid(),
    started=_stat(os.getpid())[1],
    since=datetime.datetime.now().astimezone().isoformat(timespec='seconds'),
  )


def _machine() -> str:
  """Return an id that processes share if they can see each other's process numbers, or ''.

  The boot id distinguishes machines and reboots; the process namespace distinguishes containers.
  """
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _stat(process: int) -> tuple[str, str]:
  """Return the state and the start time of a process, or two empty strings."""
  try:
    fields = pathlib.Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()
  except OSError:
    return '', ''
  return fields[0], fields[19]


def _life(claim: _Claim) -> Literal['alive', 'gone', 'unknown']:
  """Return whether the owner of a claim lives, as far as this machine's system knows."""
  owner, machine = claim.owner, _machine()
  if owner is None or not machine or owner.machine != machine:
    return 'unknown'
  state, started = _stat(owner.process)
  if not state:
    try:
      os.kill(owner.process, 0)
    except ProcessLookupError:
      return 'gone'
    except PermissionError:
      pass
    return 'unknown'  # The process exists, but is hidden from other users.
  if started != owner.started or state in 'ZX':
    return 'gone'
  if owner.process == os.getpid() and owner.name not in _ACTIVE:
    return 'gone'  # This process gave the lease back, but could not remove the claim.
  return 'unknown' if state in 'Tt' else 'alive'  # T: stopped, perhaps for ever.


def _awake() -> float:
  """Return seconds by a clock that also counts while the machine sleeps, if there is one."""
  return time.clock_gettime(getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC))
