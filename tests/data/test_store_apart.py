"""A process of its own builds the token store of a run."""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import jax
import pytest
import tiny_run
from compilations import compilations

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
  process.start()
  process.end()
  store.prepare(config.data)
if sys.argv[3] == 'end':
  assert not process.has_ended(0)
  process.end()
  assert not Path('/proc/self/task', str(os.getpid()), 'children').read_text(), 'it waits'
  process.end()
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


@pytest.mark.parametrize('order', ['end', 'never'])
def test_the_process_ends_without_a_store_when_the_run_does_not_need_it(tmp_path, order):
  source = tiny_run.write_corpus(tmp_path / 'text')
  done = _run(source, tmp_path / 'cache', order)  # It returns when both have closed their output.
  assert done.returncode == 0, done.stderr
  assert not (tmp_path / 'cache').exists()


@pytest.mark.slow
def test_a_run_compiles_once_while_its_store_is_built_and_ends_the_process(tmp_path, monkeypatch):
  """A run that continues ends it at once, also if it prepares itself twice for a damaged file."""
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  source, workdir = tiny_run.write_corpus(tmp_path / 'text'), tmp_path / 'run'
  changes = {'train__steps': 2, 'train__checkpoint_every': 1, 'optim__learning_rate': 2.5e-3}
  config = tiny_run.config(source, tmp_path / 'cache', **changes)
  process = mock.create_autospec(store_apart.StoreProcess, instance=True)
  process.has_ended.return_value = False
  process.end.side_effect = lambda: ended.append(list(compiled))
  ended = []
  with compilations() as compiled:
    trainer, state, first = loop.begin(config, workdir, store_process=process)
    with jax.set_mesh(trainer.mesh), contextlib.closing(trainer.checkpoints):
      trainer.train(state, first)
  assert process.mock_calls == [mock.call.start(), mock.call.has_ended(mock.ANY), mock.call.end()]
  assert {'step', 'initial_state'} <= {*ended[0]}, 'the run compiles after its store is built'
  assert compiled.count('step') == compiled.count('initial_state') == 1, 'compiled again'
  assert trainer.train_step._cache_size() == 1

  arrays = (workdir / 'checkpoints' / '2').rglob('*')
  largest = max((p for p in arrays if p.is_file()), key=lambda path: path.stat().st_size)
  os.truncate(largest, largest.stat().st_size // 2)
  process.reset_mock()
  assert loop.begin(config, workdir, store_process=process)[2] == 1
  assert process.mock_calls == [mock.call.end()] * 2, 'the process waits through the run'
