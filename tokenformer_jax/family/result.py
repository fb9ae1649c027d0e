"""The figures of a family: sizes, tokens, FLOPs and losses; its table and its JSON file."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tokenformer_jax.errors import UserError
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family import make
from tokenformer_jax.family.jobs import Family, Job
from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.storage import paths

FILE = 'family.json'


@dataclasses.dataclass(frozen=True)
class Member:
  """One size of a finished family."""

  size: float  # the factor
  run: str  # its work directory, below that of the family
  parameters: int
  tokens: int  # those that its own run has seen; of a shrunken model not those of the teacher
  flops: float  # of the runs of this size; those of a family add up
  flops_alone: float  # of all runs that this size needs
  loss: float  # on held-out text, in nats a token


def members(jobs: Sequence[Job], out: str) -> list[Member]:
  """Return the sizes of a family whose jobs are all finished, in rising order.

  Raises:
    UserError: the last loss of a run is not finite.
  """
  found = [
    Member(
      size=job.factor,
      run=job.name,
      parameters=job.size.parameters,
      tokens=job.tokens,
      flops=sum(other.flops for other in jobs if other.factor == job.factor),
      flops_alone=sum(other.flops for other in jobs_lib.needed(jobs, job.factor)),
      loss=_loss(job, out),
    )
    for job in jobs
    if job.final
  ]
  return sorted(found, key=lambda member: member.size)


def _loss(job: Job, out: str) -> float:
  loss = make.loss(job, out)
  if loss is None:
    raise UserError(
      f'the last loss of {out}/{job.name} is not finite; lower config.optim.learning_rate, and '
      'choose another --out'
    )
  return loss


def table(found: Sequence[Member]) -> str:
  """Return the sizes as a table."""
  rows = [('size', 'run', 'parameters', 'tokens', 'FLOPs', 'FLOPs alone', 'loss')]
  rows += [
    (
      f'{one.size:g}',
      one.run,
      f'{one.parameters:,}',
      f'{one.tokens:,}',
      f'{one.flops:.3g}',
      f'{one.flops_alone:.3g}',
      f'{one.loss:.4f}',
    )
    for one in found
  ]
  return aligned(rows, left=(1,))


def totals(jobs: Sequence[Job], family: Family, apart: float) -> str:
  """Return the FLOPs of a family in all, as a part of those of its sizes apart."""
  spent = sum(job.flops for job in jobs)
  text = f'{len(family.sizes)} sizes by {family.way}: {spent:.3g} FLOPs'
  return text if family.way == 'apart' else f'{text}, {spent / apart:.1%} of {apart:.3g} apart'


def read(out: str, family: Family) -> dict[str, Any]:
  """Return the content of the JSON file in `out`; that of a new one if there is none.

  Raises:
    UserError: the file is of a family of other sizes or tokens, or has another form.
  """
  path = paths.parse_path(out) / FILE
  new = {
    'sizes': list(family.sizes),
    'tokens': family.tokens,
    'scale': family.scale,
    'ways': {},
  }
  if not paths.exists(path):
    return new
  try:
    found = json.loads(path.read_text())
    differing = [name for name in ('sizes', 'tokens', 'scale') if found[name] != new[name]]
    found['ways'].values()
  except (ValueError, TypeError, AttributeError, KeyError) as error:
    raise UserError(
      f'{path} is not a file that this command wrote; move it away, or choose another --out'
    ) from error
  for name in differing:
    raise UserError(
      f'{path} is of another family: {name} is {found[name]} there and {new[name]} here; choose '
      'another --out'
    )
  return found


def write(
  out: str, family: Family, apart: float, jobs: Sequence[Job], found: Sequence[Member]
) -> dict[str, Any]:
  """Add a way to the JSON file in `out`, and return all that it has."""
  content = read(out, family)
  content['ways'][family.way] = {
    'flops': sum(job.flops for job in jobs),
    'flops_apart': apart,
    'settings': {
      name: list(value) if isinstance(value, tuple | list) else value
      for name, value in dataclasses.asdict(family).items()
      if name not in (*content, 'way')
    },
    'sizes': [dataclasses.asdict(one) for one in found],
  }
  paths.replace(paths.parse_path(out) / FILE, json.dumps(content, indent=2) + '\n')
  return content
