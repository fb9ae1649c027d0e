"""Begin a run from another run's checkpoint (`config.init_from`), grown to the run's model."""

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.grow import check_capacity, grow_run, plan
from tokenformer_jax.model import models
from tokenformer_jax.parallel import messages
from tokenformer_jax.resolve.adapt import Adapt, adapted
from tokenformer_jax.runs.checkpoint import Source
from tokenformer_jax.steps import optim
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.step import State
from tokenformer_jax.training.prepare import PreparedRun


def grown_state(run: PreparedRun, origin: Source) -> State:
  """Read the state of the source and grow it to the run's model, on the mesh.

  Before the growth, adapt a model of other images. If `Task.other_meaning` is not empty, draw the
  head anew.
  """
  config, meta, steps, other_meaning = run.config, origin.meta, run.steps, run.task.other_meaning
  source = adapted(meta.config.model, config.model)
  if reason := plan.inexact(steps):
    messages.say(f'the grown model will not compute what {config.init_from} does: {reason}')
  optimizer, has_ema = meta.config.optim, meta.has('ema')
  check_capacity.check_memory(run.mesh, (config.model,), optimizer, ema=has_ema)
  if source != meta.config.model or other_meaning:
    changed = [
      f'{path} is {old!r} there and {new!r} in the config'
      for path, new, old in config_lib.differences(source, meta.config.model, 'model.')
    ]
    if other_meaning:
      changed.append(f'a new head, because {other_meaning}')
    messages.say(f'adapting {config.init_from}: {", ".join(changed)}')
    seed, new_head = config.grow.seed, bool(other_meaning)
    steps = (Adapt(meta.config.model, source, seed, new_head), *steps)
  grown = grow_run.read_and_grow(origin, run.mesh, steps, config.grow)
  return grown if config.optim.kind == optimizer.kind else _with_optimizer(run, grown)


def _with_optimizer(run: PreparedRun, state: State) -> State:
  """Return a state with empty statistics of the run's optimizer, which the source did not have.

  The count of the learning rate stays.
  """
  definition = models.define(run.config.model)
  tx = optim.make_optimizer(run.config.optim, optim.NO_RATE, definition.info)
  shardings = step_lib.state_shardings(run.mesh, definition, tx)['opt_state']
  *_, rates = state['opt_state']
  *others, _ = jax.jit(tx.init, out_shardings=shardings)(state['params'])
  return {**state, 'opt_state': (*others, rates)}
