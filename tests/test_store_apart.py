"""A process of its own builds the token store of a run."""

import os
import subprocess
import sys

import tiny_run

_BUILD = """
import sys
from pathlib import Path
import tiny_run
from tokenformer_jax.cli import store_apart
from tokenformer_jax.data import store

config = tiny_run.config(sys.argv[1], Path(sys.argv[2]), data__tokenizer='bpe:300')
build = store_apart.fork(config)
if sys.argv[3] == 'build':
  build()
  store.prepare(config.data)
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


def test_the_process_ends_with_a_run_that_never_asks(tmp_path):
  source = tiny_run.write_corpus(tmp_path / 'text')
  done = _run(source, tmp_path / 'cache', 'wait')  # It returns when both have closed their output.
  assert done.returncode == 0, done.stderr
  assert not (tmp_path / 'cache').exists()
