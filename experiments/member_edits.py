"""Change the state of a grown model before it trains on, for experiments/mixing.py."""

import jax
import jax.numpy as jnp

from tokenformer_jax.model.params import ParamInfo, Params, Role
from tokenformer_jax.steps import statistics
from tokenformer_jax.steps.step import State


def shrunk_keys(state: State, info: Params, std: float, is_new: Params) -> State:
  """Scale trained keys back to the size of drawn ones, with their moments.

  The norm of scores divides the scale of keys out, so the function stays the same, and the same
  update turns the keys further.
  """

  def factor(info: ParamInfo, array: jax.Array, new: jax.Array) -> jax.Array:
    if info.role is not Role.KEY:
      return jnp.ones((1,) * array.ndim)
    old = jnp.broadcast_to(1 - new, array.shape)
    over = tuple(i for i, axis in enumerate(info.axes) if axis != 'layers')
    square = jnp.sum(old * jnp.square(array), over, keepdims=True)
    mean = square / jnp.maximum(1, jnp.sum(old, over, keepdims=True))
    scale = jnp.minimum(1, std / jnp.sqrt(mean + 1e-12))
    return jnp.where(new > 0, 1.0, scale)

  factors = jax.tree.map(factor, info, state['params'], is_new)

  def moment(name: str, tree: Params) -> Params:
    power = statistics.ORDERS[name]
    return jax.tree.map(
      lambda f, old: old if statistics.is_masked(old) else old / f**power, factors, tree
    )

  return {
    'params': jax.tree.map(jnp.multiply, state['params'], factors),
    'opt_state': statistics.map_state(moment, lambda _, count: count, state['opt_state']),
  }


def halved(state: State, info: Params, std: float, is_new: Params) -> State:
  """Halve the old matrices of the layers (Ash & Adams 2020, arXiv 1910.08475)."""
  del std, is_new
  params = jax.tree.map(
    lambda info, array: array / 2 if info.in_layers else array,
    info,
    state['params'],
  )
  return {**state, 'params': params}


def small_values(state: State, info: Params, std: float, is_new: Params) -> State:
  """Take a tenth of the values that are new."""

  def scaled(info: ParamInfo, array: jax.Array, new: jax.Array) -> jax.Array:
    return array * jnp.where(new > 0, 0.1, 1.0) if info.role is Role.VALUE else array

  del std
  return {**state, 'params': jax.tree.map(scaled, info, state['params'], is_new)}


EDITS = {'keys': shrunk_keys, 'half': halved, 'small': small_values}
