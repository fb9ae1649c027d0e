"""The state of a run and the compiled functions over it: the training and the evaluation step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tokenformer_jax import optim, sharding
from tokenformer_jax.config import Config
from tokenformer_jax.loss import LossSums, loss_sums
from tokenformer_jax.params import Definition, Params

State = dict[str, Any]
Step = Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]


def initial_state(
  definition: Definition, tx: optax.GradientTransformation, seed: jax.Array
) -> State:
  """New parameters, with the optimizer's state and the counters of the run.

  `step` counts batches, `skipped` the steps whose gradient was not finite, `skipped_in_a_row` those
  of them since the last good step. Traced under jit with `state_shardings`, no host or device ever
  holds more than its part.
  """
  params = definition.init(jax.random.key(seed))
  return {'params': params, 'opt_state': tx.init(params), **_counters()}


def state_shardings(mesh: Mesh, definition: Definition, tx: optax.GradientTransformation) -> State:
  """Where every array of the state lives."""
  return {
    'params': sharding.of_axes(mesh, definition.axes),
    'opt_state': sharding.of_optimizer_state(mesh, tx, definition.abstract, definition.axes),
    **jax.tree.map(lambda _: sharding.replicated(mesh), _counters()),
  }


def _counters() -> dict[str, jax.Array]:
  return {name: jnp.zeros((), jnp.int32) for name in ('step', 'skipped', 'skipped_in_a_row')}


def make_train_step(
  definition: Definition,
  tx: optax.GradientTransformation,
  config: Config,
  mesh: Mesh,
  growth: optim.LastGrowth | None = None,
) -> Step:
  """The compiled training step: `(state, batch) → (state, figures)`; the old state is donated.

  The batch is int32 [B, T + 1], inputs and targets, split over the devices by rows. A step whose
  loss or gradient is not finite changes neither parameters nor optimizer state. `growth` is what
  `tx` was made with.
  """
  rate = optim.schedule(config.optim, config.train.steps, growth)
  parts = config.optim.accumulation_steps

  def loss(params: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    sums = _sums(definition, params, batch, config.train.loss_chunk)
    # Every part has the same number of targets, so the mean over the batch is that of the parts.
    nats = sums.nats / sums.tokens
    return nats + config.optim.z_loss * sums.log_z_squared / sums.tokens, nats

  gradient = jax.grad(loss, has_aux=True)

  def whole_gradient(params: Params, batch: jax.Array) -> tuple[Params, jax.Array]:
    if parts == 1:
      return gradient(params, batch)
    # Every device's rows are dealt out to the parts, so that no row moves to another device.
    batch_PxBxT = batch.reshape(batch.shape[0] // parts, parts, -1).swapaxes(0, 1)

    def add(total, part):
      part = sharding.constrain(part, 'batch', None)
      return jax.tree.map(lambda t, new: t + new / parts, total, gradient(params, part)), None

    zero = jax.tree.map(jnp.zeros_like, (params, jnp.zeros(())))
    return jax.lax.scan(add, zero, batch_PxBxT)[0]

  def step(state: State, batch: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    params, opt_state = state['params'], state['opt_state']
    grads, nats = whole_gradient(params, batch)
    grad_norm = optax.tree.norm(grads)
    updates, new_opt_state = tx.update(grads, opt_state, params)
    new = (optax.apply_updates(params, updates), new_opt_state)
    good = jnp.isfinite(nats) & jnp.isfinite(grad_norm)
    params, opt_state = jax.tree.map(
      lambda new, old: jnp.where(good, new, old), new, (params, opt_state)
    )
    state = {
      'params': params,
      'opt_state': opt_state,
      'step': state['step'] + 1,
      'skipped': state['skipped'] + ~good,
      'skipped_in_a_row': jnp.where(good, 0, state['skipped_in_a_row'] + 1),
    }
    updates_made = state['step'] - state['skipped']
    figures = {
      'loss': nats,
      'grad_norm': grad_norm,
      'update_norm': optax.tree.norm(updates),
      'learning_rate': rate(jnp.maximum(updates_made - 1, 0)),
      'skipped_steps': state['skipped'],
      'skipped_in_a_row': state['skipped_in_a_row'],
    }
    return state, figures

  shardings = state_shardings(mesh, definition, tx)
  return jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(shardings, sharding.of_batch(mesh)),
    out_shardings=(shardings, sharding.replicated(mesh)),
  )


def make_eval_step(
  definition: Definition, config: Config, mesh: Mesh
) -> Callable[[Params, jax.Array], LossSums]:
  """The compiled evaluation step: sums over the targets of a batch [B, T + 1] that are not −1."""
  return jax.jit(
    functools.partial(_sums, definition, chunk=config.train.loss_chunk),
    out_shardings=sharding.replicated(mesh),
  )


def _sums(definition: Definition, params: Params, batch: jax.Array, chunk: int) -> LossSums:
  model = definition.bind(params)
  hidden_BxTxD, _ = model.hidden(jnp.maximum(batch[:, :-1], 0))
  return loss_sums(hidden_BxTxD, model.output_embedding, batch[:, 1:], chunk=chunk)
