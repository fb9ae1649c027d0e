"""Classify errors of storage, and retry with growing pauses after those that may pass.

A storage error is transient (a busy server, a broken connection, EIO of a network disk), or it is
for the user (a full disk, missing permissions), or it is neither, and the caller knows its meaning
(a missing file, content of another format). Each library reports errors in its own way: by errno,
by HTTP status, or by the name of a status in the text.
"""

import errno
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from absl import logging

from tokenformer_jax.errors import TransientError, UserError

_T = TypeVar('_T')
_Verdict = Literal['transient', 'user'] | None

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0)  # seconds between tries: three minutes

_ERRNOS: dict[_Verdict, str] = {
  'transient': 'EIO EAGAIN EBUSY EINTR EPIPE ESTALE ETIMEDOUT EREMOTEIO ENOLINK ECONNRESET '
  'ECONNABORTED ECONNREFUSED ENOTCONN ESHUTDOWN ENOBUFS ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN '
  'EHOSTUNREACH ENOTEMPTY',  # ENOTEMPTY: a directory is removed during a write into it
  'user': 'ENOSPC EDQUOT EFBIG EACCES EPERM EROFS',
}
_VERDICT_BY_ERRNO: dict[int, _Verdict] = {
  getattr(errno, name): verdict
  for verdict, names in _ERRNOS.items()
  for name in names.split()
  if hasattr(errno, name)  # No system has all.
}
_VERDICT_BY_HTTP: dict[int, _Verdict] = {
  **dict.fromkeys((408, 425, 429, 500, 502, 503, 504), 'transient'),
  **dict.fromkeys((401, 403), 'user'),
}
_REMOTE = (  # client libraries of servers
  *('aiohttp', 'gcsfs', 'google', 'httpx', 'httpx2', 'huggingface_hub', 'requests', 'urllib3'),
)
_REMOTE_TRANSIENT = re.compile(
  'Connection|Payload|Checksum|Transport|Retry|Chunked|ContentDecoding|Timeout|HTTPError'
)
_ERRNO_IN_TEXT = re.compile(r'os_error_code=\W?(\d+)|\[Errno (\d+)\]|OS error (\d+)')
_HTTP_IN_TEXT = re.compile(
  r'http_response_code=\W?(\d{3})|(?:HTTP|status)(?: response| error)?(?: status)?(?: code)?:? '
  r'?(\d{3})\b|^(\d{3})$'
)
# In the order of the search. Capital words are statuses of gRPC, TensorStore and Google's APIs.
_WORDS: tuple[tuple[_Verdict, str], ...] = (
  ('user', '(?i)no space left|quota exceeded|read-only file system'),
  ('transient', 'curl_code=|rateLimitExceeded'),
  ('user', r'\b(PERMISSION_DENIED|UNAUTHENTICATED)\b'),
  ('transient', r'\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED)\b'),
  ('user', '(?i)^forbidden|permission denied'),
  (
    'transient',
    '(?i)timed out|timeout|try again|temporarily|too many requests|service unavailable|broken pipe|'
    'connection (?:reset|refused|closed|aborted)|server disconnected',
  ),
)


def is_transient(error: BaseException) -> bool:
  """Return whether a storage error may pass by itself, so that a retry makes sense.

  If the error itself is not known, its causes decide.
  """
  return _classify(error) == 'transient'


def is_for_user(error: BaseException) -> bool:
  """Return whether a storage error stays until the user acts: no space, or no permission."""
  return _classify(error) == 'user'


def retried(action: Callable[[], _T], doing: str, pauses: Sequence[float] | None = None) -> _T:
  """Call `action` until it succeeds, with growing pauses after transient errors.

  The action must be safe to repeat after it failed half way. `doing` describes it in messages:
  'reading FILE'. `pauses` are the seconds between tries; None means `PAUSES`.

  Raises:
    TransientError: every try failed with a transient error.
    Exception: the first error that is not transient, unchanged.
  """
  pauses = PAUSES if pauses is None else pauses
  tries = 0
  while True:
    try:
      return action()
    except Exception as error:
      if isinstance(error, TransientError) or not is_transient(error):
        raise
      tries += 1
      if tries > len(pauses):
        raise TransientError(
          f'{doing} failed {tries} times ({one_line(error)}); this may pass by itself and nothing '
          'is lost: run the same command again'
        ) from error
      announce(doing, pauses[tries - 1], error)
    time.sleep(pauses[tries - 1])


def announce(doing: str, pause: float, error: BaseException) -> None:
  """Log that an action failed and will be tried again after a pause."""
  logging.warning('%s failed (%s); trying again in %g s', doing, one_line(error), pause)


def one_line(error: BaseException) -> str:
  """Return the type and the first line of an exception, and cut the middle of a long line.

  Libraries name the action at the beginning and the reason at the end.
  """
  error = cause_of(error)
  lines = str(error).strip().splitlines() or ['']
  text = f'{type(error).__name__}: {lines[0]}' if lines[0] else type(error).__name__
  return text if len(text) <= 300 else f'{text[:150]} … {text[-150:]}'


def cause_of(error: BaseException) -> BaseException:
  """Return an error, or its cause if it is a bare `Exception`, in which Orbax wraps errors."""
  while type(error) is Exception and error.__cause__:
    error = error.__cause__
  return error


def _classify(error: BaseException) -> _Verdict:
  for cause in chain(error):
    if verdict := _classify_alone(cause):
      return verdict
  return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
  """Yield an exception, the members of a group, and the causes of each, none of them twice."""
  seen = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    yield error
    if isinstance(error, BaseExceptionGroup):
      for member in error.exceptions:
        yield from chain(member)
    error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _classify_alone(error: BaseException) -> _Verdict:
  # An unreachable name server looks like an unknown name (gaierror).
  if isinstance(error, (TransientError, TimeoutError, ConnectionError, socket.gaierror)):
    return 'transient'
  if isinstance(error, (UserError, PermissionError)):
    return 'user'
  if isinstance(error, (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)):
    return None
  if any(base.__name__ == 'JaxRuntimeError' for base in type(error).__mro__):
    return None  # Devices and other processes use the same status names.
  if isinstance(error, OSError) and error.errno in _VERDICT_BY_ERRNO:
    return _VERDICT_BY_ERRNO[error.errno]
  if type(error).__module__.partition('.')[0] in _REMOTE:
    response = getattr(error, 'response', None)
    for holder, name in ((error, 'status'), (error, 'code'), (response, 'status_code')):
      status = str(getattr(holder, name, None))
      if status.isdigit():
        return _VERDICT_BY_HTTP.get(int(status))
    names = ' '.join(base.__name__ for base in type(error).__mro__)
    if _REMOTE_TRANSIENT.search(names) or getattr(error, 'retryable', False) is True:
      return 'transient'
  elif not isinstance(error, (OSError, ValueError, RuntimeError)):
    return None
  return _classify_text(str(error))


def _classify_text(text: str) -> _Verdict:
  for pattern, verdicts in (
    (_ERRNO_IN_TEXT, _VERDICT_BY_ERRNO),
    (_HTTP_IN_TEXT, _VERDICT_BY_HTTP),
  ):
    if match := pattern.search(text):
      return verdicts.get(int(next(filter(None, match.groups()))))
  return next((verdict for verdict, words in _WORDS if re.search(words, text)), None)
