"""A copy of what a package is built from."""

import shutil
from pathlib import Path

import tiny_run

SOURCES = ('tokenformer_jax', 'configs')  # folders that become packages
FILES = ('pyproject.toml', 'MANIFEST.in', 'README.md', 'CHANGELOG.md', 'LICENSE')


def copy_checkout(folder: Path, *more: str) -> Path:
  """Copy what a package is built from, and further folders or files, into a new folder.

  The copy has folders that must not be packed: one of tests, and one of an earlier build.
  """
  for name in (*SOURCES, *FILES, *more):
    path = tiny_run.ROOT / name
    if path.is_dir():
      shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
    else:
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(path, folder / name)
  for name in ('tests/test_none.py', 'docs/none.md', 'experiments/none.py', 'runs/none.py'):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
  return folder
