"""Resolve a run: find everything that is known before its first step, each thing once.

`prepare` is the start of a run from top to bottom. Nothing after it changes the config, a size, the
origin or the position in the data.
"""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  Config,
  at_stage,
  stages_after,
)
from tokenformer_jax.data.order import Position
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.steps.last_growth import frozen_base, last_growth
from tokenformer_jax.steps.step import Program, make_program
from tokenformer_jax.storage import paths
from tokenformer_jax.training import origin as origins
from tokenformer_jax.training import sizes
from tokenformer_jax.training import teacher as teachers
from tokenformer_jax.training.check_run import check_run
from tokenformer_jax.training.origin import Damaged, Origin
from tokenformer_jax.training.teacher import Teacher


@dataclasses.dataclass(frozen=True, eq=False)
class RunStage:
  """Steps of a run whose batches have one size.

  Attributes:
    task: the task of the run, with batches of that size.
    position: that of its first batch in the order of the data.
    end: the number of steps before the next stage, or of the run.
  """

  task: tasks.Task
  position: Position
  end: int

  @property
  def batch_size(self) -> int:
    """The number of sequences or images in a batch."""
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
    position: that of the first batch of the run in the order of the data.
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
  devices: list[Any],
  damaged: Damaged | None = None,
) -> PreparedRun:
  """Resolve and check a run; write nothing but the cache of its data.

  `config` is from `config.resolve`, `devices` are those of all processes, and `damaged` are
  checkpoints in the work directory whose arrays cannot be read, by step.
  """
  mesh = sharding.make_mesh(config.mesh, devices)
  sharding.check_devices(config, mesh)
  origin = origins.find(config, workdir, damaged or {})
  hosts.meet('the work directory is as an earlier run left it')
  teacher = teachers.find(config, origin)
  if teacher is not None:
    config = teacher.complete(config, origin)

  sized = sizes.fill_in(config, origin)
  origin = origins.as_branch(sized, origin)
  vocabulary = origin.vocabulary or (teacher and teacher.meta.tokenizer)
  growth = last_growth(origin.lineage, sized.model)
  before = frozen_base(growth, sized)
  task = tasks.make(sized, vocabulary, teacher and teacher.meta.config.model, before)
  known = (mesh, origin, teacher, task, growth)
  check_run(sized, *known, knows_data=False)

  task.prepare()
  position = origins.position(sized, origin, task.digests)
  resolved = sizes.in_steps(sized, task.examples, position)
  check_run(resolved, *known, knows_data=True)
  program = make_program(task, resolved, growth)
  stages = _stages(resolved, task, position)
  return PreparedRun(resolved, workdir, mesh, origin, teacher, task, position, program, stages)


def _stages(config: Config, task: tasks.Task, position: Position) -> tuple[RunStage, ...]:
  """Return the stages of the steps after a position, each with its position in the order."""
  data, steps = config.data, config.train.steps
  left = [stage for stage in stages_after(data, position.step) if stage.first < steps]
  ends = [*(stage.first for stage in left[1:]), steps]
  run_stages, length = [], left[0].sequence_length if left else 0
  for stage, end in zip(left, ends, strict=False):
    begin = position.in_length(length, stage.sequence_length)
    run_stages.append(RunStage(task.at_stage(at_stage(data, stage)), begin, end))
    position, length = Position(end, run_stages[-1].seen(end)), stage.sequence_length
  return tuple(run_stages)
