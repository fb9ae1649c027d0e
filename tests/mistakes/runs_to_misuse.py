"""Runs that the mistakes are made with; no step of them is computed."""

import contextlib
import json
from pathlib import Path

import inputs
import jax
import jax.numpy as jnp
import tiny_run
from tiny import make_optimizer

from tokenformer_jax.config import Config
from tokenformer_jax.model import models
from tokenformer_jax.runs import checkpoint, saved_config
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import step
from tokenformer_jax.training import sizes


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
    _write_run(being_made / name, sizes.fill_in(config))
  being_made.rename(folder)


def _write_run(workdir: Path, config: Config) -> None:
  """Writes a work directory as a run of 2 steps leaves it, but for what the parameters are."""
  definition = models.define(config.model)
  tx = make_optimizer(config.optim, config.train.steps, definition.info)
  abstract = jax.eval_shape(lambda: step.initial_state(definition, tx, 0))
  state = jax.tree.map(lambda array: jnp.full(array.shape, 0.01, array.dtype), abstract)
  vocabulary = {'classes': [*range(10)]} if config.model.kind == 'vit' else {'kind': 'bytes'}
  checkpoints = checkpoint.Checkpoints(workdir, keep=1)
  with contextlib.closing(checkpoints):
    checkpoints.save(Meta(2, config, vocabulary), {**state, 'step': jnp.int32(2)})
    checkpoints.wait()
  (workdir / 'config.json').write_text(saved_config.to_text(config))
  figures = [{'step': i, 'train/loss': 5.0 - i} for i in (1, 2)]
  (workdir / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in figures))
