"""The memory that a training process keeps."""

import subprocess
import sys

from tokenformer_jax.cli import heap

_FAULTS = """
import ctypes, pathlib, resource, sys, threading
from tokenformer_jax.cli import heap

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]

def fill_and_free():
  address = library.malloc(1 << 26)
  ctypes.memset(address, 1, 1 << 26)
  library.free(address)

def count_faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  thread = threading.Thread(target=fill_and_free)
  thread.start()
  thread.join()
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = heap.can_keep_freed_memory(pathlib.Path(sys.argv[1])) and heap.keep_freed_memory()
print(kept, count_faults() > 10_000, count_faults() > 10_000)
"""


def _faults(devices) -> str:
  command = [sys.executable, '-c', _FAULTS, str(devices)]
  return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_kernel_clears_the_pages_of_freed_memory_once(tmp_path):
  # musl and macOS have no `mallopt`; there memory is as it was.
  assert _faults(tmp_path) in ('True True False', 'False True True', 'False True False')


def test_a_host_with_an_accelerator_gives_memory_back(tmp_path):
  (tmp_path / 'accel0').touch()
  assert not heap.can_keep_freed_memory(tmp_path)
