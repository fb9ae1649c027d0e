"""Build the token store of a run in a process that shares no heap with the run."""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys

import jax

from tokenformer_jax.config import Config
from tokenformer_jax.data import store

_PARENT_DEATH_SIGNAL = 1  # of <sys/prctl.h>


class StoreProcess:
  """A process that waits until it is asked for the token store of a config, or not needed.

  Make it before `heap.keep_freed_memory`: then all threads of the run share one heap, where the
  threads of a tokenizer would wait for each other, two to three times as long as they compute. A
  fork is safe while JAX has no devices, and so no threads.
  """

  def __init__(self, config: Config):
    """Fork the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    self._socket, theirs = socket.socketpair()
    self._process = os.fork()
    if not self._process:
      self._socket.close()
      _wait_and_build(config, theirs)
    theirs.close()

  def start(self) -> None:
    """Have the process build the store, and go on meanwhile; call `end` before it is needed."""
    with contextlib.suppress(BrokenPipeError):
      self._socket.sendall(b'1')

  def has_ended(self, seconds: float) -> bool:
    """Wait for the end of the process, at most so long, and return whether it has come."""
    return bool(select.select([self._socket], [], [], seconds)[0])

  def end(self) -> None:
    """Return when the process has ended: at once, or when a store that was started is built.

    If it cannot be built, the run, which builds a missing store itself, reports the reason. Further
    calls do nothing.
    """
    self._socket.close()
    if self._process:
      os.waitpid(self._process, 0)
    self._process = 0


def fork(config: Config) -> StoreProcess | None:
  """Return a process for the store of a run; None for a run without a store in the cache."""
  named = config.data.store or config.data.mixture
  if config.model.kind != 'lm' or named or jax.distributed.is_initialized():
    return None
  return StoreProcess(config)


def _wait_and_build(config: Config, run: socket.socket) -> None:
  """Be the process: build the store on the first byte from the run, and end without one."""
  try:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if run.recv(1):
      store.prepare(config.data)
    sys.stdout.flush()
  finally:
    os._exit(0)
