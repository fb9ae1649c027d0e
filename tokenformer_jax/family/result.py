"""The figures of a family: sizes, tokens, FLOPs and losses; its table and its JSON file."""

import dataclasses
import itertools
import json
from collections.abc import Sequence

from tokenformer_jax.errors import UserError
from tokenformer_jax.family import make
from tokenformer_jax.family.jobs import Family, Job, needed
from tokenformer_jax.grow import payoff
from tokenformer_jax.model import flops
from tokenformer_jax.parallel.messages import aligned
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.storage import paths


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
  """Return the sizes of a family whose jobs are all finished, in rising order."""
  sizes = []
  for job in jobs:
    if not job.final:
      continue
    if (loss := make.loss(job, out)) is None:
      raise UserError(
        f'the last loss of {out}/{job.name} is not finite; lower config.optim.learning_rate, and '
        'choose another --out'
      )
    own = sum(other.flops for other in jobs if other.factor == job.factor)
    alone = sum(other.flops for other in needed(jobs, job.factor))
    parameters = job.size.parameters
    sizes.append(Member(job.factor, job.name, parameters, job.tokens, own, alone, loss))
  return sorted(sizes, key=lambda member: member.size)


def table(sizes: Sequence[Member]) -> str:
  """Return the sizes as a table."""
  rows = [('size', 'run', 'parameters', 'tokens', 'FLOPs', 'FLOPs alone', 'loss')]
  for one in sizes:
    counts = f'{one.parameters:,}', f'{one.tokens:,}'
    spent = f'{one.flops:.3g}', f'{one.flops_alone:.3g}'
    rows.append((f'{one.size:g}', one.run, *counts, *spent, f'{one.loss:.4f}'))
  return aligned(rows, left=(1,))


def totals(jobs: Sequence[Job], family: Family, apart: float) -> str:
  """Return the FLOPs of a family in all, as a share of those of its sizes apart."""
  spent = sum(job.flops for job in jobs)
  text = f'{len(family.sizes)} sizes by {family.method}: {spent:.3g} FLOPs'
  return text if family.method == 'apart' else f'{text}, {spent / apart:.1%} of {apart:.3g} apart'


def will_it_pay(jobs: Sequence[Job], family: Family) -> str:
  """Return whether a family is expected to pay against its sizes apart, at equal losses."""
  if family.method != 'bottom_up':
    return 'will it pay? docs/growth_trials.md has what each method saved; the law is of bottom_up'
  chains = [_chain(jobs, job.factor) for job in jobs if job.final]
  return payoff.render_family(chains, sum(job.flops for job in jobs))


def _chain(jobs: Sequence[Job], factor: float) -> list[payoff.Leg]:
  """Return the sizes on the way to a size of a bottom-up family, each with its tokens."""
  legs = []
  for _, same in itertools.groupby(needed(jobs, factor), key=lambda job: job.factor):
    runs = [*same]
    tokens = sum(run.steps * run.config.data.units_per_step for run in runs)
    parameters = flops.matrix_parameters(complete(runs[0].config).model)
    legs.append(payoff.Leg(runs[0].size.flops_per_token, tokens, parameters))
  return legs


def write(
  out: str, family: Family, apart: float, jobs: Sequence[Job], sizes: Sequence[Member]
) -> paths.Path:
  """Write the figures of a method to METHOD.json in `out`; `apart` is the FLOPs from scratch."""
  path = paths.parse_path(out) / f'{family.method}.json'
  content = {
    'flops': sum(job.flops for job in jobs),
    'flops_apart': apart,
    'family': dataclasses.asdict(family),
    'sizes': [dataclasses.asdict(one) for one in sizes],
  }
  paths.overwrite(path, json.dumps(content, indent=2) + '\n')
  return path
