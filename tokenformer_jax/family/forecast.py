"""Forecast a family before its runs: chip-hours by the planner, and losses by a law."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.family import growths
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family.jobs import Job
from tokenformer_jax.laws import formulas, grid, mixing
from tokenformer_jax.laws.runs import measure_size, step_tokens
from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.plan import estimate
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError
from tokenformer_jax.training import sizes

Hours = tuple[float, float]  # the least and the most

_LAW = ('E', 'A', 'B', 'alpha', 'beta')


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

  def count_of(self, job: Job) -> float:
    """Return the parameters of a job's model.

    For a mixture of experts they are those of the dense model with the same loss: N (M/N)^(γ/α).
    """
    active, whole = job.size.active, job.size.parameters
    return active * (whole / active) ** (self.experts and self.experts / self.values['alpha'])


def read_law(path: str) -> Law:
  """Return the law in the JSON file of `laws`.

  Raises:
    UserError: the file cannot be read, or is another one.
  """
  try:
    with open(path, encoding='utf-8') as file:
      content = json.load(file)
    values = {name: np.float64(content[name]) for name in _LAW}
    found = content.get('mixing')
    gamma = mixing.TYPICAL if found is None else float(found['value'])
    experts = float(content.get('gamma', 0))
    return Law(values, experts, gamma, found is not None)
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
  by_name, found = {job.name: job for job in jobs}, {}
  for job in jobs:
    path = [job]
    while path[0].needs:
      path.insert(0, by_name[path[0].needs[0]])
    if job.final and not any(one.action or one.stage == 'elastic' for one in path):
      found[job.name] = float(mixing.chain_loss(law.values, _legs(path, law), law.gamma))
  return found


def _legs(path: Sequence[Job], law: Law) -> list[tuple[float, float]]:
  """Return the sizes on the way to a model, and the tokens trained at each."""
  found: dict[float, float] = {}
  for job in path:
    size = law.count_of(job)
    found[size] = found.get(size, 0) + job.steps * step_tokens(job.config)
  return list(found.items())


def chip_hours(jobs: Sequence[Job], on: Topology) -> dict[str, Hours]:
  """Return the chip-hours of the steps of each job, by its name.

  The step of each model is planned as by `plan --quick`. A teacher's forward pass takes the time of
  its FLOPs. Compilation, evaluations and checkpoints are not included.

  Raises:
    UserError: a model does not fit the topology, or its compiler is missing.
  """
  known: list[tuple[Config, estimate.Plan]] = []
  found = {}
  for job in jobs:
    if not job.steps:
      found[job.name] = (0.0, 0.0)
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
    hours = [job.steps * work * seconds * on.chips / 3600 for seconds in planned.step_seconds]
    found[job.name] = (hours[0], hours[1])
  return found


def describe(
  jobs: Sequence[Job], apart: Sequence[Job], on: Topology | None, law: Law | None
) -> str:
  """Return the chip-hours and losses of the sizes as a table, and in all.

  Args:
    jobs: the runs of a family.
    apart: those of its sizes, each from scratch.
    on: the topology whose chip-hours are counted; None: none.
    law: the law that predicts losses; None: none.

  Raises:
    UserError: see `chip_hours`.
  """
  rows, lines, more = [['size', 'run']], [], ''
  hours = chip_hours([*jobs, *apart], on) if on else None
  found = losses(jobs, law) if law else None
  if hours is not None:
    rows[0] += ['chip-hours', 'chip-hours alone']
    where = on.name if on.slices == 1 else f'{on.slices} × {on.name}'
    lines.append(f'in all {_total(hours, jobs)} chip-hours on {where}')
    if [job.name for job in jobs] != [job.name for job in apart]:
      lines[-1] += f', and {_total(hours, apart)} for the sizes apart'
  if found is not None:
    rows[0] += ['loss by the law']
    source = 'of the law' if law.measured else 'of docs/growth.md, because the law has none'
    lines.append(f'a growth costs what the mixing exponent {law.gamma:.3g} says, {source}')
    if any(job.stage == 'grow' for job in jobs):
      counts = [law.count_of(job) for job in apart]
      more = f'\n{growths.describe(jobs, counts, law.values, law.gamma)}'
  for job in sorted((job for job in jobs if job.final), key=lambda job: job.factor):
    row = [f'{job.factor:g}', job.name]
    if hours is not None:
      own = [other for other in jobs if other.factor == job.factor]
      row += [_total(hours, own), _total(hours, jobs_lib.needed(jobs, job.factor))]
    if found is not None:
      row += [f'{found[job.name]:.4f}' if job.name in found else '']
    rows.append(row)
  return f'{aligned(rows, left=(1,))}\n\n{"; ".join(lines)}{more}'


def _total(hours: Mapping[str, Hours], jobs: Sequence[Job]) -> str:
  ends = [sum(side) for side in zip(*(hours[job.name] for job in jobs), strict=True)]
  low, high = (f'{value:,.0f}' if value >= 100 else f'{value:.3g}' for value in ends)
  return low if low == high else f'{low} … {high}'
