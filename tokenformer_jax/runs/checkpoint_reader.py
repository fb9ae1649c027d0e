"""Read checkpoints in several processes that agree on the outcome."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.storage import paths, retry

_T = TypeVar('_T')
# Outcomes of a read in a process. The highest outcome of all processes decides.
_READ, _DAMAGED, _UNREADABLE, _MISTAKE = range(4)
# Errors that Orbax raises for files with unexpected content.
FORMAT_ERRORS = (
  *(ValueError, TypeError, AttributeError, LookupError, AssertionError, EOFError, RecursionError),
  *(FileNotFoundError, NotADirectoryError, IsADirectoryError),
)


class DamagedError(Exception):
  """A checkpoint whose content has changed: a checksum, digest or format is wrong."""


def read_together(path: paths.Path, read: Callable[[], _T]) -> _T:
  """Return the value that `read` reads from the checkpoint at a path.

  All processes must call this function. Each process reads by itself. Then all processes, including
  those that failed, share their outcomes and take the same next step: continue, end, or let the
  failed processes try again. Damage must be found twice, because a transfer may be cut short.

  Raises:
    DamagedError: some process found changed content.
    UserError: the permission to read is missing, or `read` raised it.
    TransientError: reading kept failing with errors that may pass.
  """
  values: list[_T] = []
  error, outcome, seen_damage = None, _READ, False
  for pause in (*retry.PAUSES, None):
    if not values:
      try:
        values, error = [read()], None
      except Exception as raised:
        if hosts.is_loss(raised):
          raise
        error = raised
    outcome = hosts.highest(_outcome(error))
    if outcome == _READ:
      return values[0]
    if outcome == _MISTAKE or (outcome == _DAMAGED and seen_damage):
      break
    seen_damage |= outcome == _DAMAGED
    if outcome == _UNREADABLE and pause is not None and error is not None:
      retry.announce(f'reading {path}', pause, error)
      time.sleep(pause)
  if outcome == _DAMAGED:
    reason = retry.one_line(error) if error else 'another process finds it damaged'
    raise DamagedError(reason) from error
  if outcome == _UNREADABLE:
    raise retry.gave_up(f'reading {path}', len(retry.PAUSES) + 1, error) from error
  if error is None or _outcome(error) != _MISTAKE:
    raise UserError(f'another process cannot read {path}; its output says why') from error
  if retry.is_for_user(error) and not isinstance(error, UserError):
    raise UserError(
      f'{path} cannot be read ({retry.one_line(error)}); check its permissions and your account'
    ) from error
  raise error


def _outcome(error: Exception | None) -> int:
  """Return the outcome of a read. Only an error about the content means damage."""
  if error is None:
    return _READ
  if retry.is_for_user(error):
    return _MISTAKE
  if retry.is_transient(error):
    return _UNREADABLE
  if isinstance(retry.cause_of(error), (DamagedError, *FORMAT_ERRORS)):
    return _DAMAGED
  return _UNREADABLE if isinstance(retry.cause_of(error), OSError) else _MISTAKE


def with_paths(tree: Any) -> list[tuple[str, Any]]:
  """Return the leaves of a tree with paths such as `params/blocks/ffn/keys`."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [(jax.tree_util.keystr(keys, simple=True, separator='/'), leaf) for keys, leaf in leaves]
