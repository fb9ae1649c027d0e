"""The trainer of a run, as `loop.train` makes it, and runs for fixtures of a module."""

import jax
import pytest

from tokenformer_jax.parallel import sharding
from tokenformer_jax.training import loop
from tokenformer_jax.training.prepare import prepare


def trainer(config, workdir) -> loop.Trainer:
  """Resolves a run on all devices and returns its trainer."""
  return loop.Trainer(prepare(config, workdir, sharding.find_devices()))


def train_on_one_device(config, workdir):
  """Trains where the fixture `one_device` is out of reach; returns the last state."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    return loop.train(config, workdir)
