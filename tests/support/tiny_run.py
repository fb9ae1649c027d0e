"""Runs of a few seconds on a tiny corpus or on digits: configs, flags, trainers, a process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import xla_flags

from tokenformer_jax import config as config_lib
from tokenformer_jax.parallel import sharding
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop
from tokenformer_jax.training.prepare import prepare

ROOT = Path(__file__).parent.parent.parent

CHANGES = {
  'model.pattern': 'layer*2',
  'model.width': 32,
  'model.layer.mixer.heads': 4,
  'model.layer.mixer.qkv.tokens': 32,
  'model.layer.mixer.proj.tokens': 32,
  'model.layer.ffn.tokens': 64,
  'data.tokenizer': 'bytes',
  'data.sequence_length': 32,
  'data.batch_size': 8,
  'data.validation_fraction': 0.3,
  'optim.learning_rate': 3e-3,
  'optim.warmup_steps': 5,
  'train.steps': 20,
  'train.log_every': 5,
  'train.eval_every': 0,
  'train.checkpoint_every': 5,
  'train.sample_tokens': 0,
  'train.trackers': (),
}


def write_corpus(directory: Path) -> str:
  """Writes 60 documents of random words; returns the source that names them."""
  rng = np.random.default_rng(0)
  words = ['def', 'return', 'self', 'token', 'grow', 'key', 'value', 'naïve', '(x)', '\n']
  directory.mkdir(parents=True, exist_ok=True)
  for i in range(60):
    (directory / f'{i}.txt').write_text(' '.join(rng.choice(words, 80)))
  return f'files:{directory}/*.txt'


def write_two_corpora(directory: Path) -> Path:
  """Writes `old`, as `write_corpus`, and `new`, 40 documents of other words."""
  write_corpus(directory / 'old')
  (directory / 'new').mkdir()
  for i in range(40):
    text = f'zebras {i} jump over quick foxes, {i * i} jumping zebras. '
    (directory / f'new/{i}.txt').write_text(text * 9)
  return directory


def config(source: str, cache: Path, **changes) -> config_lib.Config:
  """The resolved config; keys of `changes` have two underscores for a dot."""
  base = {**CHANGES, 'data.source': source, 'data.cache_dir': str(cache)}
  return _resolved(base, changes)


def _resolved(base, changes) -> config_lib.Config:
  dotted = {name.replace('__', '.'): value for name, value in changes.items()}
  return config_lib.resolve(config_lib.from_dotted(base), config_lib.from_dotted(dotted))


VIT = {
  'model.kind': 'vit',
  'data.kind': 'images',
  'model.position_embedding': 'sincos',
  'model.layer.mixer.positions.kind': 'none',
  'model.patch': 4,
  'model.pattern': 'layer*2',
  'model.width': 32,
  'model.layer.mixer.heads': 4,
  'model.layer.mixer.qkv.tokens': 32,
  'model.layer.mixer.proj.tokens': 32,
  'model.layer.ffn.tokens': 64,
  'data.source': 'digits',
  'data.image_size': 8,
  'data.batch_size': 16,
  'data.prefetch': 2,
  'optim.learning_rate': 3e-3,
  'optim.warmup_steps': 5,
  'train.steps': 20,
  'train.log_every': 5,
  'train.eval_every': 0,
  'train.eval_batches': 2,
  'train.checkpoint_every': 5,
  'train.trackers': (),
}

# Learned positions for the 32 tokens of a sequence.
LEARNED = {'model__position_embedding': 'learned', 'model__layer__mixer__positions__kind': 'none'}

DENSE = {  # a Transformer
  'model.layer.mixer.qkv.kind': 'dense',
  'model.layer.mixer.proj.kind': 'dense',
  'model.layer.ffn.kind': 'mlp',
}


def vit_config(**changes) -> config_lib.Config:
  """The resolved config of a run of a few seconds on the digits."""
  return _resolved(VIT, changes)


def command(source: str, cache: Path, workdir: Path, **changes) -> list[str]:
  """The command line that trains the same config."""
  dotted = {name.replace('__', '.'): value for name, value in changes.items()}
  everything = {'data.source': source, 'data.cache_dir': str(cache), **CHANGES, **dotted}
  flags = [f'--config.{name}={as_flag(value)}' for name, value in everything.items()]
  return [sys.executable, str(ROOT / 'train.py'), f'--workdir={workdir}', *flags]


def as_flag(value) -> str:
  """The value of a key as a flag gives it."""
  return ','.join(value) if isinstance(value, tuple) else str(value)


def environment(devices: int = 1) -> dict[str, str]:
  """Return the environment of a process with so many fake CPU devices, that compiles fast."""
  return {**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': xla_flags.join_flags(devices)}


def run(arguments: list[str], **kwargs) -> subprocess.CompletedProcess:
  """Runs a command to its end, with its output as text."""
  return subprocess.run(
    arguments, capture_output=True, text=True, env=environment(), timeout=300, **kwargs
  )


def prepared(config, workdir):
  """Returns a run before its first state is read."""
  return prepare(config, paths.parse_path(workdir), sharding.find_devices())


def trainer(config, workdir) -> loop.Trainer:
  """Returns the trainer of a run, as `loop.train` makes it."""
  return loop.Trainer(prepared(config, workdir))


def begun(config, workdir):
  """Returns a run, the state that it starts from, and its step."""
  run, state, first = loop.begin(config, paths.parse_path(workdir))
  run.checkpoints.close()
  return run.run, state, first


def train_on_one_device(config, workdir):
  """Trains where the fixture `one_device` is out of reach; returns the last state."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    return loop.train(config, workdir)


def broken(workdir, target, step):
  """Copies a run that lost its checkpoints after a step, as by a crash; returns the copy."""

  def lost(folder, names):
    is_lost = folder.endswith('checkpoints')
    return [name for name in names if is_lost and name.isdecimal() and int(name) > step]

  return shutil.copytree(workdir, target, ignore=lost)
