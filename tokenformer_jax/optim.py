"""The optimizer: AdamW with clipping, a warm-up and a cosine decay to a floor.

In a model that has grown, the tokens of one array may move at different rates: see `LastGrowth`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tokenformer_jax.config import OptimConfig, old_token_rate
from tokenformer_jax.params import ParamInfo, Params, Role

_WITHOUT_DECAY = (Role.BIAS, Role.GAIN, Role.VECTOR)


@dataclasses.dataclass(frozen=True)
class LastGrowth:
  """What the optimizer has to know of the last growth of a model.

  Attributes:
    updates: the count of updates at which it took place.
    old_tokens: a tree like the parameters: how many of an array's parameter tokens are older. An
      array without parameter tokens is old as a whole, whatever is said here.
  """

  updates: int
  old_tokens: Params


def learning_rate(config: OptimConfig, steps: int, start: int = 0) -> optax.Schedule:
  """From the number of updates made to the learning rate of the next one.

  A linear warm-up to the peak, then a cosine (or nothing) down to `final_fraction` of it.

  Args:
    config: the peak, the length of the warm-up, and the floor.
    steps: the number of updates at which the decay ends.
    start: the number of updates at which the warm-up starts.
  """
  if config.schedule == 'constant':
    decay = optax.schedules.constant_schedule(config.learning_rate)
  else:
    decay = optax.schedules.cosine_decay_schedule(
      config.learning_rate, max(1, steps - start - config.warmup_steps), alpha=config.final_fraction
    )
  # The first update of a warm-up of W steps has the rate peak/W, the last one the peak.
  warmup = optax.schedules.linear_schedule(
    config.learning_rate / max(1, config.warmup_steps),
    config.learning_rate,
    max(1, config.warmup_steps - 1),
  )
  from_zero = optax.schedules.join_schedules([warmup, decay], [config.warmup_steps])
  return lambda count: from_zero(count - start)


def schedule(config: OptimConfig, steps: int, growth: LastGrowth | None = None) -> optax.Schedule:
  """The learning rate of a run, which after a growth starts anew if the config says so."""
  start = growth.updates if growth and config.restart_schedule else 0
  return learning_rate(config, steps, start)


def decay_mask(info: Params) -> Params:
  """Say which parameters decay: parameter tokens, embeddings and kernels; not norms and biases."""
  return jax.tree.map(lambda one: one.role not in _WITHOUT_DECAY, info)


def make_optimizer(
  config: OptimConfig, steps: int, info: Params, growth: LastGrowth | None = None
) -> optax.GradientTransformation:
  """AdamW (Loshchilov & Hutter 2019) with decoupled decay, on gradients clipped by global norm.

  Its state has the same structure whatever the config says and whether a model has grown or not.

  Args:
    config: rates, moments, decay, and how old and new tokens differ.
    steps: the length of the run, at which the learning rate reaches its floor.
    info: `Definition.info` of the model.
    growth: the last growth, or None for a model that never grew.
  """
  adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  clipped_adam = optax.chain(clip, adam)
  if growth is not None and old_token_rate(config) == 0:
    clipped_adam = _without_old(clipped_adam, info, growth)
  chain = optax.chain(
    clipped_adam,
    optax.add_decayed_weights(config.weight_decay, mask=decay_mask(info)),
    _scale_by_rates(config, schedule(config, steps, growth), info, growth),
  )

  def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    (_, before), *_ = state
    return chain.update(updates, state, params, adam_count=before.count)

  return optax.GradientTransformation(chain.init, update)


def _by_age(
  f: Callable[..., jax.Array], info: Params, growth: LastGrowth, *trees: Params
) -> Params:
  """Maps `f(old, *arrays)`; `old` is true for old entries and of a shape that broadcasts."""

  def on_array(one: ParamInfo, count: int, *arrays: jax.Array) -> jax.Array:
    if (axis := one.token_axis) is None:
      return f(True, *arrays)
    shape = arrays[0].shape
    old = jnp.arange(shape[axis]) < count
    return f(old.reshape([shape[axis] if i == axis else 1 for i in range(len(shape))]), *arrays)

  return jax.tree.map(on_array, info, growth.old_tokens, *trees)


def _without_old(
  inner: optax.GradientTransformation, info: Params, growth: LastGrowth
) -> optax.GradientTransformation:
  """Lets `inner`, which has Adam's state, see no gradient of what is old, nor change its moments.

  The gradient's norm, by which it is clipped, is that of the new tokens, too.
  """

  def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    masked = _by_age(lambda old, u: jnp.where(old, 0, u), info, growth, updates)
    updates, new = inner.update(masked, state, params)

    def keep(old_tree: Params, new_tree: Params) -> Params:
      return _by_age(lambda old, a, b: jnp.where(old, a, b), info, growth, old_tree, new_tree)

    (clip, before), (_, after) = state, new
    return updates, (
      clip,
      after._replace(mu=keep(before.mu, after.mu), nu=keep(before.nu, after.nu)),
    )

  return optax.GradientTransformation(inner.init, update)


def _scale_by_rates(
  config: OptimConfig, rate: optax.Schedule, info: Params, growth: LastGrowth | None
) -> optax.GradientTransformation:
  """Multiplies updates by −rate, and by the factors of old and new tokens after a growth."""

  def update(
    updates: Params, state: Any, params: Params | None = None, *, adam_count: jax.Array
  ) -> tuple[Params, Any]:
    del params
    step = -rate(state.count)
    if config.layer_decay != 1:
      updates = _by_depth(config.layer_decay, info, updates)
    if growth is None:
      updates = jax.tree.map(lambda u: step * u, updates)
    else:
      factor_old = step * old_token_rate(config)
      since = state.count - growth.updates + 1
      factor_new = step * _new_token_factor(config, since, adam_count + 1)
      updates = _by_age(
        lambda old, u: u * jnp.where(old, factor_old, factor_new), info, growth, updates
      )
    return updates, optax.ScaleByScheduleState(optax.safe_increment(state.count))

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), update
  )


def _by_depth(decay: float, info: Params, updates: Params) -> Params:
  """Multiply updates by `decay` once for every layer above, and once more before the layers.

  The head and what else comes after the layers keep theirs.
  """
  layers = max(
    one.depth - 1 + update.shape[0]  # 'layers' is the first axis.
    for one, update in zip(jax.tree.leaves(info), jax.tree.leaves(updates), strict=True)
    if one.in_layers
  )

  def scaled(one: ParamInfo, update: jax.Array) -> jax.Array:
    if one.depth is None:
      return update
    above = layers + 1 - one.depth
    if one.in_layers:
      above = jnp.arange(above, above - update.shape[0], -1).reshape(-1, *[1] * (update.ndim - 1))
    return update * decay**above

  return jax.tree.map(scaled, info, updates)


def _new_token_factor(config: OptimConfig, update: jax.Array, adam_count: jax.Array) -> jax.Array:
  """Return the factor on the updates of the new tokens.

  Args:
    config: the warm-up of the new tokens, and whether their bias correction counts from the growth.
    update: the number of this update, counted from 1 at the growth.
    adam_count: its number as Adam counts it, from which Adam's own correction is made. Both are
      equal where Adam starts at the growth: after moments were dropped or a model was converted.
  """
  update, adam_count = (jnp.maximum(n, 1).astype(jnp.float32) for n in (update, adam_count))
  factor = jnp.minimum(1.0, update / (config.new_token_warmup + 1))
  if config.new_token_correction:
    factor *= _bias_correction(config, update) / _bias_correction(config, adam_count)
  return factor


def _bias_correction(config: OptimConfig, count: jax.Array) -> jax.Array:
  """Return what Adam's bias correction multiplies the update by after `count` updates."""
  return jnp.sqrt(1 - config.beta2**count) / (1 - config.beta1**count)
