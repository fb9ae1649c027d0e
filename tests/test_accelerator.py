"""`use_accelerator` on machines with and without devices, with a pip that records its requests."""

import subprocess
import types
from importlib import metadata

import jax
import pytest

import tokenformer_jax
from tokenformer_jax.api import accelerator
from tokenformer_jax.errors import UserError

PLATFORMS = {'jax[cuda12]': 'gpu', 'jax[cuda13]': 'gpu', 'jax[tpu]': 'tpu', '': 'cpu'}


class Machine:
  """A machine as the function sees it: packages, devices, and a jax that sees what pip installs."""

  def __init__(self, monkeypatch, packages=(), driver='', chips=(), pip_fails='', sees=True):
    self.asked, self.packages = [], {'jax': '0.11.2', **dict(packages)}
    self._driver, self._pip_fails, self._sees = driver, pip_fails, sees
    monkeypatch.delenv('JAX_PLATFORMS', raising=False)
    monkeypatch.setattr(subprocess, 'run', self._run)
    monkeypatch.setattr(metadata, 'version', self._version)
    monkeypatch.setattr('glob.glob', lambda pattern: [*chips] if 'accel' in pattern else [])
    self.load(monkeypatch, {})
    monkeypatch.setattr(jax, 'default_backend', self._backend)

  def load(self, monkeypatch, versions):
    """Let the session have modules of these versions, and no others."""
    modules = {name: types.SimpleNamespace(__version__=is_) for name, is_ in versions.items()}
    session = types.SimpleNamespace(modules=modules, executable='python')
    monkeypatch.setattr(accelerator, 'sys', session)

  def _run(self, command, **_):
    if command[0] == 'nvidia-smi':
      if not self._driver:
        raise FileNotFoundError(command[0])
      return subprocess.CompletedProcess(command, 0, f'{self._driver}\n{self._driver}\n')
    self.asked += command[command.index('--quiet') + 1 :]
    return subprocess.CompletedProcess(command, bool(self._pip_fails), '', self._pip_fails)

  def _version(self, name):
    if name not in self.packages:
      raise metadata.PackageNotFoundError(name)
    return self.packages[name]

  def _backend(self):
    asked = self.asked[0].partition('==')[0] if self.asked else ''
    return PLATFORMS[asked if self._sees else '']


DEVICES = {
  'a GPU with an older plugin': (
    {'driver': '580.95', 'packages': {'jax-cuda12-plugin': '0.7.2'}},
    'jax[cuda12]',  # The plugin of the runtime goes on with jax, and is not left behind.
  ),
  'a GPU with a newer plugin': (
    {'driver': '580.95', 'packages': {'jax-cuda13-plugin': '0.8.0'}},
    'jax[cuda13]',
  ),
  'a GPU': ({'driver': '580.95.05'}, 'jax[cuda13]'),
  'a GPU with an older driver': ({'driver': '550.54.15'}, 'jax[cuda12]'),
  'a TPU': ({'chips': ['/dev/accel0']}, 'jax[tpu]'),
}


@pytest.mark.parametrize('case', DEVICES)
def test_the_jax_of_the_device_is_installed(case, monkeypatch):
  devices, wanted = DEVICES[case]
  machine = Machine(monkeypatch, **devices)
  assert tokenformer_jax.use_accelerator() == PLATFORMS[wanted]
  assert machine.asked == [f'{wanted}==0.11.2'], 'another jax than the one that is installed'


def test_without_a_device_nothing_is_installed(monkeypatch):
  machine = Machine(monkeypatch, {'jax-cuda12-plugin': '0.7.2'})
  assert tokenformer_jax.use_accelerator() == 'cpu'
  assert not machine.asked


def test_the_cpu_that_is_asked_for_is_used(monkeypatch):
  machine = Machine(monkeypatch, driver='580.95')
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  assert tokenformer_jax.use_accelerator() == 'cpu'
  assert not machine.asked


def test_a_device_that_jax_does_not_see_stops_the_notebook(monkeypatch):
  Machine(monkeypatch, driver='580.95', sees=False)
  with pytest.raises(
    UserError, match=r'that jax 0\.11\.2 with jax\[cuda13\] does not see; restart'
  ):
    tokenformer_jax.use_accelerator()


def test_a_failed_installation_stops_the_notebook(monkeypatch):
  Machine(monkeypatch, driver='580.95', pip_fails='looking\nERROR: no space left\n\n[notice] pip\n')
  with pytest.raises(UserError, match=r'"jax\[cuda13\]==0\.11\.2" failed: ERROR: no space left$'):
    tokenformer_jax.use_accelerator()


def test_a_loaded_package_that_pip_replaced_asks_for_a_restart(monkeypatch):
  machine = Machine(monkeypatch, {'numpy': '2.4.0', 'matplotlib': '3.10'})
  loaded = {'numpy': '2.1.3', 'matplotlib': '3.10', 'flax': '0.12'}  # flax: not by pip
  machine.load(monkeypatch, loaded)
  with pytest.raises(UserError, match=r'^pip has replaced numpy, which .*; restart the session'):
    tokenformer_jax.use_accelerator()


def test_the_versions_of_loaded_modules_are_those_of_their_packages():
  """On this machine nothing was replaced, so a difference is a wrong name in the table."""
  for module, package in accelerator._LOADED.items():
    loaded = pytest.importorskip(module)
    assert loaded.__version__ == metadata.version(package)
