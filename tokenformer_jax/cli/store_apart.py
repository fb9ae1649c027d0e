"""Build the token store of a run in a process that shares no heap with the run."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import jax

from tokenformer_jax.config import Config
from tokenformer_jax.data import store

_PARENT_DEATH_SIGNAL = 1  # of <sys/prctl.h>


def fork(config: Config) -> Callable[[], None]:
  """Fork a process that waits, and return a function that has it build the store of a config.

  Call this before `heap.keep_freed_memory`: then all threads of this process share one heap, where
  the threads of a tokenizer would wait for each other, two to three times as long as they compute.
  A fork is safe while JAX has no devices, and so no threads.

  The function returns when the store is built, or when it cannot be: then the run, which builds a
  missing store itself, reports the reason. It does nothing for runs without a store in the cache.
  """
  named = config.data.store or config.data.mixture
  if config.model.kind != 'lm' or named or jax.distributed.is_initialized():
    return lambda: None
  sys.stdout.flush()
  sys.stderr.flush()
  read, write = os.pipe()
  process = os.fork()
  if not process:
    os.close(write)
    _wait_and_build(config, read)
  os.close(read)

  def build() -> None:
    os.write(write, b'1')
    os.close(write)
    os.waitpid(process, 0)

  return build


def _wait_and_build(config: Config, read: int) -> None:
  """Be the process: build the store on the first byte of a pipe, and end when the run does."""
  try:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.read(read, 1):
      store.prepare(config.data)
    sys.stdout.flush()
  finally:
    os._exit(0)
