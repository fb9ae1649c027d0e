"""Reading a checkpoint: several processes come to the same end, arrays go to their places."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from tokenformer_jax import hosts, orbax_setup, paths, retry
from tokenformer_jax.errors import UserError

_T = TypeVar('_T')
# How reading ended in a process; of all processes the highest counts.
_READ, _DAMAGED, _UNREADABLE, _MISTAKE = range(4)


class DamagedError(Exception):
  """A checkpoint whose content is not what was written: a checksum, digest or format is wrong."""


def read_together(path: paths.Path, read: Callable[[], _T]) -> _T:
  """Return what `read` reads of the checkpoint at a path; all processes have to call this.

  Each process reads by itself. Then all of them, also one that failed, say how it ended, and do
  the same next: go on, end, or have those that failed try again. Damage has to be found twice: what
  is read may be cut short on its way.

  Raises:
    DamagedError: the content is not what was written, in some process.
    UserError: the rights to read it are missing; or what `read` raises.
    TransientError: it cannot be read now, however often it was tried.
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


def read_arrays(
  reader: ocp.Checkpointer,
  path: paths.Path,
  abstract: Any,
  *,
  whole: bool,
  stored_paths: Mapping[str, str],
) -> Any:
  """Read the arrays of a state straight into their shardings.

  Args:
    reader: from `orbax_setup.make_reader`.
    path: of the checkpoint.
    abstract: `jax.ShapeDtypeStruct`s with shardings: the whole state, or some of its entries.
    whole: whether these are all arrays in the files.
    stored_paths: of arrays that have another path in the files, by path in the state.

  Returns:
    Arrays in the structure of `abstract`.
  """
  if stored_paths:
    return _read_renamed(reader, path, abstract, stored_paths)
  if whole:
    args = ocp.args.StandardRestore(abstract)
  else:
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
  return reader.restore(path, args=ocp.args.Composite(state=args))['state']


def _read_renamed(
  reader: ocp.Checkpointer, path: paths.Path, abstract: Any, stored_paths: Mapping[str, str]
) -> Any:
  """Read arrays in the structure of the files, and put them into that of `abstract`."""
  stored = {stored_paths.get(at, at): leaf for at, leaf in with_paths(abstract)}
  structure = reader.metadata(path).item_metadata['state'].tree
  item = jax.tree.map_with_path(
    lambda keys, _: stored.get(_joined(keys), ocp.PLACEHOLDER), structure
  )
  restore_args = ocp.checkpoint_utils.construct_restore_args(item)
  args = ocp.args.Composite(state=ocp.args.PyTreeRestore(item, restore_args=restore_args))
  arrays = dict(with_paths(reader.restore(path, args=args)['state']))
  return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[at] for at in stored])


def with_paths(tree: Any) -> list[tuple[str, Any]]:
  """Return the leaves of a tree with paths such as `params/blocks/ffn/keys`."""
  return [(_joined(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _joined(keys: Any) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator='/')
