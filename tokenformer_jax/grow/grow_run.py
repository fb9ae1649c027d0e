"""Read a run, grow it array by array, and write a run, whole or not at all."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from tokenformer_jax.config import GrowConfig
from tokenformer_jax.errors import TransientError, UserError, arg
from tokenformer_jax.grow.apply import Growth, Programs, Steps, return_freed_memory
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.runs import batches, checkpoint, claim, saved_config
from tokenformer_jax.runs.checkpoint import Checkpoints, Source
from tokenformer_jax.runs.checkpoint_meta import (
  Ancestor,
  Lineage,
  Meta,
  branch_of,
  new_run_id,
  with_births,
)
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths


def read(source: Source, mesh: Mesh) -> State:
  """Return the state of a run; each array is read directly to its devices.

  The mesh is the target's. An array of the source that it does not divide stays whole.
  """
  return source.restore(_abstract_state(source.meta, mesh))


def _abstract_state(meta: Meta, mesh: Mesh) -> State:
  """Return shapes and shardings of the state that `read` reads."""
  config, definition = meta.config, models.define(meta.config.model)
  return step_lib.abstract_state(mesh, definition, config.optim, ema=meta.has('ema'))


def read_and_grow(
  source: Source,
  mesh: Mesh,
  plan: Steps | Callable[[Params], Steps],
  config: GrowConfig,
  see: Callable[[Params], None] = lambda params: None,
) -> State:
  """Return the state of a run after some steps; their programs compile while the state is read.

  Arrays are made one after the other, each on its devices. An old array is freed as soon
  as the new ones exist, so both models are never in memory at once.

  Args:
    source: the checkpoint to read.
    mesh: of the new state.
    plan: the steps, or a function from the old parameters to them.
    config: see `Growth`.
    see: is called with the old parameters and, once they exist, with the new ones.
  """
  abstract = _abstract_state(source.meta, mesh)
  with concurrent.futures.ThreadPoolExecutor(1 + (os.cpu_count() or 1)) as pool:

    def compile_(steps: Steps, state: State) -> Programs:
      programs = Programs(Growth(source.meta.config.model, steps, config), mesh, pool)
      programs.compile(state)
      return programs

    early = None if callable(plan) else pool.submit(compile_, plan, abstract)
    old = source.restore(abstract)
    see(old['params'])
    steps = plan(old['params']) if callable(plan) else plan
    programs = early.result() if early else compile_(steps, old)
  return_freed_memory()
  return programs.run(old, see)


def read_params(source: Source, mesh: Mesh, abstract: Params) -> Params:
  """Return the parameters of a checkpoint that `abstract` lists, each whole on every device."""
  placed = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding.replicated(mesh)), abstract
  )
  return source.restore({'params': placed}, partial=True)['params']


def descend(
  meta: Meta, source: paths.Path, action: str, config: GrowConfig, **details: Any
) -> Lineage:
  """Return the lineage of a model made from a checkpoint; `details` are fields of `Ancestor`."""
  born = Ancestor(
    action=action,
    source=str(paths.absolute(source)),
    step=meta.step,
    model=meta.config.model,
    grow=config,
    updates=0 if config.step == 'restart' else meta.updates,
    flops=batches.flops_at_checkpoint(meta),
    tokens=batches.tokens_at_checkpoint(meta),
    branch_of=branch_of(meta),
    run=meta.run,
    **details,
  )
  return (*meta.lineage, born)


def check_target(target: paths.Path, source: paths.Path | None = None) -> None:
  """Check that a new work directory can be made; leave nothing behind."""
  try:
    _check_is_new(target)
    if source is not None and _lies_in(target, source):
      raise UserError(
        f'the target {target} lies in the source; choose a {arg.target} outside of it'
      )
    if paths.in_bucket(target):
      paths.make_writable(target)  # A bucket keeps no empty directory.
      return
    parents = pathlib.Path(target).absolute().parents
    parent = next(parent for parent in parents if os.path.lexists(parent))
    with tempfile.TemporaryDirectory(prefix='.probe-', dir=parent):
      pass
  except paths.errors(target) as error:
    if isinstance(error, (UserError, TransientError)):
      raise
    raise UserError(
      f'the target {target} cannot be made ({paths.reason(error)}); choose another {arg.target}'
    ) from error


def _lies_in(path: paths.Path, directory: paths.Path) -> bool:
  """Return whether a path is below a directory, after following links in a file system."""
  inner, outer = (os.fspath(p if paths.in_bucket(p) else p.resolve()) for p in (path, directory))
  return inner.startswith(f'{outer.rstrip("/")}/')


def _check_is_new(target: paths.Path) -> None:
  if target.exists():
    kind = '' if target.is_dir() else ' as a file'
    raise UserError(
      f'the target {target} exists{kind}; name a new directory, nothing is overwritten'
    )


def write(target: paths.Path, meta: Meta, state: Any) -> None:
  """Write a work directory with one checkpoint."""
  meta = dataclasses.replace(meta, run=meta.run or hosts.from_first(new_run_id))
  meta = with_births(meta, target)
  with alone(target), _whole_or_nothing(target) as partial:
    if hosts.is_first():
      partial.mkdir(parents=True, exist_ok=True)
      (partial / 'config.json').write_text(saved_config.to_text(meta.config))
    with contextlib.closing(Checkpoints(partial, keep=1)) as checkpoints:
      checkpoints.save(meta, state, wait=True)


@contextlib.contextmanager
def alone(target: paths.Path) -> Iterator[None]:
  """Keep other processes from writing the same target inside the `with` block."""
  with claim.hold(
    target.with_name(f'.{target.name}.claim'),
    f'the target {target}',
    f'name another {arg.target}',
    doing='being written',
    together=True,
    ends_process=True,
  ):
    _check_is_new(target)
    yield


@contextlib.contextmanager
def _whole_or_nothing(target: paths.Path) -> Iterator[paths.Path]:
  """Yield a directory that becomes the target, or is removed if the block raises.

  The directory has another name until everything is written. A bucket has no atomic rename, so
  there the directory is the target itself, and a checkpoint counts once its last object exists.
  """
  in_place = paths.in_bucket(target)
  partial = target if in_place else target.with_name(f'.{target.name}.partial')
  first, whole = hosts.is_first(), False
  if first and not in_place:
    paths.remove(partial)  # left by a growth that was killed
  hosts.meet('the old partial target is gone')
  try:
    yield partial
    hosts.meet('the target is written')
    if first and not in_place:
      os.rename(partial, target)
    whole = True
  except TransientError:
    raise
  except (paths.errors(target), UserError) as error:
    if hosts.is_loss(error):
      raise
    reason = checkpoint.one_line(error.__cause__ or error)
    raise UserError(
      f'{target} could not be written ({reason}); nothing is left of it; make room or choose '
      f'another {arg.target}'
    ) from error
  finally:
    if first and not whole:
      paths.remove(partial)
