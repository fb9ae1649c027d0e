"""Read checkpoints in several processes that agree on the outcome."""

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import hosts
from tokenformer_jax.storage import paths, retry

_T = TypeVar('_T')
# Errors that Orbax raises for files with unexpected content.
FORMAT_ERRORS = (
  *(ValueError, TypeError, AttributeError, LookupError, AssertionError, EOFError, RecursionError),
  *(FileNotFoundError, NotADirectoryError, IsADirectoryError),
)


class DamagedError(Exception):
  """A checkpoint whose content has changed: a checksum, digest or format is wrong."""


def read_together(path: paths.Path, read: Callable[[], _T]) -> _T:
  """Return the value that `read` reads from the checkpoint at a path.

  All processes must call this function. Each one reads by itself, and again after errors that may
  pass, while the others wait. If reading fails in one, all raise the same kind of error. Damage
  must be found twice, because a transfer may be cut short.

  Raises:
    DamagedError: some process found changed content.
    UserError: the permission to read is missing, or `read` raised it.
    TransientError: reading kept failing with errors that may pass.
  """

  def attempt() -> _T:
    return retry.retried(lambda: _classified(path, read), f'reading {path}')

  def read_twice() -> _T | DamagedError:
    try:
      return attempt()
    except DamagedError:
      try:
        return attempt()
      except DamagedError as error:
        return error

  outcome = hosts.together(read_twice)
  is_damaged = hosts.in_any(isinstance(outcome, DamagedError))
  if isinstance(outcome, DamagedError):
    raise outcome
  if is_damaged:
    raise DamagedError('another process finds it damaged')
  return outcome


def _classified(path: paths.Path, read: Callable[[], _T]) -> _T:
  """Call `read`, and raise its error as what it means. Only one about the content means damage."""
  try:
    return read()
  except Exception as error:
    cause = retry.cause_of(error)
    if isinstance(error, UserError) or hosts.is_loss(error) or retry.is_transient(error):
      raise
    if retry.is_for_user(error):
      raise UserError(
        f'{path} cannot be read ({retry.one_line(error)}); check its permissions and your account'
      ) from error
    if isinstance(cause, FORMAT_ERRORS):
      raise DamagedError(retry.one_line(error)) from error
    if isinstance(cause, OSError):  # An unknown one does not mean damage.
      raise OSError(errno.EIO, retry.one_line(error)) from error
    raise


def with_paths(tree: Any) -> list[tuple[str, Any]]:
  """Return the leaves of a tree with paths such as `params/blocks/ffn/keys`."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [(jax.tree_util.keystr(keys, simple=True, separator='/'), leaf) for keys, leaf in leaves]
