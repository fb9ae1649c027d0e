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
  """Halve all matrices of the layers, new and old (Ash & Adams 2020, arXiv 1910.08475)."""
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


def keys_by_gradient(state: State, info: Params, std: float, is_new: Params) -> State:
  """Aim the keys of new tokens in old layers at large gradients of their values.

  This is GradMax (Evci et al. 2022, arXiv 2201.05125) without activations. A token whose score is
  Σ cᵢ of the scores of old tokens has the gradient Σ cᵢ gᵢ of its value. For ‖c‖ = 1 it is longest
  along the left singular vectors of the gradients g, here Adam's means of the values' gradients.
  Scores are not linear, so each vector makes two tokens, with both signs. New tokens beyond them
  keep their drawn keys.
  """
  moments: dict[str, Params] = {}
  statistics.map_state(moments.setdefault, lambda _, count: count, state['opt_state'])

  def aimed(keys: jax.Array, gradients: jax.Array, old: int, new: jax.Array) -> jax.Array:
    left = jnp.linalg.svd(gradients[:, :old], full_matrices=False)[0]
    found = jnp.einsum('lnr,lnd->lrd', left, keys[:, :old])
    found *= std * found.shape[-1] ** 0.5 / jnp.linalg.norm(found, axis=-1, keepdims=True)
    both = jnp.stack([found, -found], 2).reshape(found.shape[0], -1, found.shape[-1])
    both = both[:, : keys.shape[1] - old]
    changed = keys.at[:, old : old + both.shape[1]].set(both)
    return jnp.where(new[:, :1] > 0, keys, changed)  # New layers have no gradients.

  def blocks(params: Params, gradients: Params, info: Params, new: Params) -> Params:
    if not isinstance(params, dict):
      return params
    if 'keys' not in params:
      return {name: blocks(params[name], gradients[name], info[name], new[name]) for name in params}
    old = info['keys'].groups[0]
    keys = aimed(params['keys'], gradients['values'], old, new['keys'])
    return {**params, 'keys': keys}

  return {**state, 'params': blocks(state['params'], moments['mu'], info, is_new)}


EDITS = {
  'keys': shrunk_keys,
  'half': halved,
  'small': small_values,
  'gradient': keys_by_gradient,
}
