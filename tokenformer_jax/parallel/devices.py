"""Find the devices of a run, and check that a config can be split over them."""

import os

import jax
from jax.sharding import AbstractMesh, Mesh

from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding


def find() -> list[jax.Device]:
  """Return all devices.

  Raises:
    UserError: JAX finds no device of the platforms in JAX_PLATFORMS.
  """
  try:
    return jax.devices()
  except RuntimeError as error:
    asked = os.environ.get('JAX_PLATFORMS', '')
    raise UserError(
      f'no device of the kind JAX_PLATFORMS={asked!r} was found ({str(error).splitlines()[0]}); '
      'unset it, or install jax for that device (pip install -e ".[tpu]" or ".[cuda]")'
    ) from error


def check_devices(config: Config, mesh: Mesh) -> None:
  """Check that the mesh can split heads and batch, and suits the attention kernel.

  `sharding.check_divides` checks the parameters.

  Raises:
    UserError: a size cannot be split evenly, or the attention kernel is for other devices.
  """
  kernel, platform = config.train.attention, mesh.devices.flat[0].platform
  needed = {'splash': 'tpu', 'cudnn': 'gpu'}.get(kernel, platform)
  if needed != platform:
    raise UserError(
      f'config.train.attention={kernel} is for a {needed}, and the devices are {platform}; '
      'auto takes the kernel of the devices'
    )
  check_splits(config, mesh)


def check_splits(config: Config, mesh: Mesh | AbstractMesh) -> None:
  """Check that heads and batch can be split over the mesh.

  Raises:
    UserError: a size is not a multiple of its number of parts.
  """
  for heads in config.model.heads:
    sharding.check_divisible(mesh, 'heads', heads, 'heads of a layer of config.model')
  parts = config.optim.accumulation_steps
  rows = f'of config.data.batch_size / optim.accumulation_steps = {config.data.batch_size}/{parts}'
  sharding.check_divisible(mesh, 'batch', config.data.batch_size // parts, rows)
