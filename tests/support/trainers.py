"""Runs before and between their steps."""

import shutil

import jax
import pytest

from tokenformer_jax.parallel import sharding
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop
from tokenformer_jax.training.prepare import prepare


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
