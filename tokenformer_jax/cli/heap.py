"""Keep freed memory in the process, on hosts that compute on their CPUs."""

import ctypes
import sys
from pathlib import Path

# Of <malloc.h>, glibc.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8

_ACCELERATORS = ('accel*', 'vfio/[0-9]*', 'nvidia[0-9]*', 'kfd', 'dxg')  # in /dev


def can_keep_freed_memory(devices: Path = Path('/dev')) -> bool:
  """Return whether this host has no accelerators, by `devices`, and glibc's `mallopt`."""
  return (
    sys.platform == 'linux'
    and not any(any(devices.glob(name)) for name in _ACCELERATORS)
    and hasattr(ctypes.CDLL(None), 'mallopt')
  )


def keep_freed_memory() -> bool:
  """Have glibc keep freed memory for later allocations; return whether it does now.

  Call this where `can_keep_freed_memory`, and before JAX has devices: threads keep the heap of
  their first allocation.

  XLA allocates the temporary arrays of a training step on a CPU with `malloc`, in one piece. By
  default glibc maps such a piece from the kernel and returns it after the step, so each step waits
  while the kernel clears its pages again: an eighth of a step of `lm_stdlib`. Instead, all threads
  use one heap that does not shrink.
  """
  values = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
  return all(ctypes.CDLL(None).mallopt(name, value) for name, value in values.items())
