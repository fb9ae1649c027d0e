"""Make one run from another, for the command `grow` and for `Run.grow`.

Each action takes an open `Source` and a `Target`, and checks all it can before it reads an array.
`grow`, `merge` and `shrink` compare both models on the same held-out examples. A target is written
whole or not at all.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from tokenformer_jax.config import (
  Config,
  GrowConfig,
  MeshConfig,
  ModelConfig,
  OptimConfig,
)
from tokenformer_jax.config.groups import check_new_tokens_train
from tokenformer_jax.decoding import buckets
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import depth, files, parts, room, state, table, verify
from tokenformer_jax.model import flops, models
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.storage import paths
from tokenformer_jax.tasks import Batch

_EXAMPLES = 1  # to compare two models on, rounded up to what the mesh can split
MEASURED = range(16)  # the held-out examples that a loss is measured on


@dataclasses.dataclass(frozen=True)
class Source:
  """The checkpoint that an action starts from, and the mesh that it runs on."""

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
  """The place of the new run.

  Attributes:
    directory: a new work directory.
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
  """Open the run to start from, after a check that the target can be made.

  Args:
    source: DIR or DIR@STEP.
    target: the place of the new run.
    mesh_config: the mesh; None: the source's if it fits the devices here, else all devices.

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
  asked: MeshConfig | None, of_source: MeshConfig, devices: list[jax.Device]
) -> tuple[Mesh, MeshConfig]:
  if asked is not None:
    return sharding.make_mesh(asked, devices), asked
  try:
    return sharding.make_mesh(of_source, devices), of_source
  except UserError:
    return sharding.make_mesh(MeshConfig(), devices), of_source


def grow(source: Source, after: ModelConfig, config: GrowConfig, target: Target) -> int | None:
  """Make a larger model, and say whether it computes what the source does.

  Args:
    source: the run.
    after: the larger model.
    config: how new weights are made.
    target: the place of the new run.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: `config.method` cannot make the larger model, there is no room, or an exact growth
      computes something else. Nothing is written then.
  """
  before = source.model
  if after == before:
    raise UserError(
      'nothing would grow; say what is to be larger, by --param_tokens=qkv=N,proj=N,ffn=N, or by '
      '--width=N for a Transformer, or --experts=N, or --layers=N'
    )
  state.check(before, after, config)
  depth.check_no_twins(before, after, source.meta.lineage, source.meta.step, config.place)
  check_new_tokens_train(source.meta.config.optim, before, after)
  show_table(source, after, target, advice=True)
  check_room(source, after, config, target, held=(after,))
  reason = state.inexact(before, after, config)
  messages.say(
    f'not exact: the grown model will not compute what the source does, because {reason}'
    if reason
    else 'exact: the grown model computes what the source does'
  )
  if target.dry_run:
    return None
  batch, name = held_out(source, _EXAMPLES)
  programs = [compile_outputs(source, model, batch) for model in (before, after)]
  outputs: list[verify.Outputs] = []
  new = files.read_and_grow(
    source.checkpoints,
    source.meta,
    source.mesh,
    after,
    config,
    see=lambda params: outputs.append(programs[len(outputs)](params)),
  )
  verify.report(*outputs, name, exact=reason is None)
  return write(source, new, after, config, 'grow', target, _grown_rate(source, after, config))


def _grown_rate(source: Source, after: ModelConfig, config: GrowConfig) -> OptimConfig:
  """Return the optimizer's settings with the learning rate of the larger model; report it."""
  optim = source.meta.config.optim
  factor = config.rate or state.rate_factor(source.model, after)
  if factor == 1:
    return optim
  rate = float(f'{optim.learning_rate * factor:.3g}')
  reason = 'as rate says'
  if not config.rate:
    reason = 'because a larger model needs a lower rate (--rate=1 keeps it)'
  messages.say(
    f'optim.learning_rate is {optim.learning_rate:g} before and {rate:g} after, {reason}'
  )
  return dataclasses.replace(optim, learning_rate=rate)


def extract(source: Source, target: Target, numbers: Sequence[int] = ()) -> None:
  """Write only the tokens that the last growth added, or those of some groups.

  Args:
    source: the run.
    target: the place of the tokens.
    numbers: of the groups; none: what the last growth added.

  Raises:
    UserError: the run has not grown, a projection has no other group, or the target cannot be
      written.
  """
  meta = source.meta
  lineage, model = parts.extraction(meta, source.directory, numbers)
  whole = files.read(source.checkpoints, meta, source.mesh)
  files.write(
    target.directory,
    parts.extract(whole, source.model, lineage[-1], numbers),
    _new_config(source, model, meta.config.grow),
    meta.tokenizer,
    lineage=lineage,
    contents='added_tokens',
    step=meta.step,
  )


def merge(source: Source, added: str, config: GrowConfig, target: Target) -> int | None:
  """Append the tokens of another run, or of `extract`, to those of the source.

  Args:
    source: the run.
    added: DIR or DIR@STEP.
    config: how to treat scale, moments and step.
    target: the place of the new run.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: the tokens do not fit the source or are in it already, or there is no room.
  """
  directory, step = paths.split_source(added)
  checkpoints, meta = checkpoint.open_source(directory, step)
  if meta.lineage and meta.lineage[-1].action == 'grow':
    parts.check_no_layers(meta.lineage[-1], meta.config.model, directory)
  parts.check_mergeable(source.model, meta.config.model)
  parts.check_no_experts(meta, directory)
  parts.check_not_twice(source.meta, source.directory, meta, directory)
  after = parts.merged_model(source.model, meta, config)
  check_new_tokens_train(source.meta.config.optim, source.model, after)
  with contextlib.closing(checkpoints):
    new_tokens = parts.read_added(checkpoints, meta, source.mesh)
  show_table(source, after, target)
  check_room(source, after, config, target, held=(source.model, after))
  own = parts.own_groups(source.model, meta)
  if note := parts.other_scale(source.model, meta.config.model, own):
    messages.say(note)
  if target.dry_run:
    return None
  batch, name = held_out(source, _EXAMPLES)
  compute, recompute = (compile_outputs(source, model, batch) for model in (source.model, after))
  old = files.read(source.checkpoints, source.meta, source.mesh)
  computed = compute(old['params'])
  new = parts.merge(old, new_tokens, source.model, config)
  verify.report(computed, recompute(new['params']), name, exact=False)
  tokens_of = parts.as_lines(parts.additions(meta, directory))
  return write(source, new, after, config, 'merge', target, tokens_of=tokens_of)


def remove(source: Source, config: GrowConfig, target: Target) -> int | None:
  """Take out what the last growth or merge added.

  Args:
    source: the run.
    config: how to treat moments and step.
    target: the place of the new run.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: nothing was added, or the added tokens cannot be told from the old ones.
  """
  last = parts.last_addition(source.meta, source.directory)
  if last.grow.method == 'duplicate' and last.action == 'grow':
    raise UserError(
      'the last growth duplicated the tokens and divided the values of the old ones among the '
      'copies; taking the copies out would not give back what was there'
    )

  def change(old: state.State) -> state.State:
    return parts.remove(old, source.model, last.model, config, last.grow.place)

  return rewrite(source, last.model, change, 'remove', config, target, MEASURED)


def rewrite(
  source: Source,
  after: ModelConfig,
  change: Callable[[state.State], state.State],
  action: str,
  config: GrowConfig,
  target: Target,
  examples: range,
  optim: OptimConfig | None = None,
  *,
  advice: bool = False,
  **details: Any,
) -> int | None:
  """Write a run whose state is a function of the source's; report what changes, and the loss.

  Args:
    source: the run.
    after: the model of the new state.
    change: makes the new state.
    action: the name of the action for the lineage.
    config: how `change` treats moments and step.
    target: the place of the new run.
    examples: the held-out examples that the loss is measured on; none for an equal function.
    optim: the optimizer's settings of the new run; None: the source's.
    advice: whether to advise on the counts of tokens; no where the user cannot choose them.
    **details: fields of the lineage's new entry.

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
  if not examples:
    new = change(files.read(source.checkpoints, source.meta, source.mesh))
    return write(source, new, after, config, action, target, optim, **details)
  batch, name = held_out(source, len(examples), first=examples.start)
  compute = compile_outputs(source, before, batch)
  recompute = compute if after == before else compile_outputs(source, after, batch)
  old = files.read(source.checkpoints, source.meta, source.mesh)
  computed = compute(old['params'])
  new = change(old)
  verify.report(computed, recompute(new['params']), name, exact=False)
  return write(source, new, after, config, action, target, optim, **details)


def shrink(
  source: Source, counts: Mapping[str, int], examples: int, config: GrowConfig, target: Target
) -> int | None:
  """Keep only the parameter tokens that matter most for held-out examples.

  Args:
    source: the run.
    counts: the numbers of tokens to keep.
    examples: the number of sequences or images to measure importance on.
    config: how to treat scale, moments and step.
    target: the place of the new run.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: the counts are not smaller, or there is no room.
  """
  after = state.grown_model(source.model, counts, config)
  parts.check_smaller(source.model, after)

  def smaller(old: state.State) -> state.State:
    batch, name = held_out(source, examples)
    task = verify.exact_task(source.meta.config, source.model)
    new = parts.shrink(old, task, after, batch, config)
    messages.say(f'importance of a token: mean over examples of |⟨value, ∂loss/∂value⟩|, on {name}')
    return new

  of = range(examples, 2 * examples)
  return rewrite(source, after, smaller, 'shrink', config, target, of, advice=True)


def show_table(source: Source, after: ModelConfig, target: Target, *, advice: bool = False) -> None:
  """Print the table of changes, and advice if asked; check that the mesh divides the new model."""
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
  """Check memory for the models that are held at once, and the target's disk."""
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
  """Return held-out examples and their name; round the number up to what the mesh can split."""
  rounded = [buckets.rows(count, source.mesh) for count in (examples, first)]
  task = verify.exact_task(source.meta.config, source.model)
  return task.held_out(source.meta.tokenizer, *rounded)


def compile_outputs(
  source: Source, model: ModelConfig, batch: Batch
) -> Callable[[Params], verify.Outputs]:
  """Return the function from parameters of a model to its outputs on a batch."""
  return verify.program(verify.exact_task(source.meta.config, model), batch, source.mesh)


def _new_config(
  source: Source, model: ModelConfig, config: GrowConfig, optim: OptimConfig | None = None
) -> Config:
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
  new: state.State,
  model: ModelConfig,
  config: GrowConfig,
  action: str,
  target: Target,
  optim: OptimConfig | None = None,
  **details: Any,
) -> int:
  """Write the new run; return its step. The details are fields of the lineage's new entry."""
  step = int(new['step'])
  files.write(
    target.directory,
    new,
    _new_config(source, model, config, optim),
    source.meta.tokenizer,
    lineage=files.descend(source.meta, source.directory, action, config, **details),
    step=step,
    seen=None if config.step == 'restart' else source.meta.seen,
  )
  return step
