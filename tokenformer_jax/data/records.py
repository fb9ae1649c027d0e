"""Read TensorFlow Datasets sets in `array_record` files, for text and for images."""

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenformer_jax.errors import TransientError, UserError

# array_record reports a failed system call in its message only: 'pread() failed: Input/…; …'.
_SYSTEM_CALL = re.compile(r'\w+\(\) failed: .*')


def read(examples: Sequence[Any], number: int) -> Any:
  """Return the example with a number.

  Raises:
    OSError: the system cannot read the file now; the example itself may be good.
    Exception: any other error of array_record, unchanged.
  """
  try:
    return examples[number]
  except RuntimeError as error:
    if match := _SYSTEM_CALL.search(str(error)):
      raise OSError(errno.EIO, match[0]) from error
    raise


@contextlib.contextmanager
def opening(setting: str, name: str) -> Iterator[None]:
  """Say what to do where TFDS cannot open the set of a setting `tfds:NAME`."""
  try:
    yield
  except (UserError, TransientError):
    raise
  except Exception as error:  # TFDS raises exceptions of many types.
    reason = str(error).strip().partition('\n')[0]
    raise UserError(
      f'{setting} is tfds:{name}, which cannot be opened ({reason}); prepare it with '
      f'`tfds build {name} --file_format=array_record`, or point the environment variable '
      'TFDS_DATA_DIR at the folder where it is prepared in that format'
    ) from error
