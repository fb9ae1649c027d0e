"""Run several processes as one program: join them, stop them, and report the loss of one.

On a TPU pod every host runs the same command; with GPUs often one process per device runs it. JAX
finds the other processes on TPU VMs, GKE, SLURM and Open MPI. Elsewhere the user names them with
--coordinator, --num_processes and --process_id. A lone process pays for none of this.

Every wait has an end. A process that starts alone gives up after --start_timeout. A process that
loses a peer learns it from the broken connection (of collectives between CPUs or GPUs, or of the
coordinator), else from JAX after --heartbeat_timeout, which then ends the process from C++ with a
message of its own. For work that may take hours in one process, the others wait at a barrier of the
coordinator and not in a collective, because some devices give that up after a while.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from tokenformer_jax.errors import FaultyDeviceError, TransientError, UserError
from tokenformer_jax.parallel.exit_status import (
  FAULTY_STATUS,
  INTERRUPTED_STATUS,
  TRANSIENT_STATUS,
  Reported,
  as_reported,
  exit_status,
)
from tokenformer_jax.parallel.messages import is_first
from tokenformer_jax.storage import retry

_T = TypeVar('_T')

_EVERY_HOST = (
  'start the same command on every host (TPU VMs: gcloud compute tpus tpu-vm ssh NAME '
  "--worker=all --command='…'; SLURM: srun …)"
)
# Words in the errors that JAX raises when a connection to another process breaks or times out: of
# collectives as ValueError or RuntimeError, of all else as RuntimeError. Storage raises similar
# messages with other types.
_COLLECTIVE = re.compile('Gloo|NCCL')
_LOSS = re.compile(
  'coordination|heartbeat|barrier|closed by peer|reset by peer|UNAVAILABLE|ABORTED', re.IGNORECASE
)
_AGAIN = (
  'start the same command on every host again: a training run continues from its last checkpoint'
)
_WORK_SECONDS = 7 * 24 * 3600  # the longest work for which other processes wait
_GRACE = 3  # seconds that the coordinator outlives its own error: its end ends all processes


@contextlib.contextmanager
def joined(*, stops: bool = False) -> Iterator[None]:
  """Join the processes of this program, if there are several, for the duration of the context.

  Only the first process prints to standard output. An error inside ends this process at once,
  because an orderly exit would wait for the other processes, which wait for this one. With `stops`,
  SIGTERM triggers a `StopRequest` instead of ending the process.
  """
  jax.config.update('jax_enable_preemption_service', stops)
  _join()
  if not jax.distributed.is_initialized() or jax.process_count() == 1:
    yield
    return
  if not is_first():
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115 (open until the process ends)
  try:
    yield
    jax.distributed.shutdown()
  except BaseException as error:
    _end(error)


def is_loss(error: BaseException | None) -> bool:
  """Return whether an exception, or one of its causes, reports the loss of another process."""
  if not jax.distributed.is_initialized() or jax.process_count() == 1:
    return False
  return any(
    isinstance(e, RuntimeError | ValueError)
    and (_COLLECTIVE.search(str(e)) or (isinstance(e, RuntimeError) and _LOSS.search(str(e))))
    for e in retry.chain(error)
  )


def meet(name: str) -> None:
  """Wait until all processes have called this function."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def in_any(flag: bool) -> bool:
  """Return whether a flag is true in any process. All processes must call this function."""
  return bool(highest(int(flag)))


def highest(number: int) -> int:
  """Return the highest number of all processes. All processes must call this function."""
  if jax.process_count() == 1:
    return number
  return int(multihost_utils.process_allgather(np.int32(number)).max())


def own_name() -> str:
  """Return the name of this host, as the program that started this process knows it."""
  named = (os.environ.get(name) for name in ('NODE_NAME', 'SLURMD_NODENAME'))
  return next(filter(None, named), socket.gethostname())


def names() -> list[str]:
  """Return the names of the hosts of all processes. All processes must call this function."""
  return _gather(own_name())


def from_first(make: Callable[[], str]) -> str:
  """Return, in all processes, the text that `make` returns in the first process.

  All processes must call this function. If `make` fails, all raise.
  """
  if jax.process_count() == 1:
    return make()
  return _gather(together(lambda: make() if is_first() else ''))[0]


def by_first(action: Callable[[], None]) -> None:
  """Call `action` in the first process, while all others wait; if it fails, all raise."""
  together(lambda: action() if is_first() else None)


def first_then_others(make: Callable[[], _T]) -> _T:
  """Call `make` in the first process, then in the others, which can use the first one's files.

  `make` may take hours in any process. If it fails in one, all raise.
  """
  if jax.process_count() == 1:
    return make()
  made: list[_T] = []
  by_first(lambda: made.append(make()))
  together(lambda: None if is_first() else made.append(make()))
  return made[0]


def together(action: Callable[[], _T]) -> _T:
  """Call `action` in all processes, and wait for all; if it fails in one, raise in all.

  An error that is a bug is raised at once, and ends this process and then the others.
  """
  if jax.process_count() == 1:
    return action()
  made: list[_T] = []
  failure = None
  try:
    made.append(action())
  except Exception as error:
    failure = as_reported(error)
    if failure is None or is_loss(error):
      raise
    if failure is not error:
      failure.__cause__ = error
  _wait_for_all()
  status = 0 if failure is None else exit_status(failure)
  statuses = multihost_utils.process_allgather(np.int32(status))
  if failure is not None:
    raise failure
  for process, status in enumerate(statuses):
    if status:
      raise _error_of(status, f'process {process} could not go on; its output says why')
  return made[0]


def _wait_for_all() -> None:
  """Wait at a barrier of the coordinator, which may take as long as the work of a process."""
  # Light commands do without Orbax.
  from orbax.checkpoint import multihost  # noqa: PLC0415

  multihost.get_barrier_sync_fn()(key='tokenformer_jax', timeout_ms=1000 * _WORK_SECONDS)


def _error_of(status: int, message: str) -> Reported:
  if status == FAULTY_STATUS:
    return FaultyDeviceError(message, ())
  return TransientError(message) if status == TRANSIENT_STATUS else UserError(message)


def _gather(text: str) -> list[str]:
  """Return the texts of all processes."""
  if jax.process_count() == 1:
    return [text]
  data = np.frombuffer(text.encode(), np.uint8)
  padded = np.pad(data, (0, highest(data.size) + 1 - data.size))
  rows = multihost_utils.process_allgather(padded)
  return [row.tobytes().rstrip(b'\0').decode() for row in rows]


def check_same(values: Sequence[int], message: str) -> None:
  """Check that all processes have the same numbers, each less than 2³¹."""
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
  whom = f' at {given[0]} as process {given[2]} of {given[1]}' if by_hand else ''
  give_up = threading.Timer(values.start_timeout, _end_alone, [whom])
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


def _end_alone(whom: str) -> None:
  """End the process, because the other processes have not started in time."""
  _say(
    f'error: waited {flags.FLAGS.start_timeout} s (--start_timeout){whom}, but not all processes '
    f'have started; {_EVERY_HOST}'
  )
  os._exit(2)


def _end(error: BaseException) -> None:
  """Report an error and end the process."""
  status = 1
  this = f'process {jax.process_index()} of {jax.process_count()}'
  if is_loss(error):
    reason = ' '.join(str(error).split())[:200]
    _say(
      f'error: another process of this program has ended, so {this} also ends ({reason}); the '
      f'output of the other process says why; {_AGAIN}'
    )
  elif isinstance(error, SystemExit):
    status = int(error.code or 0)
  elif isinstance(error, KeyboardInterrupt):
    status = INTERRUPTED_STATUS
  elif (reported := as_reported(error)) is not None:
    status = exit_status(reported)
    _say(f'error: {reported}' if is_first() else f'error ({this}): {reported}')
  else:
    traceback.print_exception(error)
  sys.stdout.flush()
  sys.stderr.flush()
  if is_first():
    time.sleep(_GRACE)
  os._exit(status)


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
