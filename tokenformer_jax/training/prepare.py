"""Resolve a run: its facts, checks, data, what the data decides, and the program of a step.

`prepare` is the start of a run from top to bottom. Nothing after it changes the config, a size, the
origin or the position in the data.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, at_stage, stages_after
from tokenformer_jax.data.order import Position
from tokenformer_jax.parallel import sharding
from tokenformer_jax.resolve.checks import check_after_data, check_before_data
from tokenformer_jax.resolve.facts import Facts, find_facts
from tokenformer_jax.resolve.lengths import find_lengths
from tokenformer_jax.resolve.origin import Damaged
from tokenformer_jax.steps.step import Program, make_program
from tokenformer_jax.storage import paths


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
class PreparedRun(Facts):
  """A run before its first step: its facts, with every length in steps, and what its data decides.

  Attributes:
    workdir: the work directory; it may not exist.
    position: that of the first batch of the run in the order of the data.
    order_changes: the reasons why this order is not that of the checkpoint.
    program: the parts of the training step: schedule, optimizer, and the model's last growth.
    stages: the stages of the steps that are left.
  """

  workdir: paths.Path
  position: Position
  order_changes: Sequence[str]
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
  facts = find_facts(config, workdir, mesh, damaged or {})
  check_before_data(facts)

  facts.task.prepare()
  lengths = find_lengths(facts)
  check_after_data(facts, lengths)
  program = make_program(facts.task, lengths.config, facts.growth)
  return PreparedRun(
    **{**vars(facts), **vars(lengths)},
    workdir=workdir,
    program=program,
    stages=_stages(lengths.config, facts.task, lengths.position),
  )


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
