"""Share files and runs with all tests of mistakes."""

import fcntl
import os
from pathlib import Path

import inputs
import jax
import matplotlib.font_manager  # noqa: F401 (which writes a list of fonts into the cache)
import numpy as np
import pytest
import tiny_run
import written_runs

from tokenformer_jax.config import Config
from tokenformer_jax.model import models
from tokenformer_jax.resolve.facts import complete


@pytest.fixture(scope='session')
def material(tmp_path_factory) -> Path:
  """A folder with the files of `inputs.py`, and runs of 2 steps; shared by all workers."""
  base = tmp_path_factory.getbasetemp()
  base = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
  folder = base / 'mistakes'
  with (base / 'mistakes.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not folder.exists():
      write(folder)
  return folder


def write(folder: Path) -> None:
  """Writes the runs of 2 steps, and the files of `inputs.py`, into a new folder."""
  being_made = folder.with_suffix('.new')
  inputs.write(being_made)
  source = tiny_run.write_corpus(being_made / 'corpus')
  cache = being_made / 'cache'
  runs = {
    'lm': tiny_run.config(source, cache),
    'dense': tiny_run.config(source, cache, **tiny_run.DENSE, model__layer__ffn__width=64),
    'learned': tiny_run.config(source, cache, **tiny_run.LEARNED),
    'vit': tiny_run.vit_config(),
  }
  for name, config in runs.items():
    _write_run(being_made / name, complete(config))
  being_made.rename(folder)


def _write_run(workdir: Path, config: Config) -> None:
  """Writes a work directory as a run of 2 steps leaves it, but for what the parameters are."""
  abstract = models.define(config.model).abstract
  params = jax.tree.map(lambda array: np.full(array.shape, 0.01, array.dtype), abstract)
  vocabulary = {'classes': [*range(10)]} if config.model.kind == 'vit' else {'kind': 'bytes'}
  written_runs.write_params(workdir, config, params, 2, vocabulary=vocabulary)
  figures = [{'step': i, 'train/loss': 5.0 - i} for i in (1, 2)]
  written_runs.add(workdir / 'metrics.jsonl', figures)
