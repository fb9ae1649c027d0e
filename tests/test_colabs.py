"""The notebooks: how their first cells get the code, and each run from top to bottom."""

import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import venv
from importlib import metadata
from pathlib import Path

import nbclient
import nbformat
import pytest
import tiny_run
import xla_flags
from setuptools import build_meta

COLABS = sorted((tiny_run.ROOT / 'colabs').glob('*.ipynb'))
PICTURES = {'chat': 1, 'grow': 1, 'inspect': 4, 'vit': 2}
SMALLER = {  # text of a notebook, and what runs in its place
  'chat': [
    ('steps=600, log_every=200', 'steps=20, log_every=10'),
    ('  600,\n', '  20,\n'),
    ('warmup_steps=50', 'warmup_steps=5'),
  ],
  'grow': [
    (
      'steps=2000, log_every=500, eval_every=200, eval_batches=64',
      'steps=40, log_every=20, eval_every=20, eval_batches=2',
    ),
    ('medium.train(3000)', 'medium.train(60)'),
    ('.train(4000)', '.train(80)'),
    ('warmup_steps=50', 'warmup_steps=5'),
  ],
  'inspect': [
    (
      'steps=300, log_every=50, eval_every=0, eval_batches=16',
      'steps=20, log_every=10, eval_every=0, eval_batches=2',
    ),
    ('born.train(600,', 'born.train(40,'),
    ('tokens=8192', 'tokens=1024'),
    ('warmup_steps=30', 'warmup_steps=5'),
  ],
  'vit': [
    ('steps=300, log_every=50, eval_every=100', 'steps=20, log_every=10, eval_every=10'),
    ('grown.train(450,', 'grown.train(30,'),
    ("'eval_every': 150", "'eval_every': 10"),
    ('warmup_steps=30', 'warmup_steps=5'),
    ('  60,\n', '  12,\n'),
    ("{'log_every': 20, 'eval_every': 30}", "{'log_every': 4, 'eval_every': 6}"),
  ],
}
CODE = "CODE = ''"
WHEEL, SDIST = 'tokenformer_jax-0.1.0-py3-none-any.whl', 'tokenformer_jax-0.1.0.tar.gz'


def _shorten(notebook, smaller: list[tuple[str, str]]) -> None:
  """Replace texts in the cells of a notebook; a text that no cell has fails."""
  for text, replacement in smaller:
    cells = [cell for cell in notebook.cells if text in cell.source]
    assert cells, f'no cell has {text}'
    for cell in cells:
      cell.source = cell.source.replace(text, replacement)


@pytest.mark.slow
@pytest.mark.parametrize('steps', ['few', pytest.param('all', marks=pytest.mark.full_size)])
@pytest.mark.parametrize(
  'path',
  [
    pytest.param(
      path, id=path.stem, marks=[pytest.mark.full_size] * (path.stem in ('vit', 'inspect'))
    )
    for path in COLABS
  ],
)
def test_notebook_runs(path, steps, tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', xla_flags.join_flags(devices=1))  # as on a laptop
  notebook = nbformat.read(path, as_version=4)
  if steps == 'few':
    _shorten(notebook, SMALLER[path.stem])
  client = nbclient.NotebookClient(
    notebook, timeout=1200, resources={'metadata': {'path': str(tmp_path)}}
  )
  client.execute()
  shown = [len([o for o in cell.get('outputs', []) if _is_picture(o)]) for cell in notebook.cells]
  assert max(shown) == 1, f'a cell shows its picture {max(shown)} times'
  assert sum(shown) == PICTURES[path.stem], 'a picture is not in the notebook'


def _is_picture(output) -> bool:
  return 'image/png' in output.get('data', {})


@functools.cache
def _first_cells(name: str = 'grow') -> tuple[str, str]:
  """The cell that installs the code, and the one that looks for the device."""
  cells = {cell.id: cell.source for cell in nbformat.read(_path(name), as_version=4).cells}
  return cells['install'], cells['see-device']


def _path(name: str) -> Path:
  return tiny_run.ROOT / 'colabs' / f'{name}.ipynb'


def test_the_first_cells_are_the_same_but_for_the_extras():
  project = (tiny_run.ROOT / 'pyproject.toml').read_text()
  found, extras = set(), {}
  for path in COLABS:
    install, see_device = _first_cells(path.stem)
    (line,) = (line for line in install.splitlines() if line.startswith('EXTRAS = '))
    extras[path.stem] = eval(line.removeprefix('EXTRAS = '))
    found.add((install.replace(line, ''), see_device))
  assert len(found) == 1, 'a mended cell was not copied to the other notebooks'
  assert extras['vit'] == {'images': 'scikit-learn', 'plot': 'matplotlib'}
  for extra, package in {**extras['vit'], **extras['grow'], **extras['chat']}.items():
    assert f'{extra} = ["{package}' in project, 'no such extra'


class _Runtime:
  """A runtime as the first cell sees it: packages, devices, and a pip that records its requests."""

  def __init__(self, monkeypatch, packages=(), driver='', chips=(), pip_fails='', replaces=()):
    self.asked, self._packages = [], dict(packages)
    self._driver, self._pip_fails, self._replaces = driver, pip_fails, dict(replaces)
    monkeypatch.setattr(subprocess, 'run', self._run)
    monkeypatch.setattr(metadata, 'version', self._version)
    loaded = {name: [name] for name in self._packages}  # quick: to look at all takes half a second
    monkeypatch.setattr(metadata, 'packages_distributions', lambda: loaded)
    monkeypatch.setattr('glob.glob', lambda pattern: [*chips] if 'accel' in pattern else [])

  def _run(self, command, **_):
    if command[0] == 'nvidia-smi':
      if not self._driver:
        raise FileNotFoundError(command[0])
      return subprocess.CompletedProcess(command, 0, f'{self._driver}\n{self._driver}\n')
    self.asked += command[command.index('--quiet') + 1 :]
    self._packages.update(self._replaces)
    return subprocess.CompletedProcess(command, bool(self._pip_fails), '', self._pip_fails)

  def _version(self, name):
    if name not in self._packages:
      raise metadata.PackageNotFoundError(name)
    return self._packages[name]

  def start(self, code: str = '', name: str = 'grow') -> list[str]:
    """Run the first cell; return what pip was asked for."""
    exec(_first_cells(name)[0].replace(CODE, f'CODE = {code!r}'), {})
    return self.asked


FOUND = {  # the files there are, CODE, and which of them is taken
  'an uploaded wheel': ([WHEEL], '', WHEEL),
  'an uploaded sdist': ([SDIST], '', SDIST),
  'the newest file': ([WHEEL, SDIST], '', SDIST),
  'a checkout above': (['../tokenformer_jax/__init__.py'], '', '..'),
  'a clone': (['tokenformer_jax/tokenformer_jax/__init__.py'], '', 'tokenformer_jax'),
  'a mounted file': (['drive/My Drive/x.whl'], 'drive/My Drive/x.whl', 'drive/My Drive/x.whl'),
  'a named checkout': ([WHEEL, 'mine/pyproject.toml'], 'mine', 'mine'),
}


@pytest.mark.parametrize('case', FOUND)
def test_the_code_is_found(case, tmp_path, monkeypatch):
  files, code, taken = FOUND[case]
  monkeypatch.chdir(_folder(tmp_path, files))
  package, jax = _Runtime(monkeypatch).start(code)
  assert package == f'tokenformer_jax[plot] @ {Path(taken).resolve().as_uri()}'
  assert jax == 'jax', 'another jax than that for CPUs'


def _folder(tmp_path: Path, files: list[str]) -> Path:
  folder = tmp_path / 'work'
  for age, name in enumerate(reversed(files)):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    os.utime(folder / name, (1e9 - age, 1e9 - age))
  return folder


def test_an_address_goes_to_pip_as_it_is(tmp_path, monkeypatch):
  monkeypatch.chdir(_folder(tmp_path, [WHEEL]))
  package, _ = _Runtime(monkeypatch).start('git+https://host/owner/name', 'vit')
  assert package == 'tokenformer_jax[images,plot] @ git+https://host/owner/name'


@pytest.mark.parametrize('code', ['', 'drive/none.whl'])
def test_code_that_is_not_there_stops_the_notebook(code, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  runtime = _Runtime(monkeypatch)
  with pytest.raises(
    RuntimeError, match=f'{code or "the code"} is not on this runtime; upload .*w'
  ):
    runtime.start(code)
  assert not runtime.asked


OLD_JAX = {'jax': '0.7.2', 'jaxlib': '0.7.2'}
DEVICES = {
  'a GPU of a runtime with jax 0.7': (
    {'driver': '580.95', 'packages': {**OLD_JAX, 'jax-cuda12-plugin': '0.7.2'}},
    'jax[cuda12]',  # The plugin of the runtime goes on with jax, and is not left behind.
  ),
  'a GPU and its newer plugin': (
    {'driver': '580.95', 'packages': {**OLD_JAX, 'jax-cuda13-plugin': '0.8.0'}},
    'jax[cuda13]',
  ),
  'a GPU and no jax': ({'driver': '580.95.05'}, 'jax[cuda13]'),
  'a GPU with an older driver': ({'driver': '550.54.15'}, 'jax[cuda12]'),
  'a TPU': ({'chips': ['/dev/accel0'], 'packages': OLD_JAX}, 'jax[tpu]'),
  'neither': ({'packages': {**OLD_JAX, 'jax-cuda12-plugin': '0.7.2'}}, 'jax'),
}


@pytest.mark.parametrize('case', DEVICES)
def test_the_jax_of_the_device_is_installed(case, tmp_path, monkeypatch):
  devices, wanted = DEVICES[case]
  monkeypatch.chdir(_folder(tmp_path, [WHEEL]))
  assert _Runtime(monkeypatch, **devices).start()[1:] == [wanted]


def test_a_device_that_jax_does_not_see_stops_the_notebook(monkeypatch):
  see_device = _first_cells()[1]
  exec(see_device, {'wanted': 'jax', 'os': os})
  exec(see_device, {'wanted': 'jax[cuda12]', 'os': os})  # JAX_PLATFORMS=cpu: the CPU is wanted
  monkeypatch.delenv('JAX_PLATFORMS')
  with pytest.raises(RuntimeError, match=r'does not see; run `pip install .* "jax\[cuda12\]"`'):
    exec(see_device, {'wanted': 'jax[cuda12]', 'os': os})


def test_what_is_installed_is_taken_as_it_is(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  has = {'tokenformer_jax': '0.1.0', 'matplotlib': '3.9'}
  assert not _Runtime(monkeypatch, has).start(), 'pip was asked for nothing'
  package, _ = _Runtime(monkeypatch, has).start(name='vit')
  assert package == 'tokenformer_jax[images,plot]', 'the extras of the installed package'


def test_a_failed_installation_stops_the_notebook(tmp_path, monkeypatch):
  monkeypatch.chdir(_folder(tmp_path, [WHEEL]))
  runtime = _Runtime(monkeypatch, pip_fails='ERROR: no space left\n')
  with pytest.raises(RuntimeError, match=r'pip could not install .*\nERROR: no space left'):
    runtime.start()


def test_a_loaded_package_that_pip_replaces_asks_for_a_restart(tmp_path, monkeypatch):
  monkeypatch.chdir(_folder(tmp_path, [WHEEL]))
  runtime = _Runtime(monkeypatch, OLD_JAX, replaces={'jax': '0.10.2'})
  with pytest.raises(RuntimeError, match=r'pip replaced jax, .* restart the session'):
    runtime.start()


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """A copy of the checkout, and a folder with a wheel and an sdist of it."""
  checkout = tmp_path_factory.mktemp('source') / 'checkout'
  files = tmp_path_factory.mktemp('files')
  for name in ('tokenformer_jax', 'configs', 'colabs'):
    ignored = shutil.ignore_patterns('__pycache__')
    shutil.copytree(tiny_run.ROOT / name, checkout / name, ignore=ignored)
  for name in ('pyproject.toml', 'README.md', 'LICENSE'):
    shutil.copy(tiny_run.ROOT / name, checkout)
  pip = [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '-w', str(files), '.']
  subprocess.run(pip, cwd=checkout, check=True)
  with contextlib.chdir(checkout):
    build_meta.build_sdist(str(files))
  return checkout, files


@pytest.fixture(scope='module')
def bare_python(tmp_path_factory):
  """The Python of a new environment with the dependencies of the package, but without itself."""
  folder = tmp_path_factory.mktemp('bare')
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


def _start(python: Path, folder: Path, code: str) -> subprocess.CompletedProcess:
  """Run the first cells in a new session, and use the package in the same session."""
  install, see_device = _first_cells()
  uses = (
    'import tokenformer_jax; from tokenformer_jax.config import file;'
    'print(tokenformer_jax.__file__, file.shipped("lm_stdlib"))'
  )
  cells = '\n'.join([install.replace(CODE, f'CODE = {code!r}'), see_device, uses])
  return tiny_run.run([str(python), '-c', cells], cwd=folder)


@pytest.mark.full_size
@pytest.mark.slow
def test_a_bare_runtime_gets_the_code(built, bare_python, tmp_path):
  checkout, files = built
  mounted = tmp_path / 'drive' / 'My Drive'
  shutil.copytree(files, mounted)
  for file, name in ((WHEEL, 'wheel'), (SDIST, 'sdist')):
    (tmp_path / name).mkdir()
    shutil.copy(files / file, tmp_path / name)
  with _served(files) as address:
    sources = {
      'wheel': (tmp_path / 'wheel', ''),
      'sdist': (tmp_path / 'sdist', ''),
      'checkout': (checkout / 'colabs', ''),
      'mounted': (tmp_path, f'{mounted}/{WHEEL}'),
      'address': (tmp_path, f'{address}/{WHEEL}'),
    }
    for name, (folder, code) in sources.items():
      done = _start(bare_python, folder, code)
      assert done.returncode == 0, f'{name}: {done.stderr}'
      package, config = done.stdout.splitlines()[-1].split()
      assert str(bare_python.parent.parent) in package, f'{name}: {package} was there before'
      assert Path(config).exists(), f'{name}: no configs'
      gone = [str(bare_python), '-m', 'pip', 'uninstall', '--quiet', '--yes', 'tokenformer_jax']
      subprocess.run(gone, check=True)
    done = _start(bare_python, tmp_path, f'{address}/none/{WHEEL}')  # not there
  assert done.returncode == 1, 'a failed installation passes'
  assert 'RuntimeError: pip could not install' in done.stderr and '404' in done.stderr, done.stderr


@contextlib.contextmanager
def _served(folder: Path):
  """Serve the files of a folder on this machine; yield the address."""

  class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args):
      super().__init__(*args, directory=str(folder))

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
