"""Build the token store of a run in a process that shares no heap with the run."""

import contextlib
import ctypes
import os
import signal
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
    read, self._write = os.pipe()
    self._process = os.fork()
    if not self._process:
      os.close(self._write)
      _wait_and_build(config, read)
    os.close(read)

  def build(self) -> None:
    """Have the process build the store; return when it is built, or cannot be.

    The run itself builds a store that is missing then, and reports the reason. After the first call
    of `build` or `close` further calls do nothing.
    """
    self._finish(b'1')

  def close(self) -> None:
    """End the process, whose store the run does not need."""
    self._finish(b'')

  def _finish(self, asked: bytes) -> None:
    if not self._process:
      return
    with contextlib.suppress(BrokenPipeError), open(self._write, 'wb', buffering=0) as pipe:
      pipe.write(asked)
    os.waitpid(self._process, 0)
    self._process = 0


def fork(config: Config) -> StoreProcess | None:
  """Return a process for the store of a run; None for a run without a store in the cache."""
  named = config.data.store or config.data.mixture
  if config.model.kind != 'lm' or named or jax.distributed.is_initialized():
    return None
  return StoreProcess(config)


def _wait_and_build(config: Config, read: int) -> None:
  """Be the process: build the store on the first byte of a pipe, and end when it is closed."""
  try:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.read(read, 1):
      store.prepare(config.data)
    sys.stdout.flush()
  finally:
    os._exit(0)
