"""Restore the state that a run starts from: its own last state, or another run's, grown."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tokenformer_jax import config as config_lib
from tokenformer_jax import messages, tasks
from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.config.groups import check_numbers, frozen_groups
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.grow import files, room, state
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import optim
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.last_growth import LastGrowth
from tokenformer_jax.steps.step import State
from tokenformer_jax.storage import paths
from tokenformer_jax.training.origin import (
  Origin,
  check_same_model,
  check_same_optimizer,
  in_workdir,
)


def make_writable(workdir: paths.Path) -> None:
  """Make the work directory.

  Raises:
    UserError: it cannot be made or written.
  """
  try:
    paths.make_writable(workdir)
  except TransientError:
    raise
  except paths.errors(workdir) as error:
    reason = paths.reason(error)
    raise UserError(
      f'the work directory {workdir} cannot be written ({reason}); choose another --workdir'
    ) from error


def resume(
  checkpoints: checkpoint.Checkpoints, config: Config, abstract: State
) -> tuple[State, Meta] | None:
  """Return the newest readable state and its metadata, or None in a new work directory.

  Report a damaged checkpoint, move it to `damaged/`, and try the one before it.

  Args:
    checkpoints: the checkpoints of the work directory.
    config: the config, with every size filled in.
    abstract: shapes and shardings of the state.

  Raises:
    UserError: the checkpoint is of another model, or all checkpoints are damaged.
  """
  damaged = {}
  for step in reversed(checkpoints.common_steps()):
    try:
      meta = checkpoints.meta(step)
      check_same_model(config, meta.config, in_workdir(step))
      check_same_optimizer(config, meta, in_workdir(step))
      restored = _restored(checkpoints, meta, config, abstract)
    except checkpoint.DamagedError as error:
      damaged[step] = error
      continue
    for bad, error in damaged.items():
      moved = checkpoints.set_aside(bad)
      messages.say(
        f'the checkpoint of step {bad} is damaged ({error}); it was moved to {moved}; going on '
        f'from step {step}'
      )
    return restored, meta
  if damaged:
    reasons = '; '.join(f'step {step}: {error}' for step, error in damaged.items())
    raise UserError(
      f'no checkpoint in {checkpoints.directory} can be read ({reasons}); move that directory away '
      'to start afresh'
    )
  return None


def _restored(
  checkpoints: checkpoint.Checkpoints, meta: Meta, config: Config, abstract: State
) -> State:
  if 'ema' in abstract and not checkpoint.has(meta, 'ema'):
    abstract = {name: part for name, part in abstract.items() if name != 'ema'}
  return _with_average(config, checkpoints.restore(meta, abstract))


def _with_average(config: Config, state: State) -> State:
  """Return the state with a moving average of the parameters, or without, as the config says.

  A new average starts from the parameters.
  """
  if not config.train.ema:
    return {name: part for name, part in state.items() if name != 'ema'}
  return state if 'ema' in state else {**state, 'ema': jax.tree.map(jnp.copy, state['params'])}


def grown(config: Config, origin: Origin, mesh: Mesh, other_meaning: str = '') -> State:
  """Return the state of the run `config.init_from`, grown to this run's model.

  Before the growth, adapt what the task can change, such as the head for other classes.

  Args:
    config: the config of the run; `origin.check` has passed.
    origin: the origin of the run.
    mesh: the mesh to place the state on.
    other_meaning: see `Task.other_meaning`; if it is not empty, the head is drawn anew.

  Raises:
    UserError: the checkpoint is damaged.
  """
  checkpoints, meta, target = origin.source, origin.meta, config.model
  source = tasks.adapted(meta.config.model, target)
  if reason := state.inexact(source, target, config.grow):
    messages.say(f'the grown model will not compute what {config.init_from} does: {reason}')
  room.check_memory(mesh, (target,), meta.config.optim, ema=checkpoint.has(meta, 'ema'))
  if source == meta.config.model and not other_meaning:
    grown = files.read_and_grow(checkpoints, meta, mesh, target, config.grow)
    return _with_average(config, _with_optimizer(config, meta, grown, mesh))
  changed = [
    f'{path} is {old!r} there and {new!r} in the config'
    for path, new, old in config_lib.differences(source, meta.config.model, 'model.')
  ]
  if other_meaning:
    changed.append(f'a new head, because {other_meaning}')
  messages.say(f'adapting {config.init_from}: {", ".join(changed)}')
  old, definition = files.read(checkpoints, meta, mesh), models.define(target)
  tx = optim.make_optimizer(meta.config.optim, config.train.steps, definition.info)
  shardings = step_lib.state_shardings(mesh, definition, tx, ema='ema' in old)

  def adapt_and_grow(old: State) -> State:
    adapted = _adapted(old, source, config, new_head=bool(other_meaning))
    return state.grow(adapted, source, target, config.grow)

  new = jax.jit(adapt_and_grow, out_shardings=shardings)(old)
  return _with_average(config, _with_optimizer(config, meta, new, mesh))


def _with_optimizer(config: Config, meta: Meta, state: State, mesh: Mesh) -> State:
  """Return a state with the statistics of the run's optimizer, all zero if the source had another.

  The count of the learning rate stays.
  """
  if config.optim.name == meta.config.optim.name:
    return state
  definition = models.define(config.model)
  tx = optim.make_optimizer(config.optim, config.train.steps, definition.info)
  shardings = step_lib.state_shardings(mesh, definition, tx)['opt_state']
  *_, rates = state['opt_state']
  *others, _ = jax.jit(tx.init, out_shardings=shardings)(state['params'])
  return {**state, 'opt_state': (*others, rates)}


def _adapted(old: State, model: ModelConfig, config: Config, *, new_head: bool) -> State:
  """Return a state whose parameters, average and moments have the shapes of the adapted model."""

  def params(tree: Params) -> Params:
    return tasks.adapt(tree, model, config.grow.seed, new_head=new_head)

  def moments(order: int, tree: Params) -> Params:
    del order
    return tasks.adapt(tree, model, None, new_head=new_head)

  return state.map_trees(old, config.grow, params, moments)


def check_old_tokens(config: Config, growth: LastGrowth | None, definition: Definition) -> None:
  """Check that the model has newer parts if `optim.old_tokens` treats them differently.

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


def check_frozen_groups(config: Config) -> None:
  """Check that the model has the groups that `optim.frozen_groups` names.

  Raises:
    UserError: it has not.
  """
  check_numbers(config.model, frozen_groups(config.optim), 'config.optim.frozen_groups')
