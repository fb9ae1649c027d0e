"""Reading a checkpoint in several processes that all come to the same end."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import orbax.checkpoint as ocp

from tokenformer_jax import hosts, orbax_setup, paths, retry
from tokenformer_jax.errors import UserError

_T = TypeVar('_T')
# How reading ended in a process; of all processes the highest counts.
_READ, _DAMAGED, _UNREADABLE, _MISTAKE = range(4)


class DamagedError(Exception):
  """A checkpoint whose content is not what was written: a checksum, digest or format is wrong."""


def read_together(
  reader: ocp.Checkpointer,
  path: paths.Path,
  args: ocp.args.Composite,
  use: Callable[[Any], _T],
) -> _T:
  """Return items of a checkpoint, as `use` takes them; all processes have to call this.

  Each process reads by itself. Then all of them, also one that failed, say how it ended, and do
  the same next: go on, end, or have those that failed try again. Damage has to be found twice: what
  is read may be cut short on its way.

  Raises:
    DamagedError: the content is not what was written, in some process.
    UserError: the rights to read it are missing; or what `use` raises.
    TransientError: it cannot be read now, however often it was tried.
  """
  value, error, read, confirmed = None, None, False, False
  for pause in (*retry.PAUSES, None):
    if not read:
      try:
        value, error, read = use(reader.restore(path, args=args)), None, True
      except Exception as raised:
        if hosts.is_loss(raised):
          raise
        error = raised
    ended = hosts.highest(_ended(error))
    if ended == _READ:
      return value
    if ended == _MISTAKE or (ended == _DAMAGED and (confirmed or pause is None)):
      break
    if ended == _DAMAGED:
      confirmed = True
      continue
    if pause is None:
      raise retry.gave_up(f'reading {path}', len(retry.PAUSES) + 1, error) from error
    if error is not None:
      retry.announce(f'reading {path}', pause, error)
      time.sleep(pause)
  if ended == _DAMAGED:
    said = retry.one_line(error) if error else 'another process finds it damaged'
    raise DamagedError(said) from error
  if error is None or _ended(error) != _MISTAKE:
    raise UserError(f'another process cannot read {path}; its output says why') from error
  if retry.is_for_user(error) and not isinstance(error, UserError):
    raise UserError(
      f'{path} cannot be read ({retry.one_line(error)}); check who may read it, and who you are'
    ) from error
  raise error


def _ended(error: Exception | None) -> int:
  """Return how reading ended. An error that is not one of content says nothing of a checkpoint."""
  if error is None:
    return _READ
  if retry.is_for_user(error):
    return _MISTAKE
  content = isinstance(error, (DamagedError, *orbax_setup.FORMAT_ERRORS))
  if retry.is_transient(error) or (isinstance(error, OSError) and not content):
    return _UNREADABLE
  return _DAMAGED if content else _MISTAKE
