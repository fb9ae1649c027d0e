"""Claims on a directory, so that one program at a time writes there: on a disk or in a bucket.

A claim is a file `N.json` that names its owner. It is created only if it does not exist, which any
storage does in one operation, and it is never rewritten. The claim with the highest number is
valid. Another process takes over from a dead owner by creating `N+1.json`. `N.beat` holds a counter
that only the owner of claim N raises, every ten seconds.

The operating system tells whether an owner on this machine is alive. An owner elsewhere counts as
dead when its counter stands still for a minute by the clock of the process that watches it. Clocks
of two machines are never compared. An owner that was itself silent for half a minute, as after a
suspension, reads the newest claim before it writes anything.

An owner that ends removes its claim if the number is 1. Higher numbers stay, with an ended counter:
a number that was taken over never comes again, so a process that acts on an old listing cannot
create a valid claim.
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

from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.storage import paths, retry

_CLAIM = re.compile(r'(\d+)\.json')
_ENDED = 'ended'  # the counter of an owner that has ended
_HELD: set[str] = set()  # the ids under which this process owns claims


@dataclasses.dataclass(frozen=True)
class Timing:
  """The intervals of a claim, in seconds.

  Attributes:
    beat: the time between two raises of an owner's counter.
    silence: the time after which an owner whose counter stands still counts as dead.
    patience: the time that a process waits for an owner on another machine to end.
  """

  beat: float = 10
  silence: float = 60
  patience: float = 120


@dataclasses.dataclass(frozen=True)
class Owner:
  """The owner that a claim names. `since` is for messages only."""

  id: str
  host: str
  machine: str  # the boot id and the process namespace, or '' if they are unknown
  process: int
  started: str  # the start time of the process, by the system's count
  since: str

  def __str__(self) -> str:
    return f'process {self.process} on {self.host}, since {self.since}'


@dataclasses.dataclass(frozen=True)
class _Newest:
  """The newest claim of a directory. An unreadable one, perhaps half written, has no owner."""

  number: int
  owner: Owner | None
  beat: str

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
  together: bool = False,
  ends_process: bool = False,
  timing: Timing = Timing(),
) -> Iterator['Claim']:
  """Own a directory's claim inside the `with` block.

  Args:
    directory: the directory for the files of claims alone. It is created.
    subject: the name of the claimed thing, for messages.
    advice: the remedy in the message if another process owns the claim.
    doing: the state of the claimed thing, for messages: "it is … by process N".
    waits: whether to wait without limit for a living owner.
    together: whether all processes of a program call this function; the first one takes the claim.
    ends_process: whether to end this process as soon as another one has taken over, even during a
      background write. Otherwise the next `Claim.check` raises.
    timing: the intervals.
  """
  claim = Claim(paths.absolute(directory), subject, timing, ends_process)
  try:
    if not together:
      claim.take(advice, doing, waits=waits)
    else:
      hosts.by_first(lambda: claim.take(advice, doing, waits=waits))
    claim.thread.start()
    yield claim
  finally:
    claim.release()


def directory_for(path: paths.Path) -> paths.Path:
  """Return the directory of the claim to build something at a path."""
  return path.with_name(f'{path.name}.claim')


class Claim:
  """The claim of this process, and the thread that keeps it valid."""

  def __init__(self, directory: paths.Path, subject: str, timing: Timing, ends_process: bool):
    self._directory, self._subject = directory, subject
    self._timing, self._ends_process = timing, ends_process
    self._me = this_process()
    self._number = 0  # 0: this process owns no claim; another one of the program may
    self._beats, self._looked, self._lost = 0, _now_awake(), ''
    self._action: Callable[[], None] = lambda: None
    self._acting, self._released = threading.Lock(), threading.Event()
    self.thread = threading.Thread(target=self._keep, name='claim', daemon=True)
    self._made: list[paths.Path] = []

  def check(self) -> None:
    """Raise a UserError if another process has taken over. Costs nothing while the thread runs."""
    if self._is_overdue():
      retry.retried(self._look, f'reading {self._directory}')
    if self._lost:
      raise UserError(self._lost)

  @contextlib.contextmanager
  def at_each_beat(self, action: Callable[[], None]) -> Iterator[None]:
    """Have the thread call an action after each beat, in all processes of the program."""
    self._action = action
    try:
      yield
    finally:
      self._action = lambda: None
      if self._acting.acquire(timeout=1):  # Storage may keep the action for longer.
        self._acting.release()

  def take(self, advice: str, doing: str, *, waits: bool) -> None:
    """Create the next claim as soon as the newest one has no living owner."""
    doing_this = f'claiming {self._directory}'
    try:
      while not self._number:
        number = self._wait_until_free(advice, doing, waits=waits) + 1
        self._looked = _now_awake()
        if retry.retried(lambda number=number: self._create(number), doing_this):
          self._number = number
        else:
          time.sleep(self._timing.beat / 100)  # Another process was faster.
      retry.retried(self._beat, doing_this)
    except (UserError, TransientError):
      raise
    except paths.errors(self._directory) as error:
      raise UserError(
        f'{self._subject} cannot be written ({paths.reason(error)}); {advice}'
      ) from error
    with contextlib.suppress(paths.errors(self._directory)):  # Old claims do no harm.
      for path in list(self._directory.iterdir()):
        if path.stem.isdigit() and int(path.stem) < self._number:
          path.unlink(missing_ok=True)

  def release(self) -> None:
    """End the claim. Files that cannot be changed count as those of a dead process."""
    self._released.set()
    if self.thread.is_alive():
      self.thread.join(self._timing.beat)
    with contextlib.suppress(paths.errors(self._directory)):
      if self._is_overdue():
        self._look()
      if self._number == 1 and not self._lost:
        self._path('beat').unlink(missing_ok=True)
        self._path('json').unlink(missing_ok=True)
      elif self._number and not self._lost:
        paths.overwrite(self._path('beat'), _ENDED)
    _HELD.discard(self._me.id)
    if not paths.in_bucket(self._directory):
      with contextlib.suppress(OSError):  # a directory that is not empty
        for directory in self._made:
          directory.rmdir()

  def _wait_until_free(self, advice: str, doing: str, *, waits: bool) -> int:
    """Return the number of the newest claim once it has no living owner; 0: there is none."""
    began = changed = looked = time.monotonic()
    seen, announced = None, False
    while True:
      newest = retry.retried(lambda: read_newest(self._directory), f'reading {self._directory}')
      if newest is None or newest.beat == _ENDED:
        return newest.number if newest else 0
      now, alive = time.monotonic(), _is_alive(newest.owner)
      # After a gap in looking, in which the owner may also have been suspended, start again.
      if newest != seen or now - looked > self._timing.silence / 2:
        seen, changed = newest, now
      looked = now
      if alive is False or (alive is None and now - changed >= self._timing.silence):
        why = 'is gone' if alive is False else f'has been silent for {now - changed:.0f} s'
        say(f'{self._subject} was {doing} by {newest}, which {why}; taking over')
        return newest.number
      patience = 0 if alive else self._timing.patience
      if not waits and now - began >= patience:
        raise UserError(
          f'{self._subject} is {doing} by {newest} ({self._directory}/{newest.number}.json); wait '
          f'until it ends, stop it, or {advice}'
        )
      if not announced and (newest.owner or now - began > 1):
        most = '' if waits else f', at most {patience:.0f} s'
        say(f'{self._subject} is {doing} by {newest}; waiting until it ends or falls silent{most}')
        announced = True
      time.sleep(self._timing.beat / 20)

  def _create(self, number: int) -> bool:
    """Create the claim of a number. Return whether it is ours and the newest one.

    A claim that is not the newest one does no harm, so it stays.
    """
    _HELD.add(self._me.id)
    claim = json.dumps(dataclasses.asdict(self._me))
    taken: tuple[type[OSError], ...] = (FileExistsError,)  # by another, or by our own first try
    if not paths.in_bucket(self._directory):
      parents = [self._directory, *self._directory.parents]
      self._made = self._made or [path for path in parents if not path.exists()]
      self._directory.mkdir(parents=True, exist_ok=True)
      taken += (FileNotFoundError,)  # An owner that ended has just removed the directory.
    with contextlib.suppress(*taken):
      paths.create(self._directory / f'{number}.json', claim)
    newest = read_newest(self._directory)
    return newest is not None and newest.owner == self._me

  def _is_overdue(self) -> bool:
    """Return whether another process can have taken over since the last look."""
    silent = _now_awake() - self._looked > self._timing.silence / 2
    return bool(self._number) and silent and not self._lost

  def _look(self) -> None:
    """Note whether another process has taken over."""
    now, newest = _now_awake(), read_newest(self._directory)
    if newest and newest.owner != self._me and (newest.owner or newest.number > self._number):
      self._lost = (
        f'{self._subject} was taken over by {newest}, because this process had been silent for '
        f'{self._timing.silence:.0f} s or more, as if suspended; this process ends, and the other '
        'one continues'
      )
    self._looked = now

  def _beat(self) -> None:
    self._beats += 1
    paths.overwrite(self._path('beat'), f'{self._beats}')

  def _keep(self) -> None:
    """Look and raise the counter until the claim is released or lost."""
    while not self._released.wait(self._timing.beat) and not self._lost:
      # Storage may fail for a while; the next round tries again.
      with contextlib.suppress(paths.errors(self._directory)):
        if self._number:
          self._look()
          if not self._lost:
            self._beat()
      if not self._lost:
        with self._acting:
          self._action()
    if self._lost and self._ends_process and not self._released.is_set():
      with contextlib.suppress(OSError, ValueError):
        print(f'error: {self._lost}', file=sys.stderr, flush=True)
      os._exit(2)

  def _path(self, ending: str) -> paths.Path:
    return self._directory / f'{self._number}.{ending}'


def read_newest(directory: paths.Path) -> _Newest | None:
  """Return the newest claim in a directory, or None if there is none."""
  try:
    names = [path.name for path in directory.iterdir()]
  except FileNotFoundError:
    return None
  numbers = [int(claim[1]) for name in names if (claim := _CLAIM.fullmatch(name))]
  if not numbers:
    return None
  number, owner, beat = max(numbers), None, ''
  # Its owner may be writing the claim, or have just removed it.
  with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
    owner = Owner(**json.loads((directory / f'{number}.json').read_text()))
  with contextlib.suppress(FileNotFoundError):
    beat = (directory / f'{number}.beat').read_text()
  return _Newest(number, owner, beat)


def this_process() -> Owner:
  """Return a new identity of this process."""
  return Owner(
    id=uuid.uuid4().hex,
    host=socket.gethostname(),
    machine=_machine(),
    process=os.getpid(),
    started=process_status(os.getpid())[1],
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


def process_status(process: int) -> tuple[str, str]:
  """Return the state and the start time of a process, or two empty strings."""
  try:
    fields = pathlib.Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()
  except OSError:
    return '', ''
  return fields[0], fields[19]


def _is_alive(owner: Owner | None) -> bool | None:
  """Return whether an owner lives, by this machine's system; None if the system cannot know."""
  machine = _machine()
  if owner is None or not machine or owner.machine != machine:
    return None
  state, started = process_status(owner.process)
  if not state:
    try:
      os.kill(owner.process, 0)
    except ProcessLookupError:
      return False
    except PermissionError:
      pass
    return None  # The process exists, but is hidden from other users.
  if started != owner.started or state in 'ZX':
    return False
  if owner.process == os.getpid() and owner.id not in _HELD:
    return False  # This process ended the claim, but could not write that.
  return None if state in 'Tt' else True  # T: stopped, perhaps for ever


def _now_awake() -> float:
  """Return seconds by a clock that also counts while the machine sleeps, if there is one."""
  return time.clock_gettime(getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC))
