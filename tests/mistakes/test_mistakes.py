"""Every mistake of `cases.py` gets one sentence, status 2 and no traceback, and writes nothing."""

import contextlib
import fcntl
import json
import os
import shlex
from pathlib import Path

import cases
import inputs
import jax
import jax.numpy as jnp
import pytest
import tiny_run

from tokenformer_jax.config import Config
from tokenformer_jax.model import models
from tokenformer_jax.runs import checkpoint, saved_config
from tokenformer_jax.steps import optim, step
from tokenformer_jax.training import sizes

MODEL = [f'--config.{name}={value}' for name, value in tiny_run.CHANGES.items()]
TEXT = '--config.data.source=files:{}/corpus/*.txt'


@pytest.fixture(scope='module')
def material(tmp_path_factory) -> Path:
  """A folder with the files of `inputs.py`, and runs of 2 steps; shared by all workers."""
  base = tmp_path_factory.getbasetemp()
  base = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
  folder = base / 'mistakes'
  with (base / 'mistakes.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not folder.exists():
      _make(folder)
  return folder


def _make(folder: Path) -> None:
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
    _write_run(being_made / name, sizes.fill_in(config))
  being_made.rename(folder)


def _write_run(workdir: Path, config: Config) -> None:
  """Writes a work directory as a run of 2 steps leaves it, but for what the parameters are."""
  definition = models.define(config.model)
  tx = optim.make_optimizer(config.optim, config.train.steps, definition.info)
  abstract = jax.eval_shape(lambda: step.initial_state(definition, tx, 0))
  state = jax.tree.map(lambda array: jnp.full(array.shape, 0.01, array.dtype), abstract)
  vocabulary = {'classes': [*range(10)]} if config.model.kind == 'vit' else {'kind': 'bytes'}
  checkpoints = checkpoint.Checkpoints(workdir, keep=1)
  with contextlib.closing(checkpoints):
    checkpoints.save(2, {**state, 'step': jnp.int32(2)}, config, vocabulary)
    checkpoints.wait()
  (workdir / 'config.json').write_text(saved_config.to_text(config))
  figures = [{'step': i, 'train/loss': 5.0 - i} for i in (1, 2)]
  (workdir / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in figures))


def filled(text: str, material: Path) -> str:
  """A text of `cases.py` with its names replaced."""
  names = {name: str(material / name) for name in ('lm', 'dense', 'learned', 'vit')}
  tiny = shlex.join([TEXT.format(material), *MODEL])
  for name, value in {
    'repo': str(tiny_run.ROOT),
    'in': str(material),
    'tiny': tiny,
    **names,
  }.items():
    text = text.replace(f'{{{name}}}', value)
  return text


def arguments(typed: str, material: Path) -> list[str]:
  """The arguments of python for what is typed."""
  verb, *rest = shlex.split(filled(typed, material))
  if verb == 'train':
    return [str(tiny_run.ROOT / 'train.py'), *rest]
  return ['-m', f'tokenformer_jax.{verb}', *rest]


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
  """Size and time of every file, and 0 of every folder."""
  return {
    str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) if path.is_file() else (0, 0)
    for path in folder.rglob('*')
    for stat in [path.stat()]
  }


@pytest.mark.parametrize(
  'name',
  [*cases.CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in cases.SLOW_CASES)],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(name, server, material, tmp_path):
  typed, named = {**cases.CASES, **cases.SLOW_CASES}[name]
  before = _tree(material)
  done = server.run(arguments(typed, material), tmp_path, XDG_CACHE_HOME=str(tmp_path / 'cache'))
  sentences = [line for line in done.err.splitlines() if line.startswith('error: ')]
  assert 'Traceback' not in done.err, f'a traceback for a mistake of the user:\n{done.err}'
  assert done.status == 2, f'exit status {done.status}, not 2:\n{done.out}{done.err}'
  assert len(sentences) == 1, f'not one sentence:\n{done.err}'
  wanted = filled(named, material)
  assert wanted in sentences[0], f'the sentence does not name {wanted!r}:\n{sentences[0]}'
  assert not _tree(tmp_path), 'the command wrote into the working directory'
  assert _tree(material) == before, 'the command changed files of the user'
