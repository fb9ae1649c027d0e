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


def pytest_configure(config):
  """Import JAX and the package where tests run, and not where workers are started."""
  if hasattr(config, 'workerinput') or config.getvalue('dist') == 'no':
    config.pluginmanager.import_plugin('for_all_tests')


# The slow tests that take longest.
LONGEST = ('test_pages.py', 'test_colabs.py', 'test_hosts.py', 'test_chat_runs.py')


def pytest_collection_modifyitems(items):
  """Begin with the longest, so that workers end together."""
  items.sort(key=lambda item: item.path.name not in LONGEST)
  items.sort(key=lambda item: item.path.name != LONGEST[0])


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
