"""Make the runs of a family: train them, or make them from other runs and measure them."""

import contextlib
import dataclasses

import jax

from tokenformer_jax.config import Config, differences
from tokenformer_jax.errors import UserError
from tokenformer_jax.family.jobs import Job
from tokenformer_jax.grow.actions import ACTIONS
from tokenformer_jax.grow.derivation import Parent
from tokenformer_jax.laws import grid, grid_runs
from tokenformer_jax.laws.runs import is_finished, last_losses
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.runs import saved_config
from tokenformer_jax.runs.metrics import Metrics
from tokenformer_jax.storage import paths
from tokenformer_jax.training import loop


def is_done(job: Job, out: str) -> bool:
  """Return whether a job is finished; a final model also has a loss on held-out text."""
  if job.action is None:
    return grid_runs.is_done(job, out)
  return _is_made(job, out) and (not job.final or loss(job, out) is not None)


def _is_made(job: Job, out: str) -> bool:
  """Return whether the action of a job has written its run, measured or not."""
  workdir = paths.parse_path(out) / job.name
  if not is_finished(workdir, job.config.train.steps):
    return False
  stored = saved_config.read(workdir / 'config.json', 'choose another --out')
  for path, here, there in differences(complete(job.config).model, stored.model, 'model.'):
    raise UserError(
      f'{workdir} is another model: {path} is {there} there and {here} here; choose another --out, '
      'or the same config'
    )
  return True


def loss(job: Job, out: str) -> float | None:
  """Return the last loss of a job on held-out text in nats a token; None if it has none."""
  figures = grid_runs.read_figures(paths.parse_path(out) / job.name)
  losses = last_losses(figures, job.config.train.steps)
  return losses[-1] if losses else None


def make(job: Job, out: str) -> bool:
  """Make a job, as far as it is not finished; return whether it is now."""
  if job.action is None:
    return grid_runs.train(job, out)
  workdir = paths.parse_path(out) / job.name
  if not _is_made(job, out):
    source = Parent(f'{out}/{job.action.source}')
    ACTIONS[job.action.name](source, workdir, **job.action.arguments)
  if job.final:
    _measure(workdir)
  return True


def _measure(workdir: paths.Path) -> None:
  """Evaluate the model of a run as training does, and write the figures to its metrics."""
  config = saved_config.read(workdir / 'config.json', 'make the run again')
  # How the source was trained has no meaning for a model of one size that does not train.
  config = grid.with_train(dataclasses.replace(config, distill=Config().distill), nested_rows=0)
  trainer, state, step = loop.begin(config, workdir)
  with jax.set_mesh(trainer.mesh), contextlib.closing(trainer.checkpoints):
    figures = trainer.evaluate(state)
  with contextlib.closing(Metrics(workdir, first_step=step, steps=step)) as metrics:
    metrics.write(step, figures)
