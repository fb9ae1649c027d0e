"""Make one run from another: open the source, check memory and disk, write the target.

The actions of growth are in `actions.py`. A target is written whole or not at all.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from tokenformer_jax.config import Config, GrowConfig, MeshConfig, ModelConfig, OptimConfig
from tokenformer_jax.decoding import buckets
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import files, room, table, verify
from tokenformer_jax.model import flops, models
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import Batch

_MEASURED = range(16)  # the held-out examples that a loss is measured on


@dataclasses.dataclass(frozen=True)
class Source:
  """The open checkpoint that an action starts from, and the mesh that it runs on."""

  directory: paths.Path
  checkpoints: checkpoint.Checkpoints
  meta: Meta
  mesh: Mesh
  mesh_config: MeshConfig

  @property
  def model(self) -> ModelConfig:
    return self.meta.config.model


@dataclasses.dataclass(frozen=True)
class Target:
  """The new work directory of an action.

  Attributes:
    directory: its path.
    dry_run: whether to stop before anything is read or written.
    show: prints the table of changes.
  """

  directory: paths.Path
  dry_run: bool = False
  show: Callable[[str], None] = messages.say


@contextlib.contextmanager
def open_source(
  source: str, target: Target, mesh_config: MeshConfig | None = None
) -> Iterator[Source]:
  """Check that the target can be made, and open the source, DIR or DIR@STEP.

  Without a mesh, use the source's if it fits the devices here, else all devices.

  Raises:
    UserError: there is no such run, it holds no model, the target exists or cannot be made, or the
      mesh does not fit the devices.
  """
  directory, step = paths.split_source(source)
  if not target.dry_run:
    files.check_target(target.directory, directory)
  here = sharding.find_devices()
  checkpoints, meta = checkpoint.open_source(directory, step)
  checkpoint.check_is_model(meta, directory)
  with contextlib.closing(checkpoints):
    mesh, mesh_config = _mesh(mesh_config, meta.config.mesh, here)
    yield Source(directory, checkpoints, meta, mesh, mesh_config)


def _mesh(
  asked: MeshConfig | None, source: MeshConfig, devices: list[jax.Device]
) -> tuple[Mesh, MeshConfig]:
  if asked is not None:
    return sharding.make_mesh(asked, devices), asked
  try:
    return sharding.make_mesh(source, devices), source
  except UserError:
    return sharding.make_mesh(MeshConfig(), devices), source


def rewrite(
  source: Source,
  target: Target,
  config: GrowConfig,
  action: str,
  after: ModelConfig,
  change: Callable[[State], State],
  *,
  measured: range = _MEASURED,
  optim: OptimConfig | None = None,
  advice: bool = False,
  **details: Any,
) -> int | None:
  """Write a run whose state is a function of the source's; report what changes, and the loss.

  Args:
    source: the run.
    target: the new work directory.
    config: how `change` treats moments and step.
    action: the name of the action in the lineage.
    after: the model of the new state.
    change: makes the new state.
    measured: the held-out examples that the loss is measured on; empty if both models are equal.
    optim: the optimizer's settings of the new run; None: the source's.
    advice: whether to advise on the counts of tokens, where the user chooses them.
    **details: fields of the new entry of the lineage.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: there is no room, or the new model's outputs are not finite.
  """
  before = source.model
  if after != before:
    show_table(source, after, target, advice=advice)
  check_room(source, after, config, target, held=(after,) if after == before else (before, after))
  if target.dry_run:
    return None
  if not measured:
    new = change(files.read(source.checkpoints, source.meta, source.mesh))
    return write(source, target, config, action, after, new, optim, **details)
  batch, name = held_out(source, len(measured), first=measured.start)
  compute = compile_outputs(source, before, batch)
  recompute = compute if after == before else compile_outputs(source, after, batch)
  old = files.read(source.checkpoints, source.meta, source.mesh)
  computed = compute(old['params'])
  new = change(old)
  verify.report(computed, recompute(new['params']), name, exact=False)
  return write(source, target, config, action, after, new, optim, **details)


def show_table(source: Source, after: ModelConfig, target: Target, *, advice: bool = False) -> None:
  """Print the table of changes, and advice; check that the mesh divides the new model."""
  config = source.meta.config
  target.show(table.render(source.model, after, flops.length(config), config.optim))
  for line in table.advice(after) if advice else ():
    messages.say(line)
  definition = models.define(after)
  sharding.check_divides(source.mesh, definition.abstract, definition.axes)
  sizes = dataclasses.astuple(source.mesh_config)
  if -1 not in sizes:
    planned = sharding.abstract_mesh(source.mesh_config, math.prod(sizes))
    sharding.check_divides(planned, definition.abstract, definition.axes)


def check_room(
  source: Source,
  after: ModelConfig,
  config: GrowConfig,
  target: Target,
  held: Sequence[ModelConfig],
) -> None:
  """Check the memory for the models in `held`, which exist at once, and the target's disk."""
  optim = source.meta.config.optim
  kept = room.part_kept(source.model, after, optim, config.moments)
  try:
    room.check_memory(source.mesh, held, optim, ema=checkpoint.has(source.meta, 'ema'))
  except UserError as error:
    if not target.dry_run:
      raise
    messages.say(f'without --dry_run this would end here: {error}')
  if not target.dry_run:
    room.check_disk(target.directory, source.meta, source.directory, kept)


def held_out(source: Source, examples: int, first: int = 0) -> tuple[Batch, str]:
  """Return held-out examples and their name; round their number up to what the mesh divides."""
  rounded = [buckets.rows(count, source.mesh) for count in (examples, first)]
  task = verify.exact_task(source.meta.config, source.model)
  return task.held_out(source.meta.tokenizer, *rounded)


def compile_outputs(
  source: Source, model: ModelConfig, batch: Batch
) -> Callable[[Params], verify.Outputs]:
  """Return the function from parameters of a model to its outputs on a batch."""
  return verify.program(verify.exact_task(source.meta.config, model), batch, source.mesh)


def new_config(
  source: Source, model: ModelConfig, config: GrowConfig, optim: OptimConfig | None = None
) -> Config:
  """Return the config of a new run: the source's, with this model, growth and optimizer."""
  old = source.meta.config
  return dataclasses.replace(
    old,
    model=model,
    optim=optim or old.optim,
    grow=config,
    mesh=source.mesh_config,
    init_from='',
  )


def write(
  source: Source,
  target: Target,
  config: GrowConfig,
  action: str,
  model: ModelConfig,
  new: State,
  optim: OptimConfig | None = None,
  **details: Any,
) -> int:
  """Write the new state as a run; return its step. For the arguments see `rewrite`."""
  step = int(new['step'])
  files.write(
    target.directory,
    new,
    new_config(source, model, config, optim),
    source.meta.tokenizer,
    lineage=files.descend(source.meta, source.directory, action, config, **details),
    step=step,
    seen=None if config.step == 'restart' else source.meta.seen,
  )
  return step
