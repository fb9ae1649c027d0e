"""Eight CPU devices for every test, and caches that are not the user's and end with the tests."""

import gc
import os
import tempfile

import pytest
import xla_flags

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {xla_flags.join_flags(devices=8)}'
if 'PYTEST_XDIST_WORKER' not in os.environ:
  # What one process has compiled, the other workers, and what tests start, need not compile again;
  # nor need the next run of tests, where .ci/run names a folder.
  compiled = tempfile.TemporaryDirectory(prefix='tokenformer_jax-compiled-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = os.environ.get('COMPILED_BY_TESTS', compiled.name)
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'

import bucket_server
import commands_server
import jax
import shared_programs
import tiny_run
from xdist.scheduler import LoadFileScheduling

from tokenformer_jax.parallel import sharding

jax.config.update('jax_numpy_rank_promotion', 'raise')
# A process that a test starts finds all that others have compiled. A worker compiles thousands of
# small programs, which it writes only if they take longer than that.
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)

# Tracing makes many objects and hardly any cycles. By Python's default the search for cycles takes
# a fifth of the time of the tests.
gc.set_threshold(100_000, 20, 100)


class _ByFile(LoadFileScheduling):
  """Give a worker whole files, and one worker both files that run commands in one server."""

  def _split_scope(self, nodeid):
    return super()._split_scope(
      nodeid.replace('mistakes/test_help.py', 'mistakes/test_mistakes.py')
    )


def pytest_xdist_make_scheduler(config, log):
  return _ByFile(config, log) if config.getvalue('dist') == 'loadfile' else None


def pytest_collection_modifyitems(items):
  """The commands of the pages, one after another, take longest: they begin first."""
  items.sort(key=lambda item: item.path.name != 'test_pages.py')


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
  """Never search modules and collected tests for cycles."""
  gc.collect()
  gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
  """End a worker at once: an orderly exit would first free thousands of compiled programs."""
  if hasattr(config, 'workerinput'):
    os._exit(0)


@pytest.fixture(scope='session', autouse=True)
def shared_cache(tmp_path_factory):
  """Token stores are shared by the tests of a session, and only by them."""
  with pytest.MonkeyPatch.context() as patch:
    if 'XDG_CACHE_HOME' not in os.environ:
      patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    yield


@pytest.fixture(scope='session', autouse=True)
def equal_runs_share_programs():
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
