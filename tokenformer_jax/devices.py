"""The devices of a run, and whether a config can be split over them."""

import os

import jax
from jax.sharding import AbstractMesh, Mesh

from tokenformer_jax import sharding
from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.params import Definition


def find() -> list[jax.Device]:
  """All devices.

  Raises:
    UserError: there are none of the kind that JAX_PLATFORMS asks for.
  """
  try:
    return jax.devices()
  except RuntimeError as error:
    asked = os.environ.get('JAX_PLATFORMS', '')
    raise UserError(
      f'no device of the kind JAX_PLATFORMS={asked!r} was found ({str(error).splitlines()[0]}); '
      'unset it, or install jax for that device (pip install -e ".[tpu]" or ".[cuda]")'
    ) from error


def check_fits(config: Config, definition: Definition, mesh: Mesh) -> None:
  """Checks that parameters, heads and batch can be split over the mesh, and its devices do.

  Raises:
    UserError: something cannot be split evenly, or the kernel of attention is for other devices.
  """
  check_devices(config, mesh)
  sharding.check_divides(mesh, definition.abstract, definition.axes)


def check_devices(config: Config, mesh: Mesh) -> None:
  """Check what of `check_fits` needs no sizes that the data decides.

  Raises:
    UserError: as `check_fits`, but for the parameters.
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
    UserError: a size is not a multiple of the number of its parts.
  """
  for heads in config.model.heads:
    sharding.check_divisible(mesh, 'heads', heads, 'heads of a layer of config.model')
  parts = config.optim.accumulation_steps
  rows = f'of config.data.batch_size / optim.accumulation_steps = {config.data.batch_size}/{parts}'
  sharding.check_divisible(mesh, 'batch', config.data.batch_size // parts, rows)
