"""A wheel and an sdist of the checkout, and an environment to install them in."""

import contextlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import tiny_run
from setuptools import build_meta

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


def build(checkout: Path, files: Path) -> tuple[Path, Path]:
  """Build an sdist, and a wheel of the unpacked sdist, as `python -m build` does.

  Args:
    checkout: a copy, in which the build leaves files.
    files: the folder for the results.

  Returns:
    The paths of the wheel and of the sdist.
  """
  with _building(checkout):
    sdist = files / build_meta.build_sdist(str(files))
  unpacked = checkout.parent / 'unpacked'
  shutil.unpack_archive(sdist, unpacked, filter='data')
  (source,) = unpacked.iterdir()
  with _building(source):
    wheel = files / build_meta.build_wheel(str(files))
  return wheel, sdist


@contextlib.contextmanager
def _building(folder: Path):
  """Build in a folder, without the lines that setuptools prints."""
  with (
    contextlib.chdir(folder),
    open(os.devnull, 'w') as nothing,
    contextlib.redirect_stdout(nothing),
  ):
    yield


def make_environment(folder: Path) -> Path:
  """Make a virtual environment with the dependencies of the package, but without itself.

  The dependencies are links to those of this Python.

  Returns:
    The environment's Python.
  """
  venv.create(folder / 'venv', with_pip=True)
  ours = ('tokenformer_jax', '__editable__', 'pip', '__pycache__')
  (folder / 'dependencies').mkdir()
  for packages in (Path(p) for p in sys.path if p.endswith('site-packages')):
    for file in packages.iterdir():
      if not file.name.startswith(ours) and file.suffix != '.pth':
        link = folder / 'dependencies' / file.name
        with contextlib.suppress(FileExistsError):  # as on sys.path: the first one counts
          link.symlink_to(file)
  (site,) = folder.glob('venv/lib/*/site-packages')
  (site / 'dependencies.pth').write_text(f'{folder}/dependencies\n')
  return folder / 'venv' / 'bin' / 'python'


def install(python: Path, file: Path) -> None:
  """Install a wheel into an environment of `make_environment`."""
  pip = [str(python), '-m', 'pip', 'install', '--quiet', '--no-index']
  subprocess.run([*pip, str(file)], check=True)
