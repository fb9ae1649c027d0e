"""Several processes as one program: how they are joined, how they stop, and what is said of a loss.

On a TPU pod every host runs the same command, with GPUs often every device does. JAX finds the
others on TPU VMs, GKE, SLURM and Open MPI; elsewhere --coordinator, --num_processes and
--process_id say where they are. A process that has no others pays for none of this.

Nothing is waited for without end. A process that starts alone gives up after --start_timeout. A
process that loses another one learns it from the broken connection (collectives between CPUs and
GPUs, and the coordinator's), else from JAX after --heartbeat_timeout; JAX then ends the process
from C++ with its stack, so the sentence that explains it comes from a shell that waits for that.
Work that may take hours in one process is waited for in the coordinator's store of keys and values,
not in a collective, so that the others can say that they wait.
"""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from absl import flags

# For the address that JAX found, which a message names, and the coordinator's store.
from jax._src import distributed
from jax.experimental import multihost_utils

from tokenformer_jax import retry
from tokenformer_jax.errors import TransientError, UserError

_T = TypeVar('_T')

_EVERY_HOST = (
  'start the same command on every host (TPU VMs: gcloud compute tpus tpu-vm ssh NAME '
  "--worker=all --command='…'; SLURM: srun …)"
)
# In what JAX raises when a connection to another process breaks or stays silent.
_LOSS = re.compile(
  r'Gloo|NCCL|coordination|heartbeat|barrier|closed by peer|reset by peer|UNAVAILABLE|ABORTED',
  re.IGNORECASE,
)
_AGAIN = (
  'start the same command on every host again: a training run goes on from its last checkpoint'
)
TRANSIENT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: to be started again
SAY_SECONDS = 600  # between two lines that say that a process waits
_GRACE = 3  # seconds for which the coordinator, without which all are ended, outlives its own error


def define_flags() -> None:
  """Defines the flags of a command that can run on several hosts."""
  flags.DEFINE_string(
    'coordinator', None, 'HOST:PORT of process 0, where JAX does not find the others by itself.'
  )
  flags.DEFINE_integer('num_processes', None, 'How many processes there are.', lower_bound=1)
  flags.DEFINE_integer('process_id', None, 'Which one this is, from 0.', lower_bound=0)
  flags.DEFINE_integer(
    'start_timeout', 300, 'Seconds to wait for the other processes at the start.', lower_bound=1
  )
  flags.DEFINE_integer(
    'heartbeat_timeout', 100, 'Seconds of silence after which a process is lost.', lower_bound=1
  )


def is_first() -> bool:
  """Whether this process is the one that writes and speaks. Initialises no device on its own."""
  return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def joined(*, stops: bool = False) -> Iterator[None]:
  """Joins the processes of this program, if there are several, for the time inside.

  What is printed by others than the first goes nowhere. An error inside ends this process at once,
  because leaving in good order waits for the others, who wait for this one.

  Args:
    stops: whether SIGTERM is for a `StopRequest`, and does not end the process.

  Raises:
    UserError: the flags do not say where the others are, or they cannot be joined.
  """
  jax.config.update('jax_enable_preemption_service', stops)
  _join()
  if not jax.distributed.is_initialized() or jax.process_count() == 1:
    yield
    return
  ended = (
    f'error: process {jax.process_index()} of {jax.process_count()} was killed, or ended by JAX '
    'because another process of this program had ended, whose output says why (JAX says so above, '
    f'then); {_AGAIN}'
  )
  last_words = _LastWords(ended)
  if not is_first():
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115 (for the life of the process)
  try:
    yield
    jax.distributed.shutdown()
    last_words.withdraw()
  except BaseException as error:
    last_words.withdraw()
    _end(error)


def is_loss(error: BaseException | None) -> bool:
  """Whether an exception, or one that it comes of, says that another process is gone."""
  if not jax.distributed.is_initialized() or jax.process_count() == 1:
    return False
  while error is not None:
    # JAX raises nothing else; storage, whose errors read alike, raises other types.
    if isinstance(error, RuntimeError) and _LOSS.search(str(error)):
      return True
    error = error.__cause__ or error.__context__
  return False


def meet(name: str) -> None:
  """Waits until all processes are here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def in_any(flag: bool) -> bool:
  """Whether a flag is true in any process; all have to ask."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.int32(flag)).any())


def highest(number: int) -> int:
  """Return the highest of the numbers of all processes; all have to ask."""
  if jax.process_count() == 1:
    return number
  return int(multihost_utils.process_allgather(np.int32(number)).max())


def from_first(make: Callable[[], str]) -> str:
  """Return, in all processes, the text that `make` gives in the first; all have to ask.

  Raises:
    UserError, TransientError: what `make` raises; in the others, that it did so in the first.
  """
  if jax.process_count() == 1:
    return make()
  turn = _Turn()
  return turn.take('first', make, str) if is_first() else turn.result_of('first', 'process 0')


def by_first(action: Callable[[], None]) -> None:
  """Call `action` in the first process; all others wait until it is done.

  Raises:
    UserError, TransientError: what `action` raises; in the others, that it did so in the first.
  """
  from_first(lambda: str(action()))


def first_then_others(make: Callable[[], _T]) -> _T:
  """Return what `make` gives, called in the first process, then in those that may find its files.

  It may take hours in any process: the others say now and then that they wait.

  Raises:
    UserError, TransientError: what `make` raises; in the others, that it did so elsewhere.
  """
  if jax.process_count() == 1:
    return make()
  turn = _Turn()
  if is_first():
    made = turn.take('first', make)
    others = range(1, jax.process_count())
    turn.take('others', lambda: [turn.result_of(str(i), f'process {i}') for i in others])
  else:
    turn.result_of('first', 'process 0')
    made = turn.take(str(jax.process_index()), make)
    turn.result_of('others', 'another process')
  return made


class _Turn:
  """Work that processes do by turns; each writes how it ended where all can read it.

  The coordinator keeps that. Waiting for it is not a collective, which some devices give up after
  a while, and in which a process can say nothing.
  """

  _numbers = itertools.count()  # the same in all processes, which do the same

  def __init__(self):
    self._key = f'tokenformer_jax/turn/{next(self._numbers)}'
    self._client = distributed.global_state.client

  def take(
    self, name: str, make: Callable[[], _T], describe: Callable[[_T], str] = lambda made: ''
  ) -> _T:
    """Call `make`, and write under a name how it ended, with a description of what it made."""
    try:
      made = make()
    except Exception as error:
      told = as_told(error)
      if told is None or is_loss(error):
        raise
      self._client.key_value_set(f'{self._key}/{name}', f'{type(told).__name__}:')
      if told is error:
        raise  # An exception that is its own cause has `is_loss` go round for ever.
      raise told from error
    self._client.key_value_set(f'{self._key}/{name}', f':{describe(made)}')
    return made

  def result_of(self, name: str, who: str) -> str:
    """Wait until it is written how something ended, and return the description."""
    started = time.monotonic()
    while True:
      try:
        result = self._client.blocking_key_value_get(f'{self._key}/{name}', SAY_SECONDS * 1000)
        break
      except jax.errors.JaxRuntimeError as error:
        if 'DEADLINE_EXCEEDED' not in str(error):
          raise
      waited = round(time.monotonic() - started)
      this = f'process {jax.process_index()} of {jax.process_count()}'
      _say(f'{this} has waited {waited // 60} min {waited % 60} s for {who}, which is at work')
    failure, _, text = result.partition(':')
    if failure:
      kind = {'UserError': UserError, 'TransientError': TransientError}[failure]
      raise kind(f'{who} could not go on; its output says why')
    return text


def check_same(values: Sequence[int], message: str) -> None:
  """Checks that all processes have the same numbers, each less than 2³¹.

  Raises:
    UserError: they do not, with the message; in all processes.
  """
  if jax.process_count() == 1:
    return
  of_all = multihost_utils.process_allgather(np.array(values, np.int32))
  if (of_all != of_all[0]).any():
    raise UserError(message)


class StopRequest:
  """SIGTERM (a preemption) and Ctrl-C ask for a stop after a step; a second Ctrl-C stops now.

  Among several processes it is enough that one is asked, and all stop after the same step: JAX's
  coordinator tells the others, they say which step they are in, and the one after the latest of
  these is taken. That goes on beside the steps, which wait for it only then; otherwise asking costs
  the host a lock and the device nothing. JAX looks for the signal once a second.
  """

  def __init__(self):
    self._several = jax.process_count() > 1
    self._requested = False
    self._before = {}

  def __enter__(self) -> 'StopRequest':
    # Among several, JAX has SIGTERM.
    numbers = [signal.SIGINT] if self._several else [signal.SIGTERM, signal.SIGINT]
    with contextlib.suppress(ValueError):  # Not in the main thread: nothing to catch.
      for number in numbers:
        self._before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def after(self, step: int) -> bool:
    """Whether to stop after this step; to be asked once a step, in every process."""
    if self._several:
      return multihost_utils.reached_preemption_sync_point(step)
    return self._requested

  def _handle(self, number: int, frame: object) -> None:
    del frame
    if self._requested and number == signal.SIGINT:
      raise KeyboardInterrupt
    self._requested = True
    if self._several:
      signal.raise_signal(signal.SIGTERM)


def _join() -> None:
  values = flags.FLAGS
  given = (values.coordinator, values.num_processes, values.process_id)
  by_hand = given != (None, None, None)
  if by_hand and None in given:
    raise UserError(
      '--coordinator=HOST:PORT, --num_processes=N and --process_id=I go together; give all three, '
      'or none where JAX finds the other processes (TPU VMs, GKE, SLURM, Open MPI)'
    )
  if values.num_processes == 1 or not (by_hand or _may_have_others(os.environ)):
    return
  give_up = threading.Timer(values.start_timeout, _alone)
  give_up.daemon = True
  give_up.start()
  try:
    jax.distributed.initialize(
      *given,
      cluster_detection_method='deactivate' if by_hand else None,
      # After ours: JAX's own ends the process without a sentence.
      initialization_timeout=values.start_timeout + 60,
      heartbeat_timeout_seconds=values.heartbeat_timeout,
    )
  except (ValueError, RuntimeError, OSError) as error:
    if by_hand or not _is_only_a_tpu(os.environ):
      raise UserError(
        f'the processes could not be joined ({" ".join(str(error).split())[:300]}); give '
        '--coordinator=HOST:PORT --num_processes=N --process_id=I'
      ) from error
  finally:
    give_up.cancel()


def _may_have_others(environment: Mapping[str, str]) -> bool:
  """Whether to have JAX look for other processes.

  It would also do so in a pod or a SLURM step of one process, which has no use for it: a warning
  that a package is missing there, and here all GPUs but one out of sight.
  """
  slurm = 'SLURM_STEP_NODELIST' in environment and int(environment.get('SLURM_NTASKS', 1)) > 1
  open_mpi = int(environment.get('OMPI_COMM_WORLD_SIZE', 1)) > 1
  indexed_job = 'KUBERNETES_SERVICE_HOST' in environment and 'JOB_COMPLETION_INDEX' in environment
  names = environment.get('TPU_PROCESS_ADDRESSES') or environment.get('TPU_WORKER_HOSTNAMES', '')
  tpu_pods = ',' in names or int(environment.get('MEGASCALE_NUM_SLICES') or 1) > 1
  if tpu_pods or slurm or open_mpi:
    return True
  return not names and (indexed_job or _is_only_a_tpu(environment))


def _is_only_a_tpu(environment: Mapping[str, str]) -> bool:
  """Whether nothing but a TPU speaks for others: then the VM's metadata says whether there are."""
  named = ('SLURM_STEP_NODELIST', 'OMPI_COMM_WORLD_SIZE', 'KUBERNETES_SERVICE_HOST')
  # JAX sets this when it is imported where there is no TPU.
  return 'TPU_SKIP_MDS_QUERY' not in environment and not any(name in environment for name in named)


def _alone() -> None:
  """Ends the process: the others did not come."""
  found = distributed.global_state
  where = 'for the address of process 0'
  if found.coordinator_address:
    where = f'at {found.coordinator_address} as process {found.process_id} of {found.num_processes}'
  _say(
    f'error: waited {flags.FLAGS.start_timeout} s (--start_timeout) {where}, but not all processes '
    f'have started; {_EVERY_HOST}'
  )
  os._exit(2)


def as_told(error: BaseException) -> UserError | TransientError | None:
  """Return the error as a sentence for the user, or None for a bug, which needs its traceback."""
  if isinstance(error, (UserError, TransientError)):
    return error
  if not isinstance(error, Exception):
    return None
  if retry.is_transient(error):
    return TransientError(
      f'{retry.one_line(error)}; this may pass by itself: run the same command again'
    )
  if retry.is_for_user(error):
    return UserError(f'{retry.one_line(error)}; make room, or check who may read and write there')
  return None


def status_of(error: UserError | TransientError) -> int:
  """Return the exit status of a process that ends with this error."""
  return TRANSIENT_STATUS if isinstance(error, TransientError) else 2


def _end(error: BaseException) -> None:
  """Says what happened and ends the process."""
  status = 1
  this = f'process {jax.process_index()} of {jax.process_count()}'
  if isinstance(error, SystemExit):
    status = int(error.code or 0)
  elif is_loss(error):
    reason = ' '.join(str(error).split())[:200]
    _say(
      f'error: another process of this program has ended, so {this} ends, too ({reason}); the '
      f"other one's output says why; {_AGAIN}"
    )
  elif (told := as_told(error)) is not None:
    status = status_of(told)
    _say(f'error: {told}' if is_first() else f'error ({this}): {told}')
  else:
    traceback.print_exception(error)
  sys.stdout.flush()
  sys.stderr.flush()
  if is_first():
    time.sleep(_GRACE)
  os._exit(status)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


class _LastWords:
  """A shell that says something if this process ends without having withdrawn it."""

  def __init__(self, text: str):
    self._shell = subprocess.Popen(
      ['/bin/sh', '-c', 'read -r withdrawn || echo "$0" >&2', text],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      start_new_session=True,  # A Ctrl-C in the terminal is not for it.
    )

  def withdraw(self) -> None:
    self._shell.communicate(b'\n')
