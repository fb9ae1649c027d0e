"""Resolve a run: find everything that is known before its first step, each thing once.

`prepare` is the start of a run from top to bottom. Nothing after it changes the config, a size, the
origin or the place in the data.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  Config,
  at_stage,
  check_decay,
  frozen_groups,
  skip_window,
  stages_after,
)
from tokenformer_jax.config.groups import check_numbers
from tokenformer_jax.config.model import layer_path, used_layers
from tokenformer_jax.data.order import Position
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.params import Definition
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.steps import schedules
from tokenformer_jax.steps.last_growth import last_growth
from tokenformer_jax.steps.optim import LastGrowth
from tokenformer_jax.steps.step import Program, make_program
from tokenformer_jax.storage import paths
from tokenformer_jax.training import device_check, init_from, sizes
from tokenformer_jax.training import origin as origins
from tokenformer_jax.training import teacher as teachers
from tokenformer_jax.training.origin import Damaged, Origin
from tokenformer_jax.training.teacher import Teacher


@dataclasses.dataclass(frozen=True, eq=False)
class RunStage:
  """Steps of a run whose batches have one size.

  Attributes:
    task: the task of the run, with batches of that size.
    position: the place in the order of the data where its first batch begins.
    end: the number of steps before the next stage, or of the run.
  """

  task: tasks.Task
  position: Position
  end: int

  @property
  def batch_size(self) -> int:
    """Return the number of sequences or images in a batch."""
    return self.task.config.data.batch_size

  def seen(self, step: int) -> int:
    """Return the number of samples, of the stage's length, in the order before a step."""
    return self.position.batch_start(step, self.batch_size)


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedRun:
  """A run before its first step.

  Attributes:
    config: the config, with every size filled in and every length in steps.
    workdir: the work directory; it may not exist.
    mesh: the devices.
    origin: the checkpoint that the run continues from, if any.
    teacher: the model that the run learns from besides its targets, if any.
    task: model, loss and opened data.
    position: the place in the order of the data where the run begins.
    program: the parts of the training step: schedule, optimizer, and the model's last growth.
    stages: the stages of the steps that are left.
  """

  config: Config
  workdir: paths.Path
  mesh: Mesh
  origin: Origin
  teacher: Teacher | None
  task: tasks.Task
  position: Position
  program: Program
  stages: tuple[RunStage, ...]


def prepare(
  config: Config,
  workdir: paths.Path,
  devices: Sequence[jax.Device],
  damaged: Damaged | None = None,
) -> PreparedRun:
  """Resolve and check a run; write nothing but the cache of its data.

  `config` is from `config.resolve`, `devices` are those of all processes, and `damaged` are
  checkpoints in the work directory whose arrays cannot be read, by step.

  Raises:
    UserError: a mistake that the user can correct; the message says how.
  """
  mesh = sharding.make_mesh(config.mesh, devices)
  sharding.check_devices(config, mesh)
  if config.train.check_devices:
    device_check.check_repeats(mesh, config.train)

  found = origins.find(config, workdir, damaged or {})
  hosts.meet('the work directory is as an earlier run left it')
  teacher = _find_teacher(config, found)

  known = config if teacher is None else teacher.complete(config, found)
  sized = sizes.fill_in(known, found)
  if teacher is not None:
    teacher.check_fits(sized, mesh)
  origin = origins.as_branch(sized, found)
  origins.check(sized, origin)
  _check_finished(sized, origin)

  vocabulary = origin.vocabulary or (teacher and teacher.meta.tokenizer)
  task = tasks.make(sized, vocabulary, teacher and teacher.meta.config.model)
  definition = task.definition
  sharding.check_divides(mesh, definition.abstract, definition.axes)
  growth = last_growth(origin.lineage, sized.model)
  _check_old_tokens(sized, growth, definition)
  _check_groups(sized, definition)

  task.prepare()
  origins.check_data(sized, origin, task)
  position = origins.position(sized, origin, task.digest)

  resolved = sizes.in_steps(sized, task.examples, position)
  check_decay(resolved)
  if origin.source is not None:
    init_from.check_steps_left(resolved, origin.meta, origin.where)
  origins.check_branch(resolved, origin, growth)
  program = make_program(task, resolved, growth)
  stages = _stages(resolved, task, position)
  return PreparedRun(resolved, workdir, mesh, origin, teacher, task, position, program, stages)


def _check_finished(config: Config, origin: Origin) -> None:
  """Check the data of a finished run before it is read, if the length does not depend on it.

  Raises:
    UserError: see `origin.check_finished`.
  """
  train, optim = config.train, config.optim
  if origin.resumes and not (train.epochs or train.examples or optim.warmup_epochs):
    in_steps = sizes.in_steps(config, 0)
    if origin.meta.step >= in_steps.train.steps:
      origins.check_finished(in_steps, origin, 'data.')


def _stages(config: Config, task: tasks.Task, position: Position) -> tuple[RunStage, ...]:
  """Return the stages of the steps after a position, each with its place in the order."""
  data, steps = config.data, config.train.steps
  left = [stage for stage in stages_after(data, position.step) if stage.first < steps]
  ends = [*(stage.first for stage in left[1:]), steps]
  found, length = [], left and left[0].sequence_length
  for stage, end in zip(left, ends, strict=False):
    begin = position.in_length(length, stage.sequence_length)
    found.append(RunStage(task.at_stage(at_stage(data, stage)), begin, end))
    position, length = Position(end, found[-1].seen(end)), stage.sequence_length
  return tuple(found)


def _find_teacher(config: Config, origin: Origin) -> Teacher | None:
  """Open the teacher of a run that has one."""
  if not config.distill.teacher and not (origin.resumes and origin.meta.teacher):
    return None
  return teachers.find(config, origin)


def _check_old_tokens(config: Config, growth: LastGrowth | None, definition: Definition) -> None:
  """Check that the model has newer parts if `optim.old_tokens` does not train all.

  Raises:
    UserError: it has none.
  """
  if config.optim.old_tokens == 'train':
    return
  now = definition.token_counts
  adds = growth and (growth.old_tokens != now or growth.new_layers or growth.old_experts)
  if not adds:
    raise UserError(
      f'config.optim.old_tokens is {config.optim.old_tokens!r}, but this model has no tokens newer '
      'than the others, and no newer experts or layers; grow it first, or set it to train'
    )


def _check_groups(config: Config, definition: Definition) -> None:
  """Check that the model has the groups that `optim.frozen_groups` and `train.drop_groups` need.

  Raises:
    UserError: it lacks one.
  """
  if frozen := frozen_groups(config.optim):
    check_numbers(definition.group_count, frozen, 'config.optim.frozen_groups')
  if config.train.drop_groups and definition.group_count < 2:
    raise UserError(
      f'config.train.drop_groups is {config.train.drop_groups}, and no projection of this model '
      'has several groups of tokens; grow it by method=group, give it groups '
      '(model.layer.ffn.groups), or set it to 0'
    )


def doubts(config: Config, growth: LastGrowth | None, *, drawn: bool) -> list[str]:
  """Return sentences about allowed settings that are probably a mistake.

  `config` has every length in steps; `drawn` says that all arrays of the model are new.
  """
  found = []
  if drawn and frozen_groups(config.optim):
    found.append(
      f'config.optim.frozen_groups={config.optim.frozen_groups!r} freezes tokens of a new model, '
      "which keep the values that they are drawn with; '' trains all tokens"
    )
  length = config.data.sequence_length
  for name, layer in used_layers(config.model).items():
    clip = getattr(getattr(layer.mixer, 'positions', None), 'clip', 0)
    if config.model.kind == 'lm' and clip >= length:
      found.append(
        f'config.{layer_path(name)}.mixer.positions.clip={clip} limits no distance in texts of '
        f'config.data.sequence_length={length}; take less than {length}, or 0 and '
        f'--clip_positions={clip} when longer texts are written'
      )
  steps, warmup = config.train.steps, config.optim.warmup_steps
  begin = schedules.first_update(config.optim, growth)
  if begin + warmup > steps:
    after = f' after the last growth, at update {begin},' if begin else ''
    found.append(
      f'the warm-up of config.optim.warmup_steps={warmup}{after} is longer than the run of '
      f'config.train.steps={steps}, so the rate never reaches config.optim.learning_rate; set '
      f'it to {max(0, steps - begin) // 10}, or train longer'
    )
  if (needed := -(-skip_window(config.optim) // 2)) and needed >= steps:
    found.append(
      f'config.optim.skip_window={config.optim.skip_window} judges a step by {needed} good ones '
      f'before it at least, more than a run of config.train.steps={steps} has, so '
      'optim.skip_deviations skips none; take a smaller window, or train longer'
    )
  if config.train.check_devices > steps:
    found.append(
      f'config.train.check_devices={config.train.check_devices} checks no step of a run of '
      f'config.train.steps={steps}; take at most that, or train longer'
    )
  return found
