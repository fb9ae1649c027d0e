"""Parse the names of topologies and make devices to compile for, without the hardware."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies

from tokenformer_jax.errors import UserError, arg, nearest
from tokenformer_jax.plan import gpu
from tokenformer_jax.plan.chips import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Topology:
  """Slices of one chip and shape."""

  chip: Chip
  name: str  # as the user gives it, such as `v5p:4x4x4`, or `h200:8` for eight GPUs of a host
  slices: int = 1

  @property
  def devices(self) -> int:
    """Return the number of JAX devices in all slices."""
    sides = [int(side) for side in self.name.partition(':')[2].split('x')]
    return math.prod(sides) * self.chip.devices * self.slices

  @property
  def chips(self) -> int:
    """Return the number of chips in all slices."""
    return self.devices // self.chip.devices


def parse(name: str, slices: int = 1) -> Topology:
  """Return the topology of `--topology` and `--slices`."""
  chip_name, _, shape = name.partition(':')
  if chip_name not in CHIPS:
    first = chip_name.lower().partition('-')[0]  # v6e, for an accelerator type such as v6e-256
    hint = nearest(first if first in CHIPS else chip_name.lower(), CHIPS)
    raise UserError(f'{arg.topology}={name}: {chip_name!r} is not a known chip{hint}')
  chip = CHIPS[chip_name]
  pattern, example = {
    1: (r'[1-8]', '8'),
    2: (r'\d+x\d+', '4x4'),
    3: (r'\d+x\d+x\d+', '4x4x4'),
  }[chip.torus]
  if not re.fullmatch(pattern, shape) or 0 in map(int, shape.split('x')):
    raise UserError(
      f'{arg.topology}={name} has the shape {shape!r}; give a shape as in {chip_name}:{example}'
    )
  if slices > 1 and chip.platform == 'gpu':
    raise UserError(f'{arg.slices}={slices} is for TPUs; GPUs are planned on one host')
  return Topology(chip, name, slices)


def devices(topology: Topology) -> list[Any]:
  """Return JAX devices to compile for, which their compiler makes: libtpu, or `gpu.devices`."""
  if topology.chip.platform == 'gpu':
    return gpu.devices(topology.chip, topology.devices)
  if importlib.util.find_spec('libtpu') is None:
    raise UserError('planning for TPUs needs their compiler, libtpu: pip install -e ".[tpu]"')
  # By default libtpu queries a server that only Google's VMs have, and takes a lock on the TPU.
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  options: dict[str, Any] = {'num_slices': topology.slices}
  if topology.chip.name == 'v4':
    options['chip_config_name'] = 'megacore'  # one device for each chip
  try:
    with quiet():
      return list(topologies.get_topology_desc(topology.name, 'tpu', **options).devices)
  except jax.errors.JaxRuntimeError as error:
    raise UserError(
      f'libtpu cannot make {arg.topology}={topology.name} '
      f'({" ".join(str(error).split())[:300]}); the shapes of slices are on '
      'cloud.google.com/tpu/docs, on the page of each generation'
    ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Hide libtpu's messages on standard error about the missing TPU."""
  sys.stderr.flush()
  with tempfile.TemporaryFile() as sink:
    kept = os.dup(2)
    os.dup2(sink.fileno(), 2)
    try:
      yield
    finally:
      sys.stderr.flush()
      os.dup2(kept, 2)
      os.close(kept)
