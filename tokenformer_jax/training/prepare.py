"""Resolve a run: find everything that is known before its first step, each thing once.

`prepare` is the start of a run from top to bottom. Nothing after it changes the config, a size, the
origin or the place in the data.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, check_decay
from tokenformer_jax.data.order import Position
from tokenformer_jax.parallel import hosts, sharding
from tokenformer_jax.steps.last_growth import last_growth
from tokenformer_jax.steps.step import Program, make_program
from tokenformer_jax.storage import paths
from tokenformer_jax.training import origin as origins
from tokenformer_jax.training import sizes, start
from tokenformer_jax.training import teacher as teachers
from tokenformer_jax.training.origin import Damaged, Origin
from tokenformer_jax.training.teacher import Teacher


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
  """

  config: Config
  workdir: paths.Path
  mesh: Mesh
  origin: Origin
  teacher: Teacher | None
  task: tasks.Task
  position: Position
  program: Program


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

  found = origins.find(config, workdir, damaged or {})
  hosts.meet('the work directory is as an earlier run left it')
  teacher = teachers.find(config, found)

  sized = sizes.fill_in(teachers.fill_in(config, teacher, found), found)
  origins.check(sized, found)
  origin = origins.as_branch(sized, found)

  task = _make_task(sized, origin, teacher, mesh)
  definition = task.definition
  sharding.check_divides(mesh, definition.abstract, definition.axes)
  growth = last_growth(origin.lineage, sized.model)
  start.check_old_tokens(sized, growth, definition)
  start.check_frozen_groups(sized)
  start.check_drop_groups(sized, definition)

  task.prepare()
  origins.check_data(sized, origin, task)
  position = origins.position(sized, origin, task.digest)

  resolved = sizes.in_steps(sized, task.examples, position)
  check_decay(resolved)
  origins.check_branch(resolved, origin, growth)
  program = make_program(task, resolved, growth)
  return PreparedRun(resolved, workdir, mesh, origin, teacher, task, position, program)


def _make_task(config: Config, origin: Origin, teacher: Teacher | None, mesh: Mesh) -> tasks.Task:
  """Return the task, with the vocabulary of the origin, else of the teacher."""
  if teacher is None:
    return tasks.make(config, origin.vocabulary)
  teachers.check(config, teacher, mesh)
  vocabulary = origin.vocabulary or teacher.meta.tokenizer
  return tasks.make(config, vocabulary, teacher.meta.config.model)
