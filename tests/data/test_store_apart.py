"""A process of its own builds the token store of a run."""

import os
import subprocess
import sys
from unittest import mock

import jax
import pytest
import tiny_run

from tokenformer_jax.data import store_apart
from tokenformer_jax.parallel import sharding
from tokenformer_jax.training import loop

_BUILD = """
import os
import sys
from pathlib import Path
import tiny_run
from tokenformer_jax.data import store, store_apart

config = tiny_run.config(sys.argv[1], Path(sys.argv[2]), data__tokenizer='bpe:300')
process = store_apart.fork(config)
if sys.argv[3] == 'build':
  process.build()
  store.prepare(config.data)
if sys.argv[3] == 'close':
  process.close()
  assert not Path('/proc/self/task', str(os.getpid()), 'children').read_text(), 'it waits'
  process.build()
"""


def _run(source: str, cache, build: str) -> subprocess.CompletedProcess:
  folders = [str(tiny_run.ROOT), str(tiny_run.ROOT / 'tests' / 'support')]
  environment = {**tiny_run.environment(), 'PYTHONPATH': os.pathsep.join(folders)}
  command = [sys.executable, '-c', _BUILD, source, str(cache), build]
  return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_the_store_is_there_when_the_run_opens_it(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'text')
  done = _run(source, tmp_path / 'cache', 'build')
  assert done.returncode == 0, done.stderr
  said = done.stdout + done.stderr
  assert said.count('training the tokenizer') == 1, f'not built once:\n{said}'


@pytest.mark.parametrize('order', ['close', 'never'])
def test_the_process_ends_without_a_store_when_the_run_does_not_need_it(tmp_path, order):
  source = tiny_run.write_corpus(tmp_path / 'text')
  done = _run(source, tmp_path / 'cache', order)  # It returns when both have closed their output.
  assert done.returncode == 0, done.stderr
  assert not (tmp_path / 'cache').exists()


def test_a_run_that_continues_ends_the_process_before_its_first_step(tmp_path, monkeypatch):
  """Also one whose newest checkpoint is damaged, which prepares itself twice."""
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  source, workdir = tiny_run.write_corpus(tmp_path / 'text'), tmp_path / 'run'
  config = tiny_run.config(source, tmp_path / 'cache', train__steps=2, train__checkpoint_every=1)
  asked = mock.create_autospec(store_apart.StoreProcess, instance=True)
  assert loop.begin(config, workdir, store_process=asked)[2] == 0
  assert asked.mock_calls == [mock.call.build()], 'a first run does not ask for its store'
  loop.train(config, workdir)
  arrays = (workdir / 'checkpoints' / '2').rglob('*')
  largest = max((p for p in arrays if p.is_file()), key=lambda path: path.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  asked.reset_mock()
  assert loop.begin(config, workdir, store_process=asked)[2] == 1
  assert asked.mock_calls == [mock.call.close()] * 2, 'the process waits through the run'
