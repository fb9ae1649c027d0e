"""Build the optimizer: AdamW with clipping, a warm-up and a cosine decay to a floor.

After a growth, old and new tokens of one array may have different rates: see `LastGrowth`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tokenformer_jax.config import OptimConfig, old_token_rate
from tokenformer_jax.model.params import ParamInfo, Params, Role

_WITHOUT_DECAY = (Role.BIAS, Role.GAIN, Role.VECTOR)


@dataclasses.dataclass(frozen=True)
class LastGrowth:
  """The data about a model's last growth that the optimizer needs.

  Attributes:
    updates: the count of updates at the growth.
    old_tokens: a tree like the parameters, with the number of old parameter tokens of each array.
      An array without parameter tokens counts as old, for any number.
    new_layers: the numbers of the layers that are new as a whole: see `ParamInfo.depth`.
  """

  updates: int
  old_tokens: Params
  new_layers: tuple[int, ...] = ()


def learning_rate(config: OptimConfig, steps: int, start: int = 0) -> optax.Schedule:
  """Return the schedule from the number of updates made to the learning rate of the next one.

  The rate warms up linearly to the peak, then follows a cosine down to `final_fraction` of it, or
  stays constant.

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
  """Return the learning rate of a run; `restart_schedule` restarts it after a growth."""
  start = growth.updates if growth and config.restart_schedule else 0
  return learning_rate(config, steps, start)


def decay_mask(info: Params) -> Params:
  """Return which parameters decay: parameter tokens, embeddings, kernels; not norms and biases."""
  return jax.tree.map(lambda one: one.role not in _WITHOUT_DECAY, info)


def make_optimizer(
  config: OptimConfig, steps: int, info: Params, growth: LastGrowth | None = None
) -> optax.GradientTransformation:
  """Return AdamW (Loshchilov & Hutter 2019) on gradients clipped by their global norm.

  The structure of its state is the same for every config, with and without a growth.

  Args:
    config: rates, moments, decay, and the settings of old and new tokens.
    steps: the length of the run; the learning rate reaches its floor there.
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
  """Map `f(old, *arrays)` over trees; `old` broadcasts to the array and is true for old entries."""

  def on_array(one: ParamInfo, count: int, *arrays: jax.Array) -> jax.Array:
    def along(axis: int, values: jax.Array) -> jax.Array:
      return values.reshape([-1 if i == axis else 1 for i in range(arrays[0].ndim)])

    old = True
    if (axis := one.token_axis) is not None:
      old = along(axis, jnp.arange(arrays[0].shape[axis]) < count)
    if one.in_layers and not set(growth.new_layers).isdisjoint(one.depth):
      of_layers = [number not in growth.new_layers for number in one.depth]
      old &= along(0, jnp.array(of_layers))  # The first axis is 'layers'.
    return f(old, *arrays)

  return jax.tree.map(on_array, info, growth.old_tokens, *trees)


def _without_old(
  inner: optax.GradientTransformation, info: Params, growth: LastGrowth
) -> optax.GradientTransformation:
  """Hide the gradient of old entries from `inner`, and keep their moments.

  `inner` has Adam's state. It clips by the norm of the new tokens' gradient alone.
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
  """Multiply updates by −rate and, after a growth, by the factors of old and new tokens."""

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
  """Multiply the updates of a layer by `decay` once for every layer above it and once for the head.

  Parameters before the layers get one factor more than the first layer. Parameters after the
  layers keep their updates.
  """
  layers = max(max(one.depth) for one in jax.tree.leaves(info) if one.in_layers)

  def scaled(one: ParamInfo, update: jax.Array) -> jax.Array:
    if one.depth is None:
      return update
    if not one.in_layers:
      return update * decay ** (layers + 1 - one.depth)
    above = layers + 1 - jnp.asarray(one.depth)  # The first axis is 'layers'.
    return update * decay ** above.reshape(-1, *[1] * (update.ndim - 1))

  return jax.tree.map(scaled, info, updates)


def _new_token_factor(config: OptimConfig, update: jax.Array, adam_count: jax.Array) -> jax.Array:
  """Return the factor on the updates of the new tokens.

  Args:
    config: the warm-up of the new tokens, and whether their bias correction counts from the growth.
    update: the number of this update since the growth, from 1.
    adam_count: the number of this update in Adam's count, which Adam's own correction uses. Both
      numbers are equal if Adam starts at the growth: after moments are dropped, or a conversion.
  """
  update, adam_count = (jnp.maximum(n, 1).astype(jnp.float32) for n in (update, adam_count))
  factor = jnp.minimum(1.0, update / (config.new_token_warmup + 1))
  if config.new_token_correction:
    factor *= _bias_correction(config, update) / _bias_correction(config, adam_count)
  return factor


def _bias_correction(config: OptimConfig, count: jax.Array) -> jax.Array:
  """Return the factor of Adam's bias correction on the update after `count` updates."""
  return jnp.sqrt(1 - config.beta2**count) / (1 - config.beta1**count)
