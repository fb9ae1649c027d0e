"""The wheel and the sdist: what is in them, and all commands from them, without the checkout."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import packages
import pytest
import tiny_run
import yaml

import tokenformer_jax
from tokenformer_jax.cli import verbs

VERSION = tokenformer_jax.__version__


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """The paths of a wheel and of an sdist."""
  folder = tmp_path_factory.mktemp('package')
  (folder / 'files').mkdir()
  return packages.build(packages.copy_checkout(folder / 'checkout'), folder / 'files')


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


@pytest.mark.slow
def test_an_index_accepts_the_files(built):
  pytest.importorskip('twine', reason='pip install -e ".[release]" brings twine')
  command = [sys.executable, '-m', 'twine', 'check', '--strict', *map(str, built)]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope='module')
def installed(built, tmp_path_factory):
  """A function that runs `tokenformer ARGUMENTS` from the wheel, far from the checkout."""
  folder = tmp_path_factory.mktemp('installed')
  python = packages.make_environment(folder)
  packages.install(python, built[0])

  def run(*arguments: str) -> str:
    command = [str(python.parent / 'tokenformer'), *arguments]
    environment = tiny_run.environment()
    environment.pop('PYTHONPATH', None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f'tokenformer {" ".join(arguments)}:\n{done.stderr}'
    return done.stdout

  return run


# One that reads a config, one with other files than Python's, and one without JAX.
SOME = ('train', 'report', 'laws')


@pytest.mark.slow
@pytest.mark.parametrize(
  'verb',
  [pytest.param(verb, marks=[pytest.mark.full_size] * (verb not in SOME)) for verb in verbs.VERBS],
)
def test_an_installed_verb_has_help(verb, installed):
  assert f'tokenformer {verb}' in installed(verb, '--help')


@pytest.mark.slow
def test_the_main_job_runs_from_the_wheel(installed):
  """Commands of README.md, for fewer steps; no file of the checkout is in reach."""
  few = ['--config.train.steps=4', '--config.train.eval_every=0', '--config.train.eval_batches=2']
  installed('train', '--workdir=runs/lm', *few, '--config.optim.warmup_steps=1')
  assert installed('generate', '--source=runs/lm', '--prompt=def main(', '--length=8')
  installed(
    *('train', '--config=vit_digits', '--workdir=runs/vit', *few, '--config.optim.warmup_epochs=0'),
  )
