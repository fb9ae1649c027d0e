"""Check and write the output files and folders that flags of a command name."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import is_first
from tokenformer_jax.storage import paths

PathLike = str | os.PathLike[str]


def check_folder_of_runs(flag: str, folder: PathLike, *, writes: bool = True) -> None:
  """Check that a folder can hold the runs of this command; leave nothing behind.

  It must not be the work directory of a run. If the command `writes`, it must exist or be possible.
  """
  if (paths.parse_path(folder) / 'config.json').exists():
    raise UserError(
      f'--{flag}={folder} is the work directory of a run, and the runs of this command are below '
      f'--{flag}; name another one'
    )
  if not writes or paths.in_bucket(folder) or not is_first():
    return
  whole = Path(folder).absolute()
  parent = next(one for one in (whole, *whole.parents) if one.exists())
  if not parent.is_dir():
    raise UserError(
      f'--{flag}={folder} cannot be a folder: {parent} is a file; name another --{flag}'
    )
  try:
    with tempfile.TemporaryDirectory(prefix='.probe-', dir=parent):
      pass
  except OSError as error:
    raise UserError(
      f'--{flag}={folder} cannot be written ({paths.reason(error)}); name another --{flag}'
    ) from error


def check_file(flag: str, file: PathLike | None, endings: Sequence[str] = ()) -> None:
  """Check that a file, if there is one, can be written; call this before any long computation."""
  if file is None:
    return
  if endings:
    paths.check_ending(os.fspath(file), endings, f'--{flag}')
  if not is_first():  # Only the first process writes.
    return
  path = paths.local(file)
  folder = path.absolute().parent
  reason = ''
  try:
    if path.is_dir():
      reason = 'it is a folder'
    elif not folder.is_dir():
      reason = f'there is no folder {path.parent}'
    elif not os.access(path if path.exists() else folder, os.W_OK):
      reason = 'its permissions or the file system do not allow it'
  except OSError as error:  # such as a name too long
    reason = paths.reason(error)
  if reason:
    raise UserError(f'--{flag}={file} cannot be written: {reason}')


def write_file(flag: str, file: PathLike, write: Callable[[Path], Any]) -> None:
  """Let the first process write a file that `check_file` has checked."""
  if not is_first():
    return
  try:
    write(Path(file))
  except OSError as error:
    raise UserError(f'--{flag}={file} cannot be written ({error.strerror or error})') from error


def write_json(flag: str, file: PathLike, content: Any) -> None:
  """Write a JSON file, as `write_file`."""
  text = json.dumps(content, indent=2, ensure_ascii=False) + '\n'
  write_file(flag, file, lambda path: path.write_text(text, 'utf-8'))
