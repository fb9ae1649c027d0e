"""Plan a config in several meshes, to find the fastest that fits."""

import dataclasses
from collections.abc import Sequence

from tokenformer_jax.config import Config, MeshConfig, differences
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.plan.estimate import Plan, plan
from tokenformer_jax.plan.table import Row, gib, ms, percent
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError

_SPLITS = (1, 2, 4, 8)  # devices to split parameter tokens over


@dataclasses.dataclass(frozen=True)
class Tried:
  """A mesh, with its plan or the reason why there is none."""

  mesh: MeshConfig
  plan: Plan | None
  reason: str = ''

  @property
  def speed(self) -> float:
    """Return tokens or images a second, midway between the bounds; −1 if the step does not fit."""
    if self.plan is None:
      return -1.0
    return self.plan.config.data.units_per_step * 2 / sum(self.plan.step_seconds)


def meshes(config: Config, on: Topology) -> list[MeshConfig]:
  """Return the config's mesh, and others that split its parameter tokens in other numbers."""
  own = sharding.mesh_sizes(config.mesh, on.devices)['tokens']
  others = (
    sharding.with_token_shards(config.mesh, on.devices, split)
    for split in _SPLITS
    if split != own and all(heads % split == 0 for heads in config.model.heads)
  )
  return [config.mesh, *(mesh for mesh in others if mesh is not None)]


def search(config: Config, on: Topology, *, quick: bool = False) -> list[Tried]:
  """Plan the step in each mesh and return them with the fastest first."""
  tried = []
  for mesh in meshes(config, on):
    say(f'mesh {len(tried) + 1}: {_name(mesh)}')
    try:
      tried.append(Tried(mesh, plan(dataclasses.replace(config, mesh=mesh), on, quick=quick)))
    except DoesNotFitError as error:
      needed = (
        f'needs {error.needed:.1f} of {error.capacity:.1f} GiB' if error.needed else 'too large'
      )
      tried.append(Tried(mesh, None, needed))
  if not any(one.plan for one in tried):
    reasons = '; '.join(f'{_name(one.mesh)}: {one.reason}' for one in tried)
    raise UserError(f'no mesh fits on {on.name} ({reasons})')
  return sorted(tried, key=lambda one: one.speed, reverse=True)


def _name(mesh: MeshConfig) -> str:
  return ' '.join(f'{axis}={size}' for axis, size in dataclasses.asdict(mesh).items())


def advice(config: Config, tried: Sequence[Tried]) -> str:
  """Return the flags of the fastest mesh, and its gain over the config's."""
  best, own = tried[0], next(one for one in tried if one.mesh == config.mesh)
  if best is own:
    return 'no mesh is faster than that of the config'
  changed = differences(best.mesh, config.mesh, 'mesh.')
  flags = ' '.join(f'--config.{path}={value}' for path, value, _ in changed)
  if own.plan is None:
    return f'the mesh of the config does not fit; the fastest that fits: {flags}'
  return f'{flags}: {best.speed / own.speed:.2f} times as fast as the mesh of the config'


def render(tried: Sequence[Tried]) -> str:
  """Return a table with a row for each mesh."""
  rows: list[Row] = [('', 'layers', 'HBM GiB', 'ms a step', 'MFU', 'a second')]
  for one in tried:
    if one.plan is None:
      rows.append((_name(one.mesh), 'do not fit', '', '', '', one.reason))
      continue
    train, units = one.plan.config.train, one.plan.config.data.units_per_step
    (fast, slow), (high, low) = one.plan.step_seconds, one.plan.mfu
    rows.append(
      (
        _name(one.mesh),
        f'{train.remat}, {train.layers}',
        gib(one.plan.memory.peak),
        f'{ms(fast)} … {ms(slow)}',
        f'{percent(low)} … {percent(high)}',
        f'{units / slow:,.0f} … {units / fast:,.0f}',
      )
    )
  return aligned(rows)
