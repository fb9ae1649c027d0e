"""Make the runs of a grid that are missing."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from tokenformer_jax.config import Config, differences
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.laws.grid import Job, with_train
from tokenformer_jax.laws.runs import is_finished, last_losses
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import metrics, saved_config
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop

AnyJob = TypeVar('AnyJob', bound=Job)
IsDone = Callable[[AnyJob, str], bool]  # whether a job in a directory is finished


def is_done(job: Job, out: str) -> bool:
  """Return whether the run of a job is finished."""
  workdir = paths.parse_path(out) / job.name
  if not (workdir / 'config.json').exists():
    return False
  stored = saved_config.read(workdir / 'config.json', 'choose another --out')
  _check_same(job, stored, workdir)
  steps = job.config.train.steps
  saved = is_finished(workdir, steps)  # An evaluation is lost if the save after it fails.
  if not saved or job.stage == 'stable':
    return saved
  return bool(last_losses(read_figures(workdir), steps))


def finished(jobs: Sequence[AnyJob], out: str, done: IsDone[AnyJob] = is_done) -> list[bool]:
  """Return whether each job has finished in the directory of the grid."""
  made = [done(job, out) for job in jobs]
  _check_branch_points(jobs, made, out)
  return made


def _check_branch_points(jobs: Sequence[Job], made: Sequence[bool], out: str) -> None:
  """Check that stable runs have not passed the steps at which missing branches begin."""
  pairs = itertools.pairwise(zip(jobs, made, strict=True))
  for (stable, is_made), (branch, is_decayed) in pairs:
    if stable.stage != 'stable' or is_made or is_decayed:
      continue
    workdir, begin = paths.parse_path(out) / stable.name, stable.config.train.steps
    newest = max(paths.steps(workdir / 'checkpoints'), default=0)
    if newest > begin:
      raise UserError(
        f'--lengths has {branch.tokens:,} tokens, whose decay begins at step {begin:,}, but '
        f'{workdir} is at step {newest:,} and kept no checkpoint there; ask for lengths whose '
        'decay begins later, or choose another --out'
      )


def read_figures(workdir: paths.Path) -> list[dict[str, float]]:
  """Return the lines of a run's metrics.jsonl; none if there is no such file."""
  try:
    return metrics.read(workdir)
  except FileNotFoundError:
    return []


def _check_same(job: Job, stored: Config, workdir: paths.Path) -> None:
  wanted = complete(job.config)
  if job.stage == 'stable':  # Its length grows.
    wanted = with_train(wanted, steps=stored.train.steps)
    wanted = with_train(wanted, keep_checkpoints=stored.train.keep_checkpoints)
  for path, here, there in differences(wanted, stored):
    raise UserError(
      f'{workdir} is a run with another config: {path} is {there} there and {here} here; choose '
      'another --out, or the same config'
    )


def train(job: Job, out: str) -> bool:
  """Train a job to its end, or until a signal stops it; return whether it is finished."""
  _, stopped = loop.train_or_stop(job.config, paths.parse_path(out) / job.name)
  return not stopped


def make_missing(
  jobs: Sequence[AnyJob],
  out: str,
  make: IsDone[AnyJob] = train,
  done: IsDone[AnyJob] = is_done,
) -> bool:
  """Make the jobs that are not finished, in order; return whether all are finished now.

  Each job comes after those that it starts from. After each, estimate the time of the others by
  their FLOPs. `make` makes a job, and returns whether it is finished.
  """
  begin, spent = time.monotonic(), 0.0
  for number, job in enumerate(jobs):
    if done(job, out):
      continue
    say(f'run {number + 1} of {len(jobs)}: {job.name} ({job.stage}), to {job.tokens:,} tokens')
    if not make(job, out):
      return False
    spent += job.flops
    if (left := [other for other in jobs[number + 1 :] if not done(other, out)]) and spent:
      seconds = (time.monotonic() - begin) * sum(other.flops for other in left) / spent
      say(f'{counted(len(left), "run")} left, about {hours(seconds)}')
    jax.clear_caches()  # Each run has programs of its own.
  return True


def hours(seconds: float) -> str:
  """Return a time as `H:MM:SS`."""
  whole = math.ceil(seconds)
  return f'{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}'


def table(jobs: Sequence[Job], made: Sequence[bool]) -> str:
  """Return a table of the jobs, their sizes, tokens and FLOPs, and the FLOPs that are left."""
  rows = [('run', 'stage', 'parameters', 'tokens', 'a param.', 'FLOPs', '')]
  for job, is_made in zip(jobs, made, strict=True):
    rows.append(
      (
        job.name,
        job.stage,
        f'{job.size.parameters:,}',
        f'{job.tokens:,}',
        f'{job.tokens / job.size.parameters:,.3g}',
        f'{job.flops:.3g}',
        'finished' if is_made else '',
      )
    )
  left = sum(job.flops for job, is_made in zip(jobs, made, strict=True) if not is_made)
  return f'{aligned(rows, left=(0, 1))}\n\n{sum(made)} jobs are finished; {left:.3g} FLOPs are left'
