"""Forecast a family before its runs: chip-hours by the planner, and losses by a law."""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.family.jobs import Job, needed
from tokenformer_jax.laws import formulas, grid, mixing
from tokenformer_jax.laws.runs import measure_size, step_tokens
from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.plan import estimate
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError
from tokenformer_jax.training import sizes

Hours = tuple[float, float]  # the least and the most


@dataclasses.dataclass(frozen=True)
class Law:
  """A law of the loss that `laws --json` has written.

  Attributes:
    values: E, A, B, alpha and beta.
    experts: the exponent of all parameters over those that a token uses; 0 for dense models.
    gamma: the mixing exponent of growth.
    measured: whether the file has the mixing exponent.
  """

  values: formulas.Values
  experts: float
  gamma: float
  measured: bool

  def count(self, job: Job) -> float:
    """Return the parameters of a job's model.

    For a mixture of experts they are those of the dense model with the same loss: N (M/N)^(γ/α).
    """
    active, whole = job.size.active, job.size.parameters
    power = self.experts / self.values['alpha'] if self.experts else 0.0
    return float(active * (whole / active) ** power)


def read_law(path: str) -> Law:
  """Return the law in the JSON file of `laws`."""
  try:
    with open(path, encoding='utf-8') as file:
      content = json.load(file)
    values = {name: np.float64(content[name]) for name in ('E', 'A', 'B', 'alpha', 'beta')}
    growth = content.get('mixing')
    gamma = mixing.TYPICAL if growth is None else float(growth['value'])
    return Law(values, float(content.get('gamma', 0)), gamma, growth is not None)
  except OSError as error:
    raise UserError(f'--law={path} cannot be read ({error.strerror})') from error
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise UserError(
      f'--law={path} is not the JSON file of laws; write it by tokenformer laws … --json={path}'
    ) from error


def losses(jobs: Sequence[Job], law: Law) -> dict[str, float]:
  """Return the loss of each final model that the law describes, by the name of its run.

  It describes sizes from scratch and by growth, but not shrunken models, students and prefixes.
  """
  by_name, predicted = {job.name: job for job in jobs}, {}
  for job in jobs:
    path = [job]
    while path[0].needs:
      path.insert(0, by_name[path[0].needs[0]])
    if not job.final or any(one.action or one.stage == 'elastic' for one in path):
      continue
    legs: dict[float, float] = {}  # size → tokens trained at it
    for one in path:
      size = law.count(one)
      legs[size] = legs.get(size, 0) + one.steps * step_tokens(one.config)
    predicted[job.name] = float(mixing.chain_loss(law.values, list(legs.items()), law.gamma))
  return predicted


def chip_hours(jobs: Sequence[Job], on: Topology) -> dict[str, Hours]:
  """Return the chip-hours of the steps of each job, by its name.

  The step of each model is planned as by `plan --quick`. A teacher's forward pass takes the time of
  its FLOPs. Compilation, evaluations and checkpoints are not included.
  """
  known: list[tuple[Config, estimate.Plan]] = []
  hours = {}
  for job in jobs:
    if not job.steps:
      hours[job.name] = (0.0, 0.0)
      continue
    config = dataclasses.replace(job.config, distill=Config().distill, init_from='')
    config = sizes.fill_in(grid.with_train(config, drop_groups=0.0))
    planned = next((plan for other, plan in known if other.model == config.model), None)
    if planned is None:
      try:
        planned = estimate.plan(config, on, quick=on.has_compiler)
      except DoesNotFitError as error:
        raise estimate.advice(config, error, on) from error
      known.append((config, planned))
    work = job.size.flops_per_token / measure_size(config).flops_per_token
    low, high = (job.steps * work * step * on.chips / 3600 for step in planned.step_seconds)
    hours[job.name] = (low, high)
  return hours


def describe(
  jobs: Sequence[Job], apart: Sequence[Job], on: Topology | None, law: Law | None
) -> str:
  """Return the chip-hours and losses of the sizes as a table, and in all.

  Args:
    jobs: the runs of a family.
    apart: those of its sizes, each from scratch.
    on: the topology whose chip-hours are counted; None: none.
    law: the law that predicts losses; None: none.
  """
  rows, lines = [['size', 'run']], []
  hours = chip_hours([*jobs, *apart], on) if on else {}
  predicted = losses(jobs, law) if law else {}

  def total(some: Sequence[Job]) -> str:
    ends = [sum(side) for side in zip(*(hours[job.name] for job in some), strict=True)]
    low, high = (f'{value:,.0f}' if value >= 100 else f'{value:.3g}' for value in ends)
    return low if low == high else f'{low} … {high}'

  if on:
    rows[0] += ['chip-hours', 'chip-hours alone']
    where = on.name if on.slices == 1 else f'{on.slices} × {on.name}'
    lines.append(f'in all {total(jobs)} chip-hours on {where}')
    if [job.name for job in jobs] != [job.name for job in apart]:
      lines[-1] += f', and {total(apart)} for the sizes apart'
  if law:
    rows[0] += ['loss by the law']
    source = 'of the law' if law.measured else 'of docs/growth.md, because the law has none'
    lines.append(f'a growth costs what the mixing exponent {law.gamma:.3g} says, {source}')
  for job in sorted((job for job in jobs if job.final), key=lambda job: job.factor):
    row = [f'{job.factor:g}', job.name]
    if on:
      own = [other for other in jobs if other.factor == job.factor]
      row += [total(own), total(needed(jobs, job.factor))]
    if law:
      row += [f'{predicted[job.name]:.4f}' if job.name in predicted else '']
    rows.append(row)
  if law and any(job.stage == 'grow' for job in jobs):
    lines.append(_saving(jobs, apart, predicted, law))
  return f'{aligned(rows, left=(1,))}\n\n{"; ".join(lines)}'


def _saving(
  jobs: Sequence[Job], apart: Sequence[Job], predicted: dict[str, float], law: Law
) -> str:
  """Return what a bottom-up family costs beside its sizes from scratch to the same losses."""
  finals = {job.factor: predicted[job.name] for job in jobs if job.final}
  alone = sum(
    formulas.tokens_for_loss(law.values, law.count(job), finals[job.factor])
    * job.size.flops_per_token
    for job in apart
  )
  saved = 1 - sum(job.flops for job in jobs) / alone
  return (
    f'by the law the family costs {abs(saved):.0%} {"less" if saved >= 0 else "more"} than its '
    'sizes apart at equal loss'
  )
