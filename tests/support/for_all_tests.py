"""The fixtures of all folders, and settings of JAX, for a process that runs tests."""

import gc
import os

import bucket_server
import commands_server
import jax
import pytest
import shared_programs
import tiny_run

from tokenformer_jax.parallel import sharding

jax.config.update('jax_numpy_rank_promotion', 'raise')
# A process that a test starts finds all that others have compiled. A worker compiles thousands of
# small programs, which it writes only if they take longer than that.
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)

# Tracing makes many objects and hardly any cycles. By Python's default the search for cycles takes
# a fifth of the time of the tests.
gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope='session', autouse=True)
def shared_cache(tmp_path_factory):
  """Token stores are shared by the tests of a session, and only by them."""
  with pytest.MonkeyPatch.context() as patch:
    if 'XDG_CACHE_HOME' not in os.environ:
      patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    yield


@pytest.fixture(scope='session', autouse=True)
def equal_runs_share_programs(request):
  if request.config.pluginmanager.hasplugin('_cov'):
    yield  # A test that shares a program would not be known to run the lines that make it.
    return
  with shared_programs.shared():
    yield


@pytest.fixture(scope='session')
def server():
  """A process that runs commands without the seconds of their imports, on one device."""
  made = commands_server.Server(tiny_run.environment() | {'HF_HUB_OFFLINE': '1'})
  yield made
  made.close()


@pytest.fixture(scope='module')
def bucket():
  """A server with gs://bucket, which this process and those it starts take for Google's."""
  with bucket_server.serving('bucket') as server, pytest.MonkeyPatch.context() as patch:
    for name, value in server.environment.items():
      patch.setenv(name, value)
    yield server


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  return tiny_run.write_corpus(tmp_path_factory.mktemp('corpus') / 'text')


@pytest.fixture
def make(source, tmp_path):
  """Builds configs that share the corpus and a cache."""
  return lambda **changes: tiny_run.config(source, tmp_path / 'cache', **changes)


@pytest.fixture
def one_device(monkeypatch):
  """Runs see one device, so that they compile faster."""
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])


@pytest.fixture(scope='module')
def one_device_in_module():
  """Runs of a module, its fixtures too, see one device."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    yield
