"""Plan a run whose batches change over steps: a program for each size, and the whole run."""

import dataclasses
from typing import Any

from tokenformer_jax.config import Config, Stage, at_stage, stages
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.plan import table
from tokenformer_jax.plan.estimate import Plan, advice, count_steps, plan
from tokenformer_jax.plan.table import Row
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError


@dataclasses.dataclass(frozen=True)
class StagedPlan:
  """The plan of each stage of a run, whose `steps` are those of the stage."""

  stages: tuple[tuple[Stage, Plan], ...]

  @property
  def largest(self) -> tuple[Stage, Plan]:
    """Return the stage whose step needs the most memory."""
    return max(self.stages, key=lambda planned: planned[1].memory.peak)

  @property
  def model_flops(self) -> float:
    """Return the model FLOPs of the whole run."""
    return sum(planned.known_run[0] * planned.model_flops for _, planned in self.stages)

  @property
  def hours(self) -> list[float]:
    """Return the hours of the whole run, with all collectives overlapped and with none."""
    return [
      sum(bound) for bound in zip(*(planned.hours for _, planned in self.stages), strict=True)
    ]

  def to_json(self) -> dict[str, Any]:
    """Return the figures of the run, and those of each stage by the steps before it."""
    return {
      'model_flops': self.model_flops,
      'hours': self.hours,
      'by_step': {stage.first: planned.to_json() for stage, planned in self.stages},
    }


def plan_stages(config: Config, on: Topology, *, quick: bool = False) -> StagedPlan:
  """Plan every stage of a run: see `estimate.plan`."""
  steps = count_steps(config)
  if steps is None:
    raise UserError(
      'config.train.epochs is set, and the stages of config.data need the number of steps; set '
      'config.train.steps'
    )
  found, known = [], [stage for stage in stages(config.data) if stage.first < steps]
  ends = [*(stage.first for stage in known[1:]), steps]
  plans: dict[tuple[int, int], Plan] = {}
  for stage, end in zip(known, ends, strict=True):
    train = dataclasses.replace(config.train, steps=end - stage.first, epochs=0.0, examples=0)
    alone = dataclasses.replace(config, data=at_stage(config.data, stage), train=train)
    say(f'the stage after step {stage.first:,}: {_sizes(stage)}')
    if stage[1:] not in plans:
      try:
        plans[stage[1:]] = plan(alone, on, quick=quick)
      except DoesNotFitError as error:
        reason = advice(alone, error, on)
        raise UserError(
          f'in the stage of config.data after step {stage.first}, {reason}'
        ) from error
    planned = plans[stage[1:]]
    own = dataclasses.replace(
      planned.config, train=dataclasses.replace(planned.config.train, steps=train.steps)
    )
    found.append((stage, dataclasses.replace(planned, config=own)))
  return StagedPlan(tuple(found))


def _sizes(stage: Stage) -> str:
  return f'{stage.batch_size:,} × {stage.sequence_length:,}'


def render(found: StagedPlan) -> str:
  """Return a table with a row for each stage and the run, and the table of the largest stage."""
  rows: list[Row] = [
    ('after step', 'batch', 'HBM GiB', 'ms a step', 'MFU', 'steps', 'FLOPs', 'chip-hours')
  ]
  for stage, planned in found.stages:
    rows.append((f'{stage.first:,}', _sizes(stage), *table.figures(planned)))
  stage, largest = found.largest
  steps = sum(planned.known_run[0] for _, planned in found.stages)
  whole = table.chip_hours(hours * largest.topology.chips for hours in found.hours)
  rows.append(('the run', '', '', '', '', f'{steps:,}', f'{found.model_flops:.3g}', whole))
  return (
    f'{aligned(rows)}\n\nthe stage that needs the most memory, after step {stage.first:,}:\n\n'
    f'{table.render(largest)}'
  )
