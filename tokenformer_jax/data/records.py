"""TensorFlow Datasets sets in `array_record` files, of text and of images alike."""

import errno
import re
from collections.abc import Sequence
from typing import Any

from tokenformer_jax.errors import UserError

# How array_record says that the system did not give it the file: 'pread() failed: Input/…; …'.
_SYSTEM_CALL = re.compile(r'\w+\(\) failed: .*')


def read(examples: Sequence[Any], number: int) -> Any:
  """Return an example.

  Raises:
    OSError: the file that it is in cannot be read, which may pass and is not the example's fault.
    Exception: what else goes wrong, as it comes.
  """
  try:
    return examples[number]
  except RuntimeError as error:
    if found := _SYSTEM_CALL.search(str(error)):
      raise OSError(errno.EIO, found[0]) from error
    raise


def cannot_be_opened(name: str, error: Exception) -> UserError:
  """What to say when TFDS cannot open the set `tfds:NAME`, of which it says so in many ways."""
  reason = str(error).strip().partition('\n')[0]
  return UserError(
    f'config.data.source is tfds:{name}, which cannot be opened ({reason}); prepare it with '
    f'`tfds build {name} --file_format=array_record`, or point the environment variable '
    'TFDS_DATA_DIR at the folder where it is prepared in that format'
  )
