"""Read a checkpoint: all processes agree on the outcome, and arrays go to their shardings."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.runs import orbax_setup
from tokenformer_jax.storage import paths, retry

_T = TypeVar('_T')
# Outcomes of a read in a process. The highest outcome of all processes decides.
_READ, _DAMAGED, _UNREADABLE, _MISTAKE = range(4)


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
  value, error, is_read, confirmed = None, None, False, False
  for pause in (*retry.PAUSES, None):
    if not is_read:
      try:
        value, error, is_read = read(), None, True
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
    reason = retry.one_line(error) if error else 'another process finds it damaged'
    raise DamagedError(reason) from error
  if error is None or _ended(error) != _MISTAKE:
    raise UserError(f'another process cannot read {path}; its output says why') from error
  if retry.is_for_user(error) and not isinstance(error, UserError):
    raise UserError(
      f'{path} cannot be read ({retry.one_line(error)}); check its permissions and your account'
    ) from error
  raise error


def _ended(error: Exception | None) -> int:
  """Return the outcome of a read. Only an error about the content means damage."""
  if error is None:
    return _READ
  if retry.is_for_user(error):
    return _MISTAKE
  if retry.is_transient(error):
    return _UNREADABLE
  # Orbax wraps an error of TensorStore in a bare `Exception`, whose cause is the real error.
  while type(error) is Exception and error.__cause__:
    error = error.__cause__
  if isinstance(error, (DamagedError, *orbax_setup.FORMAT_ERRORS)):
    return _DAMAGED
  return _UNREADABLE if isinstance(error, OSError) else _MISTAKE


def read_arrays(
  reader: ocp.Checkpointer,
  path: paths.Path,
  abstract: Any,
  *,
  whole: bool,
) -> Any:
  """Read the arrays of a state directly into their shardings.

  The result has the structure of `abstract`, which holds `jax.ShapeDtypeStruct`s with shardings for
  the whole state, or for some of its entries if `whole` is false.
  """
  if whole:
    args = ocp.args.StandardRestore(abstract)
  else:
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
  return reader.restore(path, args=ocp.args.Composite(state=args))['state']


def with_paths(tree: Any) -> list[tuple[str, Any]]:
  """Return the leaves of a tree with paths such as `params/blocks/ffn/keys`."""
  return [(_joined(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _joined(keys: Any) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator='/')
