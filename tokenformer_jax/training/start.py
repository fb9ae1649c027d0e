"""Make the first state of a run: read from its checkpoint, grown from another run, or new."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import skip_window
from tokenformer_jax.grow import check_capacity, grow_run, plan
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.resolve.adapt import Adapt, adapted
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.runs.checkpoint import Source
from tokenformer_jax.runs.checkpoint_meta import Meta
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.step import State
from tokenformer_jax.training.prepare import PreparedRun


def first_state(
  run: PreparedRun,
  checkpoints: Callable[[], checkpoint.Checkpoints],
) -> tuple[State, int]:
  """Return the state to start from, and the number of steps it has made.

  The state is that of a checkpoint in the work directory; or of the run `config.init_from`, grown
  if this model is larger; or new. `checkpoints` opens those of the work directory. A checkpoint
  that cannot be read raises a `DamagedError`.
  """
  origin = run.origin
  if origin.own is not None:
    return _with_optional(run, _resumed(run, origin.own, checkpoints())), origin.own.step
  if origin.other is not None:
    grown = _grown(run, origin.other)
    return _with_optional(run, grown), int(grown['step'])
  return step_lib.make_first_state(run.program, run.mesh)(run.config.train.seed), 0


def _resumed(run: PreparedRun, meta: Meta, checkpoints: checkpoint.Checkpoints) -> State:
  """Return the state in the run's own checkpoint, and move newer ones that are damaged away."""
  abstract = run.program.abstract_state(run.mesh)
  same_window = run.program.window == skip_window(meta.config.optim)
  kept = {'ema': meta.has('ema'), 'recent': same_window and meta.has('recent')}
  abstract = {name: arrays for name, arrays in abstract.items() if kept.get(name, True)}
  state = checkpoints.restore(meta, abstract)
  for step, error in run.origin.damaged.items():
    path = checkpoints.set_aside(step)
    messages.say(
      f'the checkpoint of step {step} is damaged ({error}); it was moved to {path}; going on '
      f'from step {meta.step}'
    )
  return state


def _grown(run: PreparedRun, origin: Source) -> State:
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
  return grown if config.optim.kind == optimizer.kind else _with_new_statistics(run, grown)


def _with_new_statistics(run: PreparedRun, state: State) -> State:
  """Return a state with empty statistics of the run's optimizer, which the source did not have.

  The count of the learning rate stays.
  """
  abstract = run.program.abstract_state(run.mesh)['opt_state']
  shardings = jax.tree.map(lambda array: array.sharding, abstract)
  *_, rates = state['opt_state']
  *others, _ = jax.jit(run.program.tx.init, out_shardings=shardings)(state['params'])
  return {**state, 'opt_state': (*others, rates)}


def _with_optional(run: PreparedRun, state: State) -> State:
  """Add or remove the optional entries of a state, as the config says.

  A new moving average starts from the parameters, and new statistics of good steps are empty.
  """
  wanted, kept = run.program, dict(state)
  if not wanted.ema:
    kept.pop('ema', None)
  elif 'ema' not in kept:
    kept['ema'] = jax.tree.map(jnp.copy, state['params'])
  if wanted.window and 'recent' not in kept:
    make = functools.partial(step_lib.recent, wanted.window)
    kept |= jax.jit(make, out_shardings=sharding.replicated(run.mesh))()
  return kept
