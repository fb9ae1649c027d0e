"""The wheel and the sdist: what is in them, and commands from them, without the checkout."""

import contextlib
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import nbformat
import packages
import pytest
import tiny_run
import yaml
from setuptools import build_meta

import tokenformer_jax
from tokenformer_jax.cli import verbs

VERSION = tokenformer_jax.__version__


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

  The dependencies, and pip, are links to those of this Python.

  Returns:
    The environment's Python.
  """
  venv.create(folder / 'venv')
  ours = ('tokenformer_jax', '__editable__', '__pycache__')
  (folder / 'dependencies').mkdir()
  for folder_of_packages in (Path(p) for p in sys.path if p.endswith('site-packages')):
    for file in folder_of_packages.iterdir():
      if not file.name.startswith(ours) and file.suffix != '.pth':
        link = folder / 'dependencies' / file.name
        with contextlib.suppress(FileExistsError):  # as on sys.path: the first one counts
          link.symlink_to(file)
  (site,) = folder.glob('venv/lib/*/site-packages')
  (site / 'dependencies.pth').write_text(f'{folder}/dependencies\n')
  return folder / 'venv' / 'bin' / 'python'


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """The paths of a wheel and of an sdist."""
  folder = tmp_path_factory.mktemp('package')
  (folder / 'files').mkdir()
  return build(packages.copy_checkout(folder / 'checkout'), folder / 'files')


def sources(folder: str) -> set[str]:
  """The files of a folder of the checkout that belong in a package."""
  found = (tiny_run.ROOT / folder).rglob('*')
  files = {str(path.relative_to(tiny_run.ROOT)) for path in found if path.is_file()}
  return {name for name in files if name.endswith(('.py', 'py.typed', '.css', '.js'))}


def test_the_wheel_has_the_package_its_configs_and_nothing_else(built):
  with zipfile.ZipFile(built[0]) as wheel:
    names = {name for name in wheel.namelist() if '.dist-info/' not in name}
  configs = {f'tokenformer_jax/{name}' for name in sources('configs')}
  assert names == sources('tokenformer_jax') | configs


def test_the_sdist_has_what_a_wheel_is_built_from_and_nothing_else(built):
  with tarfile.open(built[1]) as sdist:
    files = [member.name.partition('/')[2] for member in sdist.getmembers() if member.isfile()]
  made = {'PKG-INFO', 'setup.cfg'}
  names = {name for name in files if '.egg-info/' not in name} - made
  assert names == sources('tokenformer_jax') | sources('configs') | set(packages.FILES)


def read_metadata(wheel: Path) -> email.message.Message:
  with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith('.dist-info/METADATA'))
    return email.message_from_bytes(archive.read(name))


def test_the_metadata_is_complete_for_an_index(built):
  found = read_metadata(built[0])
  for key in ('Summary', 'Author', 'Keywords', 'Classifier', 'Project-URL', 'License-Expression'):
    assert found[key], f'{key} is empty'
  assert found['Description-Content-Type'] == 'text/markdown'
  assert found['License-File'] == 'LICENSE'
  assert max(len(line) for line in found['Summary'].splitlines()) < 100


def test_the_version_is_the_same_everywhere(built):
  assert read_metadata(built[0])['Version'] == VERSION
  changes = (tiny_run.ROOT / 'CHANGELOG.md').read_text()
  newest = re.search(r'^## \[(.*?)\]', changes, re.MULTILINE)[1]
  assert newest in ('Unreleased', VERSION)
  citation = yaml.safe_load((tiny_run.ROOT / 'CITATION.cff').read_text())
  assert citation['version'] == VERSION


def test_the_version_is_printed(capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['tokenformer', '--version'])
  verbs.main()
  assert capsys.readouterr().out == f'tokenformer_jax {VERSION}\n'


USES = """
from tokenformer_jax.config import file
print(tokenformer_jax.__file__, numpy.__version__, file.shipped('lm_stdlib'))
"""


@pytest.mark.slow
def test_the_first_cells_of_a_notebook_in_a_bare_session(built, tmp_path):
  """Without the package, with an uploaded wheel, and with the package installed."""
  (tmp_path / 'session').mkdir()
  python = make_environment(tmp_path / 'bare')
  notebook = nbformat.read(tiny_run.ROOT / 'colabs/grow.ipynb', as_version=4)
  cells = {cell.id: cell.source for cell in notebook.cells}
  file = tmp_path / 'session' / 'cells.ipy'
  file.write_text('\n'.join([cells['install'], cells['see-device'], USES]))
  environment = {**tiny_run.environment(), 'PIP_NO_INDEX': '1'}
  for name in ('PYTHONPATH', 'VIRTUAL_ENV'):  # IPython would take packages from the latter
    environment.pop(name, None)

  def start() -> subprocess.CompletedProcess:
    command = [str(python), '-m', 'IPython', file.name]
    return subprocess.run(command, cwd=file.parent, env=environment, capture_output=True, text=True)

  done = start()
  assert 'No matching distribution found for tokenformer_jax' in done.stderr, done.stderr
  assert "No module named 'tokenformer_jax'" in done.stdout, done.stdout
  uploaded = Path(shutil.copy(built[0], file.parent))
  for state in ('uploaded', 'installed'):
    done = start()
    said = f'{state}: {done.stdout}{done.stderr}'
    assert done.stdout.strip().endswith('.py'), said
    package, version, config = done.stdout.splitlines()[-1].split()
    assert str(python.parent.parent) in package, f'not from this environment: {said}'
    assert version == metadata.version('numpy'), f'numpy was replaced: {said}'
    assert Path(config).exists(), f'no configs: {said}'
    uploaded.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_run_and_its_report_are_made_from_the_wheel(built, tmp_path):
  """A command of README.md, for fewer steps; no file of the checkout is in reach."""
  python = make_environment(tmp_path)
  pip = [python, '-m', 'pip', 'install', '--quiet', '--no-index', '--no-deps', '--no-compile']
  subprocess.run([*pip, built[0]], check=True)
  environment = tiny_run.environment()
  environment.pop('PYTHONPATH', None)

  def run(*arguments: str) -> None:
    command = [str(python.parent / 'tokenformer'), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f'tokenformer {" ".join(arguments)}:\n{done.stderr}'

  few = ['--config.train.steps=2', '--config.optim.warmup_steps=1', '--config.train.eval_batches=2']
  run('train', '--config=lm_bytes', *few)
  run(
    'report', 'runs/lm_bytes', '--models=0', '--out=report.html'
  )  # It reads files beside the code.
  assert (tmp_path / 'report.html').exists()
