"""Begin a run from another run's checkpoint (`config.init_from`), grown to the run's model."""

import dataclasses

import jax
from jax.sharding import Mesh

from tokenformer_jax import config as config_lib
from tokenformer_jax import tasks
from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import check_capacity, grow_run, plan
from tokenformer_jax.grow.steps.step import Arrays, Keys, Step
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Path
from tokenformer_jax.parallel import messages
from tokenformer_jax.runs.checkpoint import Source
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import optim
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths


def _check_steps_left(config: Config, meta: Meta, where: str) -> None:
  """Check that a run has a step to make after those of the source, unless it counts from 0.

  A length in epochs or examples is not checked: it has no number of steps before the data is read.
  """
  train = config.train
  if config.grow.step == 'restart' or train.epochs or train.examples or meta.step < train.steps:
    return
  raise UserError(
    f'{where} is at step {meta.step}, where the run would go on, and config.train.steps is '
    f'{train.steps}; raise it, or set config.grow.step=restart'
  )


def check(config: Config, meta: Meta, where: str) -> None:
  """Check that the source's model can be grown to the run's, before any data is read.

  `config` has every size filled in. `where` is the name of the source's checkpoint in messages.
  """
  _check_steps_left(config, meta, where)
  source = tasks.task_class(config.model).adapted(meta.config.model, config.model)
  try:
    steps = plan.check(source, config.model, config.grow)
    plan.check_no_duplicated_layers(steps, meta.lineage, meta.step)
  except UserError as error:
    raise UserError(f'{where}: {error}') from error


def description(config: Config, meta: Meta) -> str:
  """Return a sentence: what a run takes from `config.init_from`, and how its model grows."""
  directory, _ = paths.split_source(config.init_from)
  if meta.contents != 'model' or config.grow.moments == 'drop':
    takes = 'its parameters alone'
  else:
    takes = 'its parameters and optimizer state'
  if meta.step and config.grow.step == 'restart':
    takes += ', from step 0 on'
  source = tasks.task_class(config.model).adapted(meta.config.model, config.model)
  grown = [
    f'{path}: {old!r} -> {new!r}'
    for path, new, old in config_lib.differences(config.model, source, 'model.')
    if not (path.endswith('.reference') and not new)  # The groups have reference counts.
  ]
  if grown:
    before, after = (models.define(model).count for model in (source, config.model))
    grown.append(f'{before:,} -> {after:,} parameters')
  grows = f'it grows: {"; ".join(grown)}' if grown else 'it does not grow'
  return f'starting with the model of {directory}, step {meta.step} ({takes}); {grows}'


def grown_state(config: Config, origin: Source, mesh: Mesh, other_meaning: str = '') -> State:
  """Read the state of the source and grow it to the run's model, on the mesh.

  Before the growth, let the task adapt parts of the model, such as the head to other classes. The
  config has passed `check`. If `Task.other_meaning` is not empty, draw the head anew.
  """
  target, meta = config.model, origin.meta
  source = tasks.task_class(target).adapted(meta.config.model, target)
  steps = plan.plan_growth(source, target, config.grow)
  if reason := plan.inexact(steps):
    messages.say(f'the grown model will not compute what {config.init_from} does: {reason}')
  check_capacity.check_memory(mesh, (target,), meta.config.optim, ema=meta.has('ema'))
  if source != meta.config.model or other_meaning:
    changed = [
      f'{path} is {old!r} there and {new!r} in the config'
      for path, new, old in config_lib.differences(source, meta.config.model, 'model.')
    ]
    if other_meaning:
      changed.append(f'a new head, because {other_meaning}')
    messages.say(f'adapting {config.init_from}: {", ".join(changed)}')
    seed, new_head = config.grow.seed, bool(other_meaning)
    steps = (_Adapt(meta.config.model, source, seed, new_head), *steps)
  grown = grow_run.read_and_grow(origin, mesh, steps, config.grow)
  return _with_optimizer(config, meta, grown, mesh)


@dataclasses.dataclass(frozen=True)
class _Adapt(Step):
  """Adapts a model to the data of the run's task: see `Task.adapt`."""

  seed: int
  new_head: bool

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    del keys
    task = tasks.task_class(self.after)
    return task.adapt(path, old, self.after, self.seed, new_head=self.new_head)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    del order
    task = tasks.task_class(self.after)
    return task.adapt(path, old, self.after, None, new_head=self.new_head)


def _with_optimizer(config: Config, meta: Meta, state: State, mesh: Mesh) -> State:
  """Return a state with the statistics of the run's optimizer, all zero if the source had another.

  The count of the learning rate stays.
  """
  if config.optim.kind == meta.config.optim.kind:
    return state
  definition = models.define(config.model)
  tx = optim.make_optimizer(config.optim, optim.NO_RATE, definition.info)
  shardings = step_lib.state_shardings(mesh, definition, tx)['opt_state']
  *_, rates = state['opt_state']
  *others, _ = jax.jit(tx.init, out_shardings=shardings)(state['params'])
  return {**state, 'opt_state': (*others, rates)}
