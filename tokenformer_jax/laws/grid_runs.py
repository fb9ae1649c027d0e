"""Make the runs of a grid that are missing, or write the commands that make them."""

import dataclasses
import itertools
import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from tokenformer_jax.config import Config, differences
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.laws.grid import Job, with_train
from tokenformer_jax.laws.runs import Size, is_finished, last_losses, step_tokens
from tokenformer_jax.model import flops
from tokenformer_jax.parallel.messages import aligned, say
from tokenformer_jax.runs import metrics, saved_config
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop, sizes

AnyJob = TypeVar('AnyJob', bound=Job)
_MFU = 0.3  # a guess, for devices whose peak is published


@dataclasses.dataclass(frozen=True)
class Progress:
  """The state of the runs of a grid."""

  done: list[bool]  # whether each job is finished
  seconds: list[float | None]  # the time of each job's steps; None: not known
  measured: int  # jobs whose time is from measured steps of the same size


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


def progress(
  jobs: Sequence[AnyJob], out: str, done: Callable[[AnyJob, str], bool] = is_done
) -> Progress:
  """Compare the jobs with the runs in the directory of the grid.

  Steps of a size without measurement count as fast in FLOPs as those of the nearest measured size.
  `done` says whether a job is finished.
  """
  speeds = {job.size: seconds for job in jobs if (seconds := _measured(job, out))}
  steps = [speeds[job.size] if job.size in speeds else _guess(job, speeds) for job in jobs]
  times = [each and job.steps * each for job, each in zip(jobs, steps, strict=True)]
  finished = [done(job, out) for job in jobs]
  _check_branch_points(jobs, finished, out)
  return Progress(finished, times, sum(job.size in speeds for job in jobs))


def _check_branch_points(jobs: Sequence[Job], finished: Sequence[bool], out: str) -> None:
  """Check that stable runs have not passed the steps at which missing branches begin."""
  pairs = itertools.pairwise(zip(jobs, finished, strict=True))
  for (stable, made), (branch, decayed) in pairs:
    if stable.stage != 'stable' or made or decayed:
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
  wanted = sizes.fill_in(job.config)
  if job.stage == 'stable':  # Its length grows from part to part.
    wanted = with_train(wanted, steps=stored.train.steps)
    wanted = with_train(wanted, keep_checkpoints=stored.train.keep_checkpoints)
  for path, here, there in differences(wanted, stored):
    raise UserError(
      f'{workdir} is a run with another config: {path} is {there} there and {here} here; choose '
      'another --out, or the same config'
    )


def _measured(job: Job, out: str) -> float | None:
  """Return the median time of a step of a run of the same size, or None.

  An even number of times has the lower median, because the first time includes compilation.
  """
  workdir = paths.parse_path(out) / job.name
  found = sorted(
    line['perf/step_seconds'] for line in read_figures(workdir) if line.get('perf/step_seconds')
  )
  return found[(len(found) - 1) // 2] if found else None


def _guess(job: Job, speeds: Mapping[Size, float]) -> float | None:
  """Return a rough time of a step of a job on the devices of this process, or None.

  `speeds` holds the time of a step of each measured size; all sizes have the same batch.
  """
  work = job.size.flops_per_token
  if speeds:
    near = min(speeds, key=lambda size: abs(math.log(size.flops_per_token / work)))
    return speeds[near] * work / near.flops_per_token
  devices = jax.devices()
  if peak := flops.peak_flops(devices[0]):
    return step_tokens(job.config) * work / (peak * len(devices) * _MFU)
  return None


def train(job: Job, out: str) -> bool:
  """Train a job to its end, or until a signal stops it; return whether it is finished."""
  _, stopped = loop.train_or_stop(job.config, paths.parse_path(out) / job.name)
  return not stopped


def make_missing(
  jobs: Sequence[AnyJob],
  out: str,
  make: Callable[[AnyJob, str], bool] = train,
  done: Callable[[AnyJob, str], bool] = is_done,
) -> bool:
  """Make the jobs that are not finished, in order; return whether all are finished now.

  After each, print an estimate for the others: the time of their steps, and for each the mean time
  that the jobs so far took besides their steps.

  Args:
    jobs: each after those that it starts from.
    out: the directory of the runs.
    make: makes a job, and returns whether it is finished.
    done: returns whether a job is finished.
  """
  total, besides = len(jobs), []
  for number, job in enumerate(jobs, start=1):
    if done(job, out):
      continue
    say(f'run {number} of {total}: {job.name} ({job.stage}), to {job.tokens:,} tokens')
    begin = time.monotonic()
    if not make(job, out):
      return False
    took, found = time.monotonic() - begin, progress(jobs, out, done)
    besides.append(max(0.0, took - (found.seconds[number - 1] or took)))
    if left := [
      seconds for seconds, done_now in zip(found.seconds, found.done, strict=True) if not done_now
    ]:
      each = sum(besides) / len(besides)
      say(
        f'{job.name} took {hours(took)}; {counted(len(left), "run")} left, about '
        f'{hours(sum(each + (seconds or 0.0) for seconds in left))}'
      )
    jax.clear_caches()  # Each run has programs of its own.
  return True


def commands(jobs: Iterable[Job], base: Config, arguments: Sequence[str], train: str, out: str):
  """Return a command line for each size; those of different sizes may run at the same time.

  `arguments` are `--config=…` and the changes to it, as the user gave them, and `base` the config
  that they name. `train` is the command that trains.
  """
  lines = []
  for _, equal in itertools.groupby(jobs, lambda job: job.name.partition('/')[0]):
    lines.append(' && '.join(_command(job, base, arguments, train, out) for job in equal))
  return lines


def _command(job: Job, base: Config, arguments: Sequence[str], train: str, out: str) -> str:
  changes = [f'--config.{path}={value}' for path, value in changed_keys(job.config, base).items()]
  return f'{train} {shlex.join([*arguments, *changes, f"--workdir={out}/{job.name}"])}'


def changed_keys(config: Config, base: Config) -> dict[str, str]:
  """Return the keys, with values as text, whose change turns `base` into a config."""
  return {path: _as_flag(value) for path, value, _ in differences(config, base)}


def _as_flag(value: Any) -> str:
  if isinstance(value, tuple):
    return ','.join(value)
  return str(value).lower() if isinstance(value, bool) else str(value)


def hours(seconds: float) -> str:
  """Return a time as `H:MM:SS`."""
  whole = math.ceil(seconds)
  return f'{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}'


def listing(jobs: Sequence[Job], found: Progress) -> str:
  """Return a table of the jobs of a grid, with totals of the unfinished ones."""
  points = sum(job.stage != 'stable' for job in jobs)
  distinct = len({job.size for job in jobs})
  return (
    f'{table(jobs, found)}\n\n{points} points of a law, of {distinct} sizes; '
    f'{describe_progress(jobs, found)}'
  )


def table(jobs: Sequence[Job], found: Progress) -> str:
  """Return a table of the jobs: their sizes, tokens, FLOPs and times."""
  rows = [('run', 'part', 'parameters', 'tokens', 'a param.', 'FLOPs', 'time')]
  for job, done, seconds in zip(jobs, found.done, found.seconds, strict=True):
    rows.append(
      (
        job.name,
        job.stage,
        f'{job.size.parameters:,}',
        f'{job.tokens:,}',
        f'{job.tokens / job.size.parameters:,.3g}',
        f'{job.flops:.3g}',
        'finished' if done else 'not measured' if seconds is None else hours(seconds),
      )
    )
  return aligned(rows, left=(0, 1))


def describe_progress(jobs: Sequence[Job], found: Progress) -> str:
  """Return how many jobs are finished, and the FLOPs and the time of the others."""
  left = [i for i, done in enumerate(found.done) if not done]
  text = f'{len(jobs) - len(left)} jobs are finished'
  if not left:
    return text
  flops_left = sum(jobs[i].flops for i in left)
  text += f', {len(left)} are left: {flops_left:.3g} FLOPs'
  if any(found.seconds[i] is None for i in left):
    return f'{text}; the first run measures how long they take'
  if not found.measured:
    basis = f'a guess, {_MFU:.0%} of the peak'
  else:
    basis = 'by the steps measured here'
    basis += '' if found.measured == len(jobs) else ', of some sizes'
  seconds = hours(sum(found.seconds[i] or 0.0 for i in left))
  return f'{text}, {seconds} ({basis}), besides compiling, evaluating and saving'
