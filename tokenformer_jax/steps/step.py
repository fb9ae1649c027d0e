"""Make the state of a run, and compile its training and evaluation steps."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from tokenformer_jax.config import Config, OptimConfig, skip_window
from tokenformer_jax.model.layer import Counts
from tokenformer_jax.model.params import Definition, Params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps import compiler, elastic, optim, outliers, schedules, statistics
from tokenformer_jax.steps.entries import LastGrowth
from tokenformer_jax.tasks import Batch, Task
from tokenformer_jax.tasks.task import Figures, reported

State = dict[str, Any]
Step = Callable[..., Any]  # (State, Batch, …) → (State, figures)


def initial_state(
  definition: Definition,
  tx: optax.GradientTransformation,
  seed: jax.Array,
  *,
  ema: bool = False,
  window: int = 0,
) -> State:
  """Return new parameters, with the optimizer's state and the counters of the run.

  `step` counts batches, `skipped` counts steps that changed nothing, and `skipped_in_a_row` counts
  these since the last good step. The optional `ema` is a moving average of `params`. With a
  `window`, `recent` has the statistics of that many good steps: see `outliers.initial`. Under jit
  with `state_shardings`, no host or device holds more than its part.
  """
  return _state_of(definition.init(jax.random.key(seed)), tx, ema=ema, window=window)


def _state_of(params: Params, tx: optax.GradientTransformation, *, ema: bool, window: int) -> State:
  average = {'ema': params} if ema else {}
  return {'params': params, **average, 'opt_state': tx.init(params), **_counters(window)}


def _shapes(definition: Definition, tx: optax.GradientTransformation, **optional: Any) -> State:
  """Return shapes and dtypes of a new state; nothing that draws is traced."""
  return jax.eval_shape(lambda params: _state_of(params, tx, **optional), definition.abstract)


def state_shardings(
  mesh: Mesh | AbstractMesh,
  definition: Definition,
  tx: optax.GradientTransformation,
  *,
  ema: bool = False,
  window: int = 0,
) -> State:
  """Return the sharding of every array of the state; for the arguments see `initial_state`."""
  opt_state = statistics.shardings(mesh, tx, definition.abstract, definition.axes)
  params = sharding.tree_shardings(mesh, definition.axes)
  return {
    'params': params,
    **({'ema': params} if ema else {}),
    'opt_state': opt_state,
    **jax.tree.map(lambda _: sharding.replicated(mesh), _counters(window)),
  }


def abstract_state(
  mesh: Mesh | AbstractMesh, definition: Definition, config: OptimConfig, *, ema: bool = False
) -> State:
  """Return shapes and shardings of a state; an array that the mesh does not divide stays whole."""
  tx = optim.make_optimizer(config, optim.NO_RATE, definition.info)
  state = _shapes(definition, tx, ema=ema, window=0)
  return sharding.with_even_shardings(state, state_shardings(mesh, definition, tx, ema=ema))


def bytes_on_a_device(
  mesh: Mesh | AbstractMesh, definition: Definition, config: OptimConfig, *, ema: bool = False
) -> tuple[int, int]:
  """Return the bytes on a device of a state's parameters, and of its average and optimizer state.

  Counters are left out.
  """
  state = abstract_state(mesh, definition, config, ema=ema)

  def size(name: str) -> int:
    return sum(
      math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
      for array in jax.tree.leaves(state.get(name))
      if array.ndim
    )

  return size('params'), size('opt_state') + size('ema')


def recent(window: int) -> State:
  """Return the entry `recent` of a new state with a window, or nothing for a window of 0."""
  return {'recent': outliers.initial(window)} if window else {}


def _counters(window: int) -> State:
  counters = {name: jnp.zeros((), jnp.int32) for name in ('step', 'skipped', 'skipped_in_a_row')}
  return {**counters, **recent(window)}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """The parts of a training step, each made once: see `make_program`.

  Attributes:
    config: the config of the run, with every size filled in and every length in steps.
    task: the task, with model and loss.
    growth: the model's last growth, or None.
    rate: the learning rate by the number of updates.
    tx: the optimizer, with that rate.
  """

  config: Config
  task: Task
  growth: LastGrowth | None
  rate: optax.Schedule
  tx: optax.GradientTransformation

  @property
  def ema(self) -> bool:
    """Whether the state has a moving average of the parameters."""
    return self.config.train.ema > 0

  @property
  def window(self) -> int:
    """The number of good steps whose statistics the state has; 0: none."""
    return skip_window(self.config.optim)

  def initial_state(self, seed: jax.Array) -> State:
    """Return a new state: see `initial_state`."""
    optional = {'ema': self.ema, 'window': self.window}
    return initial_state(self.task.definition, self.tx, seed, **optional)

  def state_shardings(self, mesh: Mesh | AbstractMesh) -> State:
    """Return the sharding of every array of the state."""
    optional = {'ema': self.ema, 'window': self.window}
    return state_shardings(mesh, self.task.definition, self.tx, **optional)

  def abstract_state(self, mesh: Mesh | AbstractMesh) -> State:
    """Return shapes, dtypes and shardings of the state."""
    state = _shapes(self.task.definition, self.tx, ema=self.ema, window=self.window)
    return sharding.with_shardings(state, self.state_shardings(mesh))

  def abstract_batch(self, mesh: Mesh | AbstractMesh) -> Any:
    """Return shapes, dtypes and shardings of a batch."""
    rows = sharding.batch_sharding(mesh)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), self.task.abstract_batch()
    )


def make_program(task: Task, config: Config, growth: LastGrowth | None = None) -> Program:
  """Return the parts of a training step; `config` has every size, and every length in steps."""
  rate = schedules.schedule(config.optim, config.train.steps, growth, config.train.decay_from)
  tx = optim.make_optimizer(config.optim, rate, task.definition.info, growth)
  return Program(config, task, growth, rate, tx)


def make_first_state(program: Program, mesh: Mesh) -> Callable[[int], State]:
  """Return the compiled function that makes a new state from a seed: see `initial_state`."""
  return jax.jit(program.initial_state, out_shardings=program.state_shardings(mesh))


def make_train_step(program: Program, mesh: Mesh) -> jax.stages.Wrapped:
  """Return the compiled training step: `(state, batch) → (state, figures)`.

  The step donates the old state. If the task has a teacher, its parameters are a third argument,
  which the step does not donate, sharded by the rules of all parameters. The batch is the task's,
  split over the devices by rows. A step whose loss or gradient is not finite, or too large by
  `optim.skip_deviations`, changes neither parameters nor optimizer state. Random draws are a
  function of `config.train.seed` and the step.
  """
  config, task, rate, tx = program.config, program.task, program.rate, program.tx
  loss = task.loss
  if config.train.nested_rows:
    loss = elastic.with_nested_rows(task, config.train.nested_rows)
  gradient = _gradient(loss, config.optim.accumulation_steps, task.counts)
  accept_step = _accept_step(config)

  def step(state: State, batch: Batch, *teacher: Params) -> tuple[State, dict[str, jax.Array]]:
    params, opt_state = state['params'], state['opt_state']
    key = jax.random.fold_in(jax.random.key(config.train.seed), state['step'])
    grads, figures = gradient(params, batch, key, *teacher)
    figures, info = reported(figures), task.definition.info
    grad_norm = optax.tree.norm(optim.zero_untrained(info, grads))
    updates, new_opt_state = tx.update(grads, opt_state, params)
    new = (optax.apply_updates(params, updates), new_opt_state)
    good, recent_after = accept_step(state, figures['loss'], grad_norm)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(good, new, old), new, (params, opt_state)
    )
    counters = {
      'step': state['step'] + 1,
      'skipped': state['skipped'] + ~good,
      'skipped_in_a_row': jnp.where(good, 0, state['skipped_in_a_row'] + 1),
    }
    updates_made = counters['step'] - counters['skipped']
    average = {}
    if config.train.ema:
      rate_of_old = jnp.where(good, _ema_decay(config.train.ema, updates_made), 1)
      average = {'ema': optax.incremental_update(params, state['ema'], 1 - rate_of_old)}
    state = {
      **state,
      'params': params,
      **average,
      'opt_state': opt_state,
      **counters,
      **recent_after,
    }
    figures |= {
      'grad_norm': grad_norm,
      'update_norm': optax.tree.norm(updates),
      'learning_rate': rate(jnp.maximum(updates_made - 1, 0)),
      'skipped_steps': state['skipped'],
      'skipped_in_a_row': state['skipped_in_a_row'],
    }
    if recent_after:
      figures['outlier_steps'] = state['recent']['outliers']
    return state, figures

  options = compiler.options(config.train.compiler_options, mesh)
  shardings = program.state_shardings(mesh)
  fixed = [sharding.tree_shardings(mesh, task.teacher.axes)] if task.teacher else []
  return jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(shardings, sharding.batch_sharding(mesh), *fixed),
    out_shardings=(shardings, sharding.replicated(mesh)),
    compiler_options=options or None,
  )


def _accept_step(config: Config) -> Callable[..., tuple[jax.Array, State]]:
  """Return the function that says whether to make a step, of a state, the loss and the norm.

  It also returns the entry `recent` of the next state, if there is one.
  """
  if not config.optim.skip_deviations:
    return lambda state, loss, norm: (jnp.isfinite(loss) & jnp.isfinite(norm), {})

  def accept_step(state: State, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, State]:
    good, after = outliers.accept_step(
      state['recent'],
      {'loss': loss, 'grad_norm': norm},
      finite=jnp.isfinite(loss) & jnp.isfinite(norm),
      # The run would end after `max_skipped_steps` in a row.
      may_skip=state['skipped_in_a_row'] < config.train.max_skipped_steps - 1,
      deviations=config.optim.skip_deviations,
    )
    return good, {'recent': after}

  return accept_step


def _gradient(
  loss: Callable[..., tuple[jax.Array, Figures]],
  microbatches: int,
  counts: Callable[[Batch], Counts],
) -> Callable[..., tuple[Params, Figures]]:
  """Return the function for the loss gradient and figures of a batch, summed over microbatches.

  Its arguments are those of the loss: parameters, batch, key, and the teacher's parameters. Each
  microbatch divides its sums by the `counts` of the whole batch, so that the results add up.
  """
  gradient = jax.grad(loss, has_aux=True)
  if microbatches == 1:
    return gradient

  # Each device divides its own rows, so no row moves to another device.
  def divide(x_Bx: jax.Array) -> jax.Array:
    rows = x_Bx.shape[0] // microbatches
    return x_Bx.reshape(rows, microbatches, *x_Bx.shape[1:]).swapaxes(0, 1)

  def accumulated(
    params: Params, batch: Batch, key: jax.Array, *teacher: Params
  ) -> tuple[Params, Figures]:
    batch_M = jax.tree.map(divide, batch)
    whole_counts = jax.tree.map(lambda count: jnp.sum(count, axis=0), jax.vmap(counts)(batch_M))
    of_microbatch = functools.partial(gradient, counts=whole_counts)

    def add(total: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
      number, rows = numbered
      rows = jax.tree.map(lambda x: sharding.constrain(x, 'batch', *[None] * (x.ndim - 1)), rows)
      new = of_microbatch(params, rows, jax.random.fold_in(key, number), *teacher)
      return jax.tree.map(jnp.add, total, new), None

    first = jax.tree.map(lambda x: x[0], batch_M)
    shapes = jax.eval_shape(of_microbatch, params, first, key, *teacher)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zero, (jnp.arange(microbatches), batch_M))[0]

  return accumulated


def _ema_decay(decay: float, updates: jax.Array) -> jax.Array:
  """Return the decay of the average: smaller at first, so that early parameters fade quickly."""
  return jnp.minimum(decay, (1 + updates) / (10 + updates))


def make_eval_step(task: Task, mesh: Mesh) -> Callable[..., Any]:
  """Return the compiled evaluation step: `Task.sums` of a validation batch."""
  options = compiler.eval_options(task.config.train.compiler_options, mesh)
  return jax.jit(
    task.sums, out_shardings=sharding.replicated(mesh), compiler_options=options or None
  )
