"""Remove what dead builds of other token stores left in the cache."""

import shutil
import time
from pathlib import Path
from typing import Any

from tokenformer_jax.runs import lease
from tokenformer_jax.storage import paths


class Leftovers:
  """Folders of other stores in which dead builds have finished no shard.

  A folder is removed at once if its owner is surely dead. An owner on another machine is watched
  while this process builds its own store, and counts as dead if nothing changed during that time.
  """

  def __init__(self, built: paths.Path):
    self._began = time.monotonic()
    self._watched: dict[Path, Any] = {}
    for folder in built.parent.iterdir():
      if folder == built or not _is_unfinished(folder):
        continue
      if (state := _build_state(folder)) is None:
        shutil.rmtree(folder, ignore_errors=True)
      else:
        self._watched[folder] = state

  def remove(self) -> None:
    """Remove the folders that have not changed, if they were watched for long enough."""
    if time.monotonic() - self._began < lease.Timing().silence:
      return
    for folder, state in self._watched.items():
      if _build_state(folder) == state:
        shutil.rmtree(folder, ignore_errors=True)


def _is_unfinished(folder: Path) -> bool:
  """Return whether a folder is a store without a shard that is complete."""
  if not folder.is_dir() or folder.suffix == '.lease':
    return False
  return not any(folder.glob('*.json'))


def _build_state(folder: Path) -> Any:
  """Return a value that changes while a build runs, or None if its owner is surely dead."""
  try:
    owner = lease.state(lease.directory_beside(folder))
    if owner is None and lease.directory_beside(folder).exists():
      return None
    return owner, sorted((str(file), file.stat().st_size) for file in folder.rglob('*'))
  except OSError as error:
    return str(error)
