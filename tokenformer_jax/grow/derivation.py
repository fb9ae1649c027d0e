"""Derive a run from another one: open the source, check memory and disk, write the target.

The actions of growth are in `actions.py`. A target is written whole or not at all.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from tokenformer_jax.config import Config, GrowConfig, MeshConfig, ModelConfig, OptimConfig
from tokenformer_jax.decoding import buckets
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import check_capacity, diff_table, grow_run, verify
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.model import flops, models
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta, Seen
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import Batch

Made = str | None  # the name of a new run, DIR@STEP; None: nothing is written, as by a dry run
_MEASURED = range(16)  # the held-out examples that a loss is measured on


@dataclasses.dataclass(frozen=True)
class Derivation:
  """A run to make from an open checkpoint.

  Attributes:
    source: the checkpoint.
    mesh: the mesh that the action runs on, and the new run.
    mesh_config: the sizes of the mesh.
    target: the new work directory.
    config: how new weights are made, and moments and step treated.
    dry_run: whether to stop before anything is read or written.
    show: prints the table of changes.
  """

  source: checkpoint.Source
  mesh: Mesh
  mesh_config: MeshConfig
  target: paths.Path
  config: GrowConfig
  dry_run: bool
  show: Callable[[str], None]

  @property
  def meta(self) -> Meta:
    """The description of the source's checkpoint."""
    return self.source.meta

  @property
  def before(self) -> ModelConfig:
    """The model of the source."""
    return self.meta.config.model

  def write(
    self,
    action: str,
    after: ModelConfig,
    plan: Steps | Callable[[Params], Steps],
    *,
    measured: range = _MEASURED,
    exact: bool = False,
    optim: Callable[[OptimConfig], OptimConfig] = lambda optim: optim,
    **details: Any,
  ) -> Made:
    """Write a run whose state is made by steps from the source's; report changes and the loss.

    Args:
      action: the name of the action in the lineage.
      after: the model of the new state.
      plan: the steps, or a function from the source's parameters to them.
      measured: the held-out examples that the loss is measured on; none if no array changes.
      exact: whether to refuse a model that computes something else.
      optim: makes the optimizer's settings of the new run from the source's.
      **details: fields of the new entry of the lineage.

    Returns:
      The name of the new run.
    """
    if measured and after != self.before:
      self._show_table(after)
    self._check_room(after)
    if self.dry_run:
      return None
    if measured:
      batch, name = self.held_out(len(measured), first=measured.start)
      both = self.before, after
      comparison = verify.Comparison(self.meta.config, both, batch, name, self.mesh)
      new = grow_run.read_and_grow(self.source, self.mesh, plan, self.config, comparison.see)
      comparison.report(exact=exact)
    else:
      new = grow_run.read_and_grow(self.source, self.mesh, plan, self.config)
    meta = Meta(
      int(new['step']),
      self.new_config(after, self.config, optim(self.meta.config.optim)),
      self.meta.tokenizer,
      grow_run.descend(self.meta, self.source.directory, action, self.config, **details),
      seen=Seen(0) if self.config.step == 'restart' else self.meta.seen,
      family=self.meta.family,
    )
    grow_run.write(self.target, meta, new)
    return f'{self.target}@{meta.step}'

  def _show_table(self, after: ModelConfig) -> None:
    """Print the table of changes, and check that the mesh divides the new model."""
    config = self.meta.config
    self.show(diff_table.render(self.before, after, flops.length(config), config.optim))
    sizes = dataclasses.asdict(self.mesh_config).values()
    definition = models.define(after)
    sharding.check_divides(self.mesh, definition.abstract, definition.axes)
    if -1 not in sizes:
      planned = sharding.abstract_mesh(self.mesh_config, math.prod(sizes))
      sharding.check_divides(planned, definition.abstract, definition.axes)

  def _check_room(self, after: ModelConfig) -> None:
    """Check the memory for the larger of both states, and the target's disk."""
    both, optim = (self.before, after), self.meta.config.optim
    try:
      check_capacity.check_memory(self.mesh, both, optim, ema=self.meta.has('ema'))
    except UserError as error:
      if not self.dry_run:
        raise
      messages.say(f'without --dry_run this would end here: {error}')
    if not self.dry_run:
      check_capacity.check_disk(self.target, self.source, after, self.config.moments)

  def held_out(self, examples: int, first: int = 0) -> tuple[Batch, str]:
    """Return held-out examples and their name; round their number up to what the mesh divides."""
    rounded = [buckets.rows(count, self.mesh) for count in (examples, first)]
    task = verify.exact_task(self.meta.config, self.before)
    return task.held_out(self.meta.tokenizer, *rounded)

  def new_config(
    self, model: ModelConfig, grow: GrowConfig, optim: OptimConfig | None = None
  ) -> Config:
    """Return the config of the new run: the source's, with another model, growth and optimizer."""
    return dataclasses.replace(
      self.meta.config,
      model=model,
      optim=optim or self.meta.config.optim,
      grow=grow,
      mesh=self.mesh_config,
      init_from='',
    )


@dataclasses.dataclass(frozen=True)
class Parent:
  """A run that others are derived from.

  Attributes:
    source: its name, DIR or DIR@STEP.
    mesh: the mesh to use; None: the parent's if it fits the devices here, else all devices.
    dry_run: whether to stop before anything is read or written.
    show: prints the table of changes.
  """

  source: str
  mesh: MeshConfig | None = None
  dry_run: bool = False
  show: Callable[[str], None] = messages.say

  def derive(self, target: str | os.PathLike[str], config: GrowConfig) -> Derivation:
    """Open the run, and check that the target can be made."""
    here, directory = sharding.find_devices(), paths.parse_path(target)
    opened = checkpoint.open_source(self.source)
    if not self.dry_run:
      grow_run.check_target(directory, opened.directory)
    mesh, mesh_config = _mesh(self.mesh, opened.meta.config.mesh, here)
    return Derivation(opened, mesh, mesh_config, directory, config, self.dry_run, self.show)


def _mesh(
  asked: MeshConfig | None, source: MeshConfig, devices: list[Any]
) -> tuple[Mesh, MeshConfig]:
  if asked is not None:
    return sharding.make_mesh(asked, devices), asked
  try:
    return sharding.make_mesh(source, devices), source
  except UserError:
    return sharding.make_mesh(MeshConfig(), devices), source
