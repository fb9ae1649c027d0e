"""Make the runs of a grid that are missing, or write the commands that make them."""

import dataclasses
import itertools
import math
import shlex
from collections.abc import Iterable, Sequence

import jax

from tokenformer_jax.config import Config, differences
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws.grid import Job, with_train
from tokenformer_jax.laws.runs import is_finished, last_losses, tokens_of_step
from tokenformer_jax.messages import aligned, say
from tokenformer_jax.model import flops
from tokenformer_jax.runs import metrics, saved_config
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop, sizes

# A guess of the speed of devices without a published peak, such as CPUs.
_STEP_SECONDS, _FLOPS_PER_SECOND = 5e-3, 1e10
_MFU = 0.3  # a guess, where the peak is published


@dataclasses.dataclass(frozen=True)
class Progress:
  """The state of the runs of a grid.

  Attributes:
    done: for each job, whether it is finished.
    seconds: for each job, a guess of its time.
    measured: the number of jobs whose guess is from measured steps of the same size.
  """

  done: list[bool]
  seconds: list[float]
  measured: int


def progress(jobs: Sequence[Job], out: str) -> Progress:
  """Compare the jobs with what the directory of the grid holds.

  Raises:
    UserError: a run there has another config than its job.
  """
  done = [is_done(job, out) for job in jobs]
  speeds = {job.size: seconds for job in jobs if (seconds := _measured(job, out))}
  guesses = [job.steps * speeds.get(job.size, _guess(job)) for job in jobs]
  return Progress(done, guesses, sum(job.size in speeds for job in jobs))


def is_done(job: Job, out: str) -> bool:
  """Return whether the run of a job is finished.

  Raises:
    UserError: the run there has another config.
  """
  workdir = paths.parse_path(out) / job.name
  if not (workdir / 'config.json').exists():
    return False
  stored = saved_config.read(workdir / 'config.json', 'choose another --out')
  _check_same(job, stored, workdir)
  steps = job.config.train.steps
  saved = is_finished(workdir, steps)  # An evaluation is lost if the save after it fails.
  if not saved or job.stage == 'stable':
    return saved
  return bool(last_losses(_figures(workdir), steps))


def _figures(workdir: paths.Path) -> list[dict[str, float]]:
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
  for one in differences(wanted, stored):
    raise UserError(
      f'{workdir} is a run with another config: {one.path} is {one.theirs} there and {one.ours} '
      'here; choose another --out, or the same config'
    )


def _measured(job: Job, out: str) -> float | None:
  """Return the median time of a step of a run of the same size, or None."""
  workdir = paths.parse_path(out) / job.name
  found = sorted(
    line['perf/step_seconds'] for line in _figures(workdir) if line.get('perf/step_seconds')
  )
  return found[len(found) // 2] if found else None


def _guess(job: Job) -> float:
  """Return a rough time of a step on the devices of this process."""
  each = tokens_of_step(job.config) * job.size.flops_per_token
  devices = jax.devices()
  if peak := flops.peak_flops(devices[0]):
    return each / (peak * len(devices) * _MFU)
  return _STEP_SECONDS + each / _FLOPS_PER_SECOND


def train_missing(jobs: Sequence[Job], out: str) -> bool:
  """Train the jobs that are not finished, in order; return whether all are finished now."""
  total = len(jobs)
  for number, job in enumerate(jobs, start=1):
    if is_done(job, out):
      continue
    say(f'run {number} of {total}: {job.name} ({job.stage}), to {job.tokens:,} tokens')
    _, stopped = loop.train_or_stop(job.config, paths.parse_path(out) / job.name)
    if stopped:
      return False
    jax.clear_caches()  # Each run has programs of its own.
  return True


def commands(jobs: Iterable[Job], base: Config, arguments: Sequence[str], train: str, out: str):
  """Return a command line for each size; those of different sizes may run at the same time.

  Args:
    jobs: the jobs to run.
    base: the config that the arguments name.
    arguments: `--config=…` and the changes to it, as the user gave them.
    train: the command that trains.
    out: the directory of the grid.
  """
  lines = []
  for _, group in itertools.groupby(jobs, lambda job: job.name.partition('/')[0]):
    lines.append(' && '.join(_command(job, base, arguments, train, out) for job in group))
  return lines


def _command(job: Job, base: Config, arguments: Sequence[str], train: str, out: str) -> str:
  changes = [f'--config.{path}={value}' for path, value in changed_keys(job.config, base).items()]
  return f'{train} {shlex.join([*arguments, *changes, f"--workdir={out}/{job.name}"])}'


def changed_keys(config: Config, base: Config) -> dict[str, str]:
  """Return the keys to set on the base to get a config, as text."""
  return {one.path: _text(one.ours) for one in differences(config, base)}


def _text(value: object) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def hours(seconds: float) -> str:
  """Return a time as `H:MM:SS`."""
  whole = math.ceil(seconds)
  return f'{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}'


def listing(jobs: Sequence[Job], found: Progress) -> str:
  """Return a table of the jobs, with totals of what is left."""
  rows = [('run', 'part', 'parameters', 'without emb.', 'tokens', 'a param.', 'FLOPs', 'time')]
  for job, done, seconds in zip(jobs, found.done, found.seconds, strict=True):
    rows.append(
      (
        job.name,
        job.stage,
        f'{job.size.parameters:,}',
        f'{job.size.without_embeddings:,}',
        f'{job.tokens:,}',
        f'{job.tokens / job.size.parameters:,.3g}',
        f'{job.flops:.3g}',
        'finished' if done else hours(seconds),
      )
    )
  return f'{aligned(rows, left=(0, 1))}\n\n{_totals(jobs, found)}'


def _totals(jobs: Sequence[Job], found: Progress) -> str:
  left = [i for i, done in enumerate(found.done) if not done]
  points = sum(job.stage != 'stable' for job in jobs)
  sizes_of = len({job.size for job in jobs})
  text = f'{points} points of a law, of {sizes_of} sizes; {len(jobs) - len(left)} jobs are finished'
  if not left:
    return text
  flops_left = sum(jobs[i].flops for i in left)
  seconds = sum(found.seconds[i] for i in left)
  basis = 'by the steps measured here' if found.measured == len(jobs) else 'a guess'
  return f'{text}, {len(left)} are left: {flops_left:.3g} FLOPs, {hours(seconds)} ({basis})'
