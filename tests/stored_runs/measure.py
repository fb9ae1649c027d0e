"""Measure a stored run: the losses of its next steps, and its logits."""

import dataclasses
import json
import runpy
import tarfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import released
import tiny
import tiny_run

from tokenformer_jax import config
from tokenformer_jax.config import GrowConfig, MeshConfig, ModelConfig, growth
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.grow import grow_run, plan
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.training import loop

HERE = Path(__file__).parent
# What a user of the run has to say, because the machine is another one.
FLAGS = {
  'converted': {
    'data.source': 'files:corpus/*.txt',
    'data.tokenizer': 'foreign/tokenizer.json',
    'data.batch_size': 4,
    'data.cache_dir': 'cache',
    'data.validation_fraction': 0.3,
    'optim.warmup_steps': 2,
    'train.steps': 4,
    'train.log_every': 1,
    'train.eval_batches': 1,
    'train.sample_tokens': 0,
    'train.trackers': (),
  }
}


def write_data() -> None:
  """Write the text, and the tokenizer of released weights, into the current directory."""
  tiny_run.write_corpus(Path('corpus'))
  Path('foreign').mkdir()
  released.write_tokenizer(Path('foreign'))


def pack(run: Path, file: Path) -> None:
  """Write a work directory as one file, without who wrote it and when."""

  def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, '', ''
    return entry

  with tarfile.open(file, 'w:xz') as packed:
    packed.add(run, run.name, filter=plain)


def unpack(file: Path, home: Path) -> Path:
  """Make the work directory that is packed in `NAME/run.tar.xz`; return it, `home/NAME`."""
  with tarfile.open(file) as packed:
    packed.extractall(home, filter='data')
  return home / file.parent.name


def next_losses(run: Path) -> dict[str, float]:
  """Resume a run as `python train.py --workdir=RUN FLAGS` does; return the loss of each step.

  Its data is found in the current directory: see `write_data`.
  """
  saved = runpy.run_path(str(tiny_run.ROOT / 'configs/saved.py'))['get_config'](str(run))
  saved.update_from_flattened_dict(FLAGS.get(run.name, {}))
  before = checkpoint.open_source(str(run)).meta.step
  loop.train(config.resolve(saved), run)
  lines = map(json.loads, (run / 'metrics.jsonl').read_text().splitlines())
  return {
    str(line['step']): line['train/loss']
    for line in lines
    if line['step'] > before and 'train/loss' in line
  }


def logits(run: Path) -> list[float]:
  """Some of the logits of a run's newest checkpoint for a fixed input."""
  source = checkpoint.open_source(str(run))
  params = grow_run.read(source, _mesh())['params']
  return _logits(source.meta.config.model, params)


def grown_logits(run: Path) -> list[float]:
  """The same of the run grown to a larger model by a method that is exact."""
  origin = checkpoint.open_source(str(run))
  source = origin.meta.config.model
  if not (counts := config.token_counts(source)):
    how = growth(method='hypercloning')
    wider = tiny.with_mixer(source, heads=2 * source.layer.mixer.heads)
    target = dataclasses.replace(wider, width=2 * source.width)
  else:
    how = GrowConfig()
    more = {'qkv': counts['qkv'] + 8, 'proj': counts['proj'] + 4, 'ffn': 2 * counts['ffn']}
    target = grown_model(source, more, how)
  steps = plan.plan_growth(source, target, how)
  state = grow_run.read_and_grow(origin, _mesh(), steps, how)
  return _logits(target, state['params'])


def history(run: Path) -> list[dict[str, Any]]:
  """How the run's model came to be: its lineage, and how large each ancestor was."""
  return [
    {
      'action': ancestor.action,
      'source': Path(ancestor.source).name,
      'step': ancestor.step,
      'updates': ancestor.updates,
      'method': ancestor.grow.method.kind,
      'parameters': _parameters(ancestor.model),
    }
    for ancestor in checkpoint.open_source(str(run)).meta.lineage
  ]


def facts(run: Path) -> dict[str, int | str]:
  """Return other facts that the newest checkpoint records about its run."""
  meta = checkpoint.open_source(str(run)).meta
  return {
    'step': meta.step,
    'updates': meta.updates,
    'samples': meta.seen.samples,
    'contents': meta.contents,
    'arrays': len(meta.checksums),
    'parameters': _parameters(meta.config.model),
  }


def _mesh() -> jax.sharding.Mesh:
  return sharding.make_mesh(MeshConfig(), jax.devices()[:1])


def _parameters(model: ModelConfig) -> int:
  return sum(array.size for array in jax.tree.leaves(models.define(model).abstract))


def _logits(model: ModelConfig, params: Params) -> list[float]:
  rng = np.random.default_rng(0)
  definition = models.define(model)
  if model.kind == 'vit':
    inputs = rng.normal(size=(2, 8, 8, model.channels)).astype(np.float32)
  else:
    inputs = rng.integers(0, 64, (2, 12), np.int32)
  found = jax.jit(lambda p, x: definition.bind(p)(x)[0])(params, inputs)
  flat = np.asarray(found, np.float64).ravel()
  return [float(f'{value:.8g}') for value in flat[:: max(1, flat.size // 100)]]
