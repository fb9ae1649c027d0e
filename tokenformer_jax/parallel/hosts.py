"""Run several processes as one program: join them, stop them, and report the loss of one.

On a TPU pod every host runs the same command; with GPUs often one process per device runs it. JAX
finds the other processes on TPU VMs, GKE, SLURM and Open MPI. Elsewhere the user names them with
--coordinator, --num_processes and --process_id. A lone process pays for none of this.

Every wait has an end. A process that starts alone gives up after --start_timeout. A process that
loses a peer learns it from the broken connection (of collectives between CPUs or GPUs, or of the
coordinator), else from JAX after --heartbeat_timeout. JAX then ends the process from C++ with a
stack trace, so a waiting shell prints the sentence that explains it. For work that may take hours
in one process, the others wait in the coordinator's key-value store, not in a collective, so that
they can report that they wait.
"""

import contextlib
import itertools
import os
import re
import signal
import socket
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

# A private module: the only access to the coordinator's address and key-value store.
from jax._src import distributed
from jax.experimental import multihost_utils

from tokenformer_jax.errors import FaultyDeviceError, TransientError, UserError
from tokenformer_jax.storage import retry

_T = TypeVar('_T')

_EVERY_HOST = (
  'start the same command on every host (TPU VMs: gcloud compute tpus tpu-vm ssh NAME '
  "--worker=all --command='…'; SLURM: srun …)"
)
# Words in the errors that JAX raises when a connection to another process breaks or times out.
_LOSS = re.compile(
  r'Gloo|NCCL|coordination|heartbeat|barrier|closed by peer|reset by peer|UNAVAILABLE|ABORTED',
  re.IGNORECASE,
)
_AGAIN = (
  'start the same command on every host again: a training run continues from its last checkpoint'
)
TRANSIENT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: start the command again
FAULTY_STATUS = 76  # start the command again on other hosts
INTERRUPTED_STATUS = 130  # a shell's status for a command that SIGINT ended
_NAME_BYTES = 64  # of a host's name, the limit of Linux
Reported = UserError | TransientError | FaultyDeviceError
SAY_SECONDS = 600  # between two reports that a process waits
_GRACE = 3  # seconds that the coordinator outlives its own error: its end ends all processes


def define_flags() -> None:
  """Define the flags of a command that can run on several hosts."""
  flags.DEFINE_string(
    'coordinator', None, 'HOST:PORT of process 0, if JAX does not find the processes by itself.'
  )
  flags.DEFINE_integer('num_processes', None, 'The number of processes.', lower_bound=1)
  flags.DEFINE_integer('process_id', None, 'The number of this process, from 0.', lower_bound=0)
  flags.DEFINE_integer(
    'start_timeout', 300, 'Seconds to wait for the other processes at the start.', lower_bound=1
  )
  flags.DEFINE_integer(
    'heartbeat_timeout', 100, 'Seconds of silence until a process counts as lost.', lower_bound=1
  )


def is_first() -> bool:
  """Return whether this process writes and prints. A lone process initialises no device here."""
  return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def joined(*, stops: bool = False) -> Iterator[None]:
  """Join the processes of this program, if there are several, for the duration of the context.

  Only the first process prints to standard output. An error inside ends this process at once,
  because an orderly exit would wait for the other processes, which wait for this one. With `stops`,
  SIGTERM triggers a `StopRequest` instead of ending the process.

  Raises:
    UserError: the flags are incomplete, or the processes cannot be joined.
  """
  jax.config.update('jax_enable_preemption_service', stops)
  _join()
  if not jax.distributed.is_initialized() or jax.process_count() == 1:
    yield
    return
  ended = (
    f'error: process {jax.process_index()} of {jax.process_count()} was killed, or JAX ended it '
    'because another process of this program had ended (then JAX reports it above, and the output '
    f'of the other process says why); {_AGAIN}'
  )
  last_words = _LastWords(ended)
  if not is_first():
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115 (open until the process ends)
  try:
    yield
    jax.distributed.shutdown()
    last_words.withdraw()
  except BaseException as error:
    _end(error, last_words)


def is_loss(error: BaseException | None) -> bool:
  """Return whether an exception, or one of its causes, reports the loss of another process."""
  if not jax.distributed.is_initialized() or jax.process_count() == 1:
    return False
  seen: list[BaseException] = []  # Causes can form a circle.
  while error is not None and error not in seen:
    # JAX raises RuntimeErrors only; storage raises similar messages with other types.
    if isinstance(error, RuntimeError) and _LOSS.search(str(error)):
      return True
    seen.append(error)
    error = error.__cause__ or error.__context__
  return False


def meet(name: str) -> None:
  """Wait until all processes have called this function."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def in_any(flag: bool) -> bool:
  """Return whether a flag is true in any process. All processes must call this function."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.int32(flag)).any())


def highest(number: int) -> int:
  """Return the highest number of all processes. All processes must call this function."""
  if jax.process_count() == 1:
    return number
  return int(multihost_utils.process_allgather(np.int32(number)).max())


def own_name() -> str:
  """Return the name of this host, as the program that placed this process here knows it."""
  named = (os.environ.get(name) for name in ('NODE_NAME', 'SLURMD_NODENAME'))
  return next(filter(None, named), socket.gethostname())


def names() -> list[str]:
  """Return the names of the hosts of all processes. All processes must call this function."""
  if jax.process_count() == 1:
    return [own_name()]
  name = own_name().encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
  found = multihost_utils.process_allgather(np.frombuffer(name, np.uint8))
  return [row.tobytes().decode(errors='replace').strip() for row in found]


def from_first(make: Callable[[], str]) -> str:
  """Return, in all processes, the text that `make` returns in the first process.

  All processes must call this function.

  Raises:
    UserError, TransientError: `make` failed. The other processes report the first one's failure.
  """
  if jax.process_count() == 1:
    return make()
  turn = _Turn()
  return turn.take('first', make, str) if is_first() else turn.wait_for('first', 'process 0')


def by_first(action: Callable[[], None]) -> None:
  """Call `action` in the first process, while all others wait for it.

  Raises:
    UserError, TransientError: `action` failed. The other processes report the first one's failure.
  """
  from_first(lambda: str(action()))


def first_then_others(make: Callable[[], _T]) -> _T:
  """Call `make` in the first process, then in the others, which can use the first one's files.

  `make` may take hours in any process. Waiting processes report now and then that they wait.

  Raises:
    UserError, TransientError: `make` failed in this process or in another one.
  """
  if jax.process_count() == 1:
    return make()
  turn = _Turn()
  if is_first():
    made = turn.take('first', make)
    others = range(1, jax.process_count())
    turn.take('others', lambda: [turn.wait_for(str(i), f'process {i}') for i in others])
  else:
    turn.wait_for('first', 'process 0')
    made = turn.take(str(jax.process_index()), make)
    turn.wait_for('others', 'another process')
  return made


class _Turn:
  """Work that processes do in turns. Each process writes its outcome for all others to read.

  The coordinator stores the outcomes. A collective would not do: some devices give it up after a
  while, and a process cannot print while it waits in one.
  """

  _numbers = itertools.count()  # equal in all processes, because all make the same calls

  def __init__(self):
    self._key = f'tokenformer_jax/turn/{next(self._numbers)}'
    self._client = distributed.global_state.client

  def take(
    self, name: str, make: Callable[[], _T], describe: Callable[[_T], str] = lambda made: ''
  ) -> _T:
    """Call `make`, and write its outcome under a name, with a description of its result."""
    try:
      made = make()
    except Exception as error:
      reported = as_reported(error)
      if reported is None or is_loss(error):
        raise
      self._client.key_value_set(f'{self._key}/{name}', f'{exit_status(reported)}:')
      if reported is error:
        raise
      raise reported from error
    self._client.key_value_set(f'{self._key}/{name}', f':{describe(made)}')
    return made

  def wait_for(self, name: str, who: str) -> str:
    """Wait for the outcome under a name, and return the description of the result."""
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
      _say(f'{this} has waited {waited // 60} min {waited % 60} s for {who}, which is working')
    failure, _, text = result.partition(':')
    if failure:
      message = f'{who} could not go on; its output says why'
      if int(failure) == FAULTY_STATUS:
        raise FaultyDeviceError(message, ())
      raise (TransientError if int(failure) == TRANSIENT_STATUS else UserError)(message)
    return text


def check_same(values: Sequence[int], message: str) -> None:
  """Check that all processes have the same numbers, each less than 2³¹.

  Raises:
    UserError: the numbers differ; all processes raise it with the given message.
  """
  if jax.process_count() == 1:
    return
  gathered = multihost_utils.process_allgather(np.array(values, np.int32))
  if (gathered != gathered[0]).any():
    raise UserError(message)


class StopRequest:
  """A request, by SIGTERM (a preemption) or Ctrl-C, to stop after a step.

  A second Ctrl-C stops at once. If one of several processes gets the signal, all stop after the
  same step: JAX's coordinator notifies the others, each reports its current step, and all stop
  after the step that follows the latest of these. The exchange runs in the background, and steps
  wait for it only after a signal; otherwise a query costs the host a lock and the device nothing.
  JAX checks for the signal once a second.
  """

  def __init__(self):
    self._several = jax.process_count() > 1
    self._requested = False
    self._before = {}

  def __enter__(self) -> 'StopRequest':
    # With several processes JAX handles SIGTERM.
    numbers = [signal.SIGINT] if self._several else [signal.SIGTERM, signal.SIGINT]
    with contextlib.suppress(ValueError):  # Only the main thread can set signal handlers.
      for number in numbers:
        self._before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exception: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def after(self, step: int) -> bool:
    """Return whether to stop after this step. Every process must call this once a step."""
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
      'or none if JAX can find the other processes (TPU VMs, GKE, SLURM, Open MPI)'
    )
  if values.num_processes == 1 or not (by_hand or _may_have_others(os.environ)):
    return
  give_up = threading.Timer(values.start_timeout, _end_alone)
  give_up.daemon = True
  give_up.start()
  try:
    jax.distributed.initialize(
      *given,
      cluster_detection_method='deactivate' if by_hand else None,
      # Longer than our own timeout, because JAX's ends the process without an explanation.
      initialization_timeout=values.start_timeout + 60,
      heartbeat_timeout_seconds=values.heartbeat_timeout,
    )
  except (ValueError, RuntimeError, OSError) as error:
    if by_hand or not _is_only_a_tpu(os.environ):
      raise UserError(
        f'the processes could not be joined ({" ".join(str(error).split())[:300]}); add '
        '--coordinator=HOST:PORT --num_processes=N --process_id=I'
      ) from error
  finally:
    give_up.cancel()


def _may_have_others(environment: Mapping[str, str]) -> bool:
  """Return whether the environment can have several processes, so that JAX should look for them.

  JAX should not look in a Kubernetes pod or SLURM step of one process: in a pod it would warn about
  a missing package, and in a SLURM step it would hide all GPUs but one.
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
  """Return whether a TPU is the only hint at other processes; then the VM's metadata decides."""
  named = ('SLURM_STEP_NODELIST', 'OMPI_COMM_WORLD_SIZE', 'KUBERNETES_SERVICE_HOST')
  # JAX sets this variable at import on a machine without a TPU.
  return 'TPU_SKIP_MDS_QUERY' not in environment and not any(name in environment for name in named)


def _end_alone() -> None:
  """End the process, because the other processes have not started in time."""
  found = distributed.global_state
  where = 'for the address of process 0'
  if found.coordinator_address:
    where = f'at {found.coordinator_address} as process {found.process_id} of {found.num_processes}'
  _say(
    f'error: waited {flags.FLAGS.start_timeout} s (--start_timeout) {where}, but not all processes '
    f'have started; {_EVERY_HOST}'
  )
  os._exit(2)


def as_reported(error: BaseException) -> Reported | None:
  """Return an error as a sentence for the user, or None for a bug, which needs its traceback."""
  if isinstance(error, Reported):
    return error
  if not isinstance(error, Exception):
    return None
  if retry.is_transient(error):
    return TransientError(
      f'{retry.one_line(error)}; this may pass by itself: run the same command again'
    )
  if retry.is_for_user(error):
    return UserError(f'{retry.one_line(error)}; free space, or check the permissions there')
  return None


def exit_status(error: Reported) -> int:
  """Return the exit status of a process that ends with this error."""
  if isinstance(error, FaultyDeviceError):
    return FAULTY_STATUS
  return TRANSIENT_STATUS if isinstance(error, TransientError) else 2


def _end(error: BaseException, last_words: '_LastWords') -> None:
  """Report an error and end the process."""
  status = 1
  this = f'process {jax.process_index()} of {jax.process_count()}'
  if is_loss(error):
    # JAX may end this process as well, at any moment and with many lines.
    reason = ' '.join(str(error).split())[:200]
    last_words.replace(
      f'error: another process of this program has ended, so {this} also ends ({reason}); the '
      f'output of the other process says why; {_AGAIN}'
    )
  else:
    if isinstance(error, SystemExit):
      status = int(error.code or 0)
    elif isinstance(error, KeyboardInterrupt):
      status = INTERRUPTED_STATUS
    elif (reported := as_reported(error)) is not None:
      status = exit_status(reported)
      _say(f'error: {reported}' if is_first() else f'error ({this}): {reported}')
    else:
      traceback.print_exception(error)
    last_words.withdraw()
  sys.stdout.flush()
  sys.stderr.flush()
  if is_first():
    time.sleep(_GRACE)
  os._exit(status)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


class _LastWords:
  """A shell that prints a line when this process ends, unless the process withdraws the line."""

  def __init__(self, text: str):
    self._shell = subprocess.Popen(
      [
        *('/bin/sh', '-c'),
        'while read -r line; do set -- "$line"; done; test -z "$1" || printf "%s\\n" "$1" >&2',
        *('sh', text),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C in the terminal must not reach the shell.
    )

  def replace(self, text: str) -> None:
    self._shell.stdin.write(f'{text}\n'.encode())
    self._shell.stdin.flush()

  def withdraw(self) -> None:
    self._shell.communicate(b'\n')
