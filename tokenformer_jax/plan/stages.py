"""Plan a run whose batches change over steps: a program for each size, and the whole run."""

import dataclasses
from typing import Any

from tokenformer_jax.config import Config, at_stage, stages
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.plan import table
from tokenformer_jax.plan.estimate import Plan, advice, count_steps, plan
from tokenformer_jax.plan.table import Row
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError


@dataclasses.dataclass(frozen=True)
class Leg:
  """Steps of a run that have one program."""

  name: str
  plan: Plan
  steps: int

  @property
  def model_flops(self) -> float:
    """Return the model FLOPs of all steps."""
    return self.steps * self.plan.model_flops

  @property
  def chip_hours(self) -> tuple[float, float]:
    """Return the chip-hours with all collectives behind computation, and with none."""
    fast, slow = (hours * self.plan.topology.chips for hours in self.plan.hours_of(self.steps))
    return fast, slow

  def row(self) -> Row:
    """Return memory, time, MFU, steps, FLOPs and chip-hours."""
    (fast, slow), (high, low) = self.plan.step_seconds, self.plan.mfu
    return (
      self.name,
      f'{self.plan.parameters:,}',
      table.gib(self.plan.memory.peak),
      f'{table.ms(fast)} … {table.ms(slow)}',
      f'{table.percent(low)} … {table.percent(high)}',
      f'{self.steps:,}',
      f'{self.model_flops:.3g}',
      table.chip_hours(self.chip_hours),
    )


@dataclasses.dataclass(frozen=True)
class StagedPlan:
  """The plan of a run whose programs run one after the other."""

  legs: tuple[Leg, ...]

  @property
  def largest(self) -> Leg:
    """Return the leg whose step needs the most memory."""
    return max(self.legs, key=lambda leg: leg.plan.memory.peak)

  @property
  def model_flops(self) -> float:
    """Return the model FLOPs of the whole run."""
    return sum(leg.model_flops for leg in self.legs)

  @property
  def chip_hours(self) -> tuple[float, float]:
    """Return the chip-hours of the whole run, with all collectives overlapped and with none."""
    fast, slow = map(sum, zip(*(leg.chip_hours for leg in self.legs), strict=True))
    return fast, slow

  def rows(self, name: str) -> list[Row]:
    """Return a table with a row for each leg, and one for the whole run with the given name."""
    head = ('', 'parameters', 'HBM GiB', 'ms a step', 'MFU', 'steps', 'FLOPs', 'chip-hours')
    steps, hours = sum(leg.steps for leg in self.legs), table.chip_hours(self.chip_hours)
    whole = (name, '', '', '', '', f'{steps:,}', f'{self.model_flops:.3g}', hours)
    return [head, *(leg.row() for leg in self.legs), whole]

  def to_json(self) -> dict[str, Any]:
    """Return the figures of the run and of its legs, in their order."""
    return {
      'model_flops': self.model_flops,
      'chip_hours': self.chip_hours,
      'stages': [leg.plan.to_json() for leg in self.legs],
    }


def plan_stages(config: Config, on: Topology, *, quick: bool = False) -> StagedPlan:
  """Plan every stage of a run: see `estimate.plan`."""
  steps = count_steps(config)
  if steps is None:
    raise UserError(
      'config.train.epochs is set, and the stages of config.data need the number of steps; set '
      'config.train.steps'
    )
  reached = [stage for stage in stages(config.data) if stage.first < steps]
  ends = [*(stage.first for stage in reached[1:]), steps]
  plans: dict[tuple[int, int], Plan] = {}
  legs = []
  for stage, end in zip(reached, ends, strict=True):
    size = stage.batch_size, stage.sequence_length
    name = f'after step {stage.first:,}: {stage.batch_size:,} × {stage.sequence_length:,}'
    if size not in plans:
      say(f'the stage {name}')
      alone = dataclasses.replace(config, data=at_stage(config.data, stage))
      try:
        plans[size] = plan(alone, on, quick=quick)
      except DoesNotFitError as error:
        raise UserError(
          f'in the stage of config.data {name}, {advice(alone, error, on)}'
        ) from error
    legs.append(Leg(name, with_steps(plans[size], end - stage.first), end - stage.first))
  return StagedPlan(tuple(legs))


def with_steps(plan: Plan, steps: int) -> Plan:
  """Return the plan of a run with as many steps."""
  train = dataclasses.replace(plan.config.train, steps=steps, epochs=0.0, examples=0)
  return dataclasses.replace(plan, config=dataclasses.replace(plan.config, train=train))


def render(staged: StagedPlan) -> str:
  """Return a table with a row for each stage and the run, and the table of the largest stage."""
  return (
    f'{aligned(staged.rows("the run"))}\n\nthe stage that needs the most memory, '
    f'{staged.largest.name}:\n\n{table.render(staged.largest.plan)}'
  )
