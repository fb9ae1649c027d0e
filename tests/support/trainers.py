"""The trainer of a run, as `loop.train` makes it."""

from tokenformer_jax.parallel import sharding
from tokenformer_jax.training import loop
from tokenformer_jax.training.prepare import prepare


def trainer(config, workdir) -> loop.Trainer:
  """Resolves a run on all devices and returns its trainer."""
  return loop.Trainer(prepare(config, workdir, sharding.find_devices()))
