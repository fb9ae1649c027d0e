"""Search for the largest batch of a remat plan that fits the devices' memory."""

import dataclasses
import math
from collections.abc import Mapping

from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.parallel import rules, sharding
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.plan.estimate import Plan, capacity, plan
from tokenformer_jax.plan.table import Row, gib, ms, percent
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps import remat_plans
from tokenformer_jax.steps.fit import DoesNotFitError

_MOST = 10  # programs that a search compiles


@dataclasses.dataclass(frozen=True)
class Tried:
  """A batch, with its plan or the bytes of a device that it would need; infinite: not known."""

  batch: int
  needed: float
  plan: Plan | None


def search(config: Config, on: Topology, *, quick: bool = False) -> list[Tried]:
  """Plan batches, as far as their memory, until one fits and the next larger one does not.

  Batches are multiples of the devices that split them times `optim.accumulation_steps`. If the
  config leaves the remat plan open, it is the fastest. No code is generated for TPUs.

  Returns:
    The tried batches, the smallest first; the last with a plan is the largest that fits.
  """
  remat = remat_plans.open_plans(config.train, config.model, on.chip.kind)[0]
  train = dataclasses.replace(config.train, remat=remat.remat, layers=remat.layers)
  split = rules.shard_count('batch', sharding.abstract_mesh(config.mesh, on.devices))
  unit, most = split * config.optim.accumulation_steps, capacity(on)
  tried: dict[int, Tried] = {}
  count: int | None = max(1, config.data.batch_size // unit)
  while count is not None and len(tried) < _MOST:
    say(f'a batch of {count * unit:,}')
    data = dataclasses.replace(config.data, batch_size=count * unit)
    alone = dataclasses.replace(config, data=data, train=train)
    try:
      planned = plan(alone, on, quick=quick or on.chip.platform == 'tpu')
      tried[count] = Tried(count * unit, planned.memory.peak, planned)
    except DoesNotFitError as error:
      needed = error.needed * 2**30 if error.needed else math.inf
      tried[count] = Tried(count * unit, max(needed, most), None)
    fits = max((size for size, one in tried.items() if one.plan), default=0)
    count = next_count({size: one.needed for size, one in tried.items()}, fits, most)
  if not any(one.plan for one in tried.values()):
    least = tried[min(tried)]
    raise UserError(
      f'no batch fits on {on.name} with {remat.flags}: {least.batch:,} needs '
      f'{gib(least.needed)} of {gib(most)} GiB of a device'
    )
  return [tried[size] for size in sorted(tried)]


def next_count(needed: Mapping[int, float], fits: int, most: float) -> int | None:
  """Return the next size to try, by a line through two tried ones, or in proportion to one.

  Sizes that do not fit make a line only if none fits: compilers compute values again in programs
  that are too large, whose bytes then hardly grow with the batch.

  Args:
    needed: bytes by the tried size.
    fits: the largest that fits, or 0.
    most: the capacity in bytes.

  Returns:
    None if the next larger size than `fits` does not fit.
  """
  fitting = sorted(size for size in needed if size <= fits)
  above = sorted(size for size in needed if size > fits)
  if fits + 1 in above:
    return None
  known = fitting[-2:] or [size for size in above if needed[size] < math.inf][:2]
  if not known or (not fits and len(above) > 2):  # The line of the two did not lead to a fit.
    return max(1, (above[0] if above else 2) // 2)
  first, last = known[0], known[-1]
  rise = (needed[last] - needed[first]) / (last - first) if first < last else needed[first] / first
  guess = first + math.floor((most - needed[first]) / rise) if rise > 0 else 2 * last
  if not fits:
    return min(max(guess, above[0] // 4, 1), above[0] - 1)
  if above and guess >= above[0]:
    return (fits + above[0]) // 2  # That size does not fit, against the line.
  return max(fits + 1, guess)


def render(tried: list[Tried], on: Topology) -> str:
  """Return a table with a row for each batch, and the flags of the largest that fits."""
  rows: list[Row] = [('batch', 'GiB of a device', 'ms a step', 'MFU', 'a second')]
  for one in tried:
    size = gib(one.needed) if one.needed < math.inf else 'too large'
    if one.plan is None:
      rows.append((f'{one.batch:,}', size, 'does not fit', '', ''))
      continue
    slow, units = one.plan.step_seconds[1], one.plan.config.data.units_per_step
    speed = (ms(slow), percent(one.plan.mfu[1]), f'{units / slow:,.0f}')
    rows.append((f'{one.batch:,}', size, *speed))
  best = [one.plan for one in tried if one.plan][-1].config
  return (
    f'{aligned(rows)}\n\nthe largest batch that fits in {gib(capacity(on))} GiB: '
    f'{arg.config}.data.batch_size={best.data.batch_size} '
    f'{arg.config}.train.remat={best.train.remat} {arg.config}.train.layers={best.train.layers}'
  )
