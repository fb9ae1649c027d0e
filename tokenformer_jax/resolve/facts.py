"""Find the facts of a run, each once: what a user wrote meets checkpoint, teacher and mesh."""

import dataclasses

from jax.sharding import Mesh

from tokenformer_jax import tasks
from tokenformer_jax.config import Config, ModelConfig, with_references
from tokenformer_jax.config.groups import with_records_of
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import plan
from tokenformer_jax.grow.apply import Steps
from tokenformer_jax.parallel import hosts
from tokenformer_jax.resolve import origin as origins
from tokenformer_jax.resolve import sizes
from tokenformer_jax.resolve import teacher as teachers
from tokenformer_jax.resolve.adapt import adapted
from tokenformer_jax.resolve.origin import FROM_SCRATCH, Damaged, Origin
from tokenformer_jax.resolve.teacher import Teacher
from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.steps.last_growth import frozen_base, last_growth
from tokenformer_jax.storage import paths


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
  """What is known of a run without reading data. Each fact follows from those before it.

  Attributes:
    config: the complete config: see `complete`.
    mesh: the devices.
    origin: the checkpoint that the run continues from, if any. That of a branch has its lineage.
    teacher: the model that the run learns from besides its targets, if any.
    growth: the last growth of the model, if any.
    steps: the steps from the model of `init_from` to the run's, after `adapted`; none if equal.
    base: the frozen model before the last growth: see `frozen_base`.
    tokenizer: that of the origin or the teacher; None: the data says it, or there are images.
    task: the model and its loss.
  """

  config: Config
  mesh: Mesh
  origin: Origin
  teacher: Teacher | None
  growth: LastGrowth | None
  steps: Steps
  base: ModelConfig | None
  tokenizer: Tokenizer | None
  task: tasks.Task


def find_facts(config: Config, workdir: paths.Path, mesh: Mesh, damaged: Damaged) -> Facts:
  """Return the facts of a run on a mesh; read checkpoints, and no data but for a size.

  `damaged` are checkpoints in the work directory whose arrays cannot be read, by step.
  """
  origin = origins.find(config, workdir, damaged)
  hosts.meet('the work directory is as an earlier run left it')
  teacher = teachers.find(config, origin)
  config = complete(config, origin, teacher)
  origin = origins.as_branch(config, origin)
  growth = last_growth(origin.lineage, config.model)
  steps = _growth_steps(config, origin)
  base = frozen_base(growth, config)
  vocabulary, tokenizer = origin.vocabulary, origin.tokenizer
  if vocabulary is None and teacher is not None:
    vocabulary, tokenizer = teacher.meta.tokenizer, teacher.tokenizer
  taught_by = teacher and teacher.meta.config.model
  task = tasks.make(config, vocabulary, taught_by, base, tokenizer)
  return Facts(config, mesh, origin, teacher, growth, steps, base, tokenizer, task)


def complete(
  config: Config,
  origin: Origin = FROM_SCRATCH,
  teacher: Teacher | None = None,
  *,
  read: bool = True,
) -> Config:
  """Fill in all that a config leaves open but its lengths.

  These are the sizes that the data decides, the reference counts and births of parameter tokens,
  and the step of the teacher. With `read=False` data is read only for a size that needs it.
  """
  if teacher is not None:
    config = teacher.complete(config, origin)
  source, resumed = origin.model, origin.own is not None
  # A model of another kind is refused later.
  trained = source if isinstance(source, type(config.model)) else None
  if config.model.kind == 'lm':
    model = sizes.of_text(config, trained, read=read)
  else:
    model = sizes.of_images(config, trained, resumed=resumed, read=read)
  model = with_references(model, source, None if resumed else config.grow)
  if source is not None:
    model = with_records_of(model, source)
  return dataclasses.replace(config, model=model)


def _growth_steps(config: Config, origin: Origin) -> Steps:
  """Return the steps of the growth by which a run begins from another one, if it can be made."""
  if origin.other is None:
    return ()
  meta = origin.other.meta
  try:
    source = adapted(meta.config.model, config.model)
    steps = plan.check(source, config.model, config.grow)
    plan.check_no_duplicated_layers(steps, meta.lineage, meta.step)
  except UserError as error:
    raise UserError(f'{origin.where}: {error}') from error
  return steps
