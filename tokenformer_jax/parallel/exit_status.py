"""Report an error as a sentence for the user, and choose the exit status of its process."""

import errno

from tokenformer_jax.errors import FaultyDeviceError, TransientError, UserError
from tokenformer_jax.storage import retry

TRANSIENT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: start the command again
FAULTY_STATUS = 76  # start the command again on other hosts
INTERRUPTED_STATUS = 130  # a shell's status for a command that SIGINT ended
Reported = UserError | TransientError | FaultyDeviceError


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
  if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
    return UserError(f'{retry.one_line(error)}; give a shorter name')
  if retry.is_for_user(error):
    return UserError(f'{retry.one_line(error)}; free space, or check the permissions there')
  return None


def exit_status(error: Reported) -> int:
  """Return the exit status of a process that ends with this error."""
  if isinstance(error, FaultyDeviceError):
    return FAULTY_STATUS
  return TRANSIENT_STATUS if isinstance(error, TransientError) else 2
