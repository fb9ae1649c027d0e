"""The library that makes file calls fail (flaky.c): building, loading and configuring it."""

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# A mount or a network that fails for a while; none of them says anything about a file's content.
TRANSIENT = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.EBUSY)


def build(directory: Path) -> Path:
  """Compile the library into a directory; skip the test where there is no C compiler."""
  compiler = shutil.which('cc')
  if compiler is None or os.uname().sysname != 'Linux':
    pytest.skip('the faults are injected by a library that takes Linux and a C compiler (cc)')
  library = directory / 'flaky.so'
  source = Path(__file__).with_name('flaky.c')
  subprocess.run(
    [compiler, '-O2', '-shared', '-fPIC', '-o', library, source, '-ldl'], check=True, timeout=60
  )
  return library


class Shim:
  """The library in this process, which was started with it (LD_PRELOAD)."""

  def __init__(self, library: str):
    self._library = ctypes.CDLL(library)

  @contextlib.contextmanager
  def failing(
    self,
    directory: os.PathLike[str],
    *,
    seed: int = 0,
    one_in: int = 0,
    burst: int = 1,
    room: int = -1,
    errors: Sequence[int] = TRANSIENT,
  ) -> Iterator[None]:
    """Have calls on the files below a directory fail.

    Args:
      directory: an absolute path.
      seed: of what fails, and how.
      one_in: one call in so many fails; 0: none.
      burst: how many calls fail in a row.
      room: bytes that can be written until the disk is full; -1: any number.
      errors: the error numbers to draw from.
    """
    configure = self._library.flaky_configure
    numbers = (ctypes.c_int * len(errors))(*errors)

    def set_directory(path: bytes) -> None:
      configure(
        path, ctypes.c_uint64(seed), one_in, burst, ctypes.c_long(room), numbers, len(errors)
      )

    set_directory(os.fsencode(directory))
    try:
      yield
    finally:
      set_directory(b'')
