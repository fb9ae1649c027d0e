"""Build the optimizer of a run: clipping, one of `optimizers.py`, decay, and a learning rate.

After a growth, old and new entries of one array may have different rates: see `entries.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tokenformer_jax.config import OptimConfig, old_token_rate
from tokenformer_jax.model.params import ParamInfo, Params
from tokenformer_jax.steps import optimizers
from tokenformer_jax.steps.entries import (
  LastGrowth,
  frozen_entries,
  hide,
  map_entries,
)
from tokenformer_jax.steps.statistics import is_masked

# A rate where only the optimizer's state matters, which does not depend on the rate.
NO_RATE = optax.schedules.constant_schedule(0.0)


def decay_mask(info: Params) -> Params:
  """Return a tree of booleans: true for tokens, embeddings and kernels, not norms and biases."""
  return jax.tree.map(lambda array: array.role not in optimizers.WITHOUT_DECAY, info)


def make_optimizer(
  config: OptimConfig, rate: optax.Schedule, info: Params, growth: LastGrowth | None = None
) -> optax.GradientTransformation:
  """Return the optimizer `optim.kind` on gradients clipped by their global norm.

  Weights decay as in AdamW (Loshchilov & Hutter 2019): by the rate, and not through the optimizer.
  For each name the structure of the state is the same for every config, with and without a growth.
  `rate` is from `schedules.schedule`, `info` is `Definition.info`.
  """
  old = None if growth is None else growth.old
  frozen = frozen_entries(info)
  hidden = [frozen] if frozen else []
  if old is not None and old_token_rate(config) == 0:
    hidden = [old, *hidden]
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  clipped = optax.chain(clip, optimizers.scale(config, info, *hidden))
  for entries in hidden:
    clipped = hide(clipped, entries)
  chain = optax.chain(
    clipped,
    optax.add_decayed_weights(config.weight_decay, mask=decay_mask(info)),
    _scale_by_rates(config, rate, info, growth),
  )

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    gradient, adam_count = updates, 0
    if config.new_token_correction:  # only of Adam, whose correction it undoes
      (_, adam), *_ = state
      adam_count = adam.count
    trained = zero_untrained(info, gradient)
    updates, state = chain.update(trained, state, params, adam_count=adam_count)
    if frozen is not None:
      updates = map_entries(lambda is_frozen, u: jnp.where(is_frozen, 0, u), frozen, updates)
    return _with_own_updates(config, info, gradient, updates, old), state

  return optax.GradientTransformation(chain.init, update)


def zero_untrained(info: Params, gradient: Params) -> Params:
  """Return the gradient, with zeros for arrays that have an update of their own."""
  return jax.tree.map(
    lambda array, g: g if array.own_update is None else jnp.zeros_like(g), info, gradient
  )


def _with_own_updates(
  config: OptimConfig, info: Params, gradient: Params, updates: Params, old: Params | None
) -> Params:
  """Return the updates, with `own_update` for arrays that the optimizer does not train.

  After a growth, `optim.old_tokens` holds for old entries of these arrays as well.
  """
  own = jax.tree.map(
    lambda array, g: optax.MaskedNode() if array.own_update is None else array.own_update(g),
    info,
    gradient,
  )
  if old is not None:
    factor = old_token_rate(config)
    own = map_entries(lambda is_old, u: u * jnp.where(is_old, factor, 1), old, own)
  return jax.tree.map(lambda _, new, u: u if is_masked(new) else new, info, own, updates)


def _scale_by_rates(
  config: OptimConfig, rate: optax.Schedule, info: Params, growth: LastGrowth | None
) -> optax.GradientTransformationExtraArgs:
  """Multiply updates by −rate and, after a growth, by the factors of old and new entries."""

  def update(
    updates: Any, state: Any, params: Any = None, *, adam_count: Any = 0, **unused: Any
  ) -> tuple[Any, Any]:
    del params, unused
    learning_rate: Any = rate(state.count)
    step = -learning_rate
    if config.layer_decay != 1:
      updates = _by_depth(config.layer_decay, info, updates)
    if growth is None:
      updates = jax.tree.map(lambda u: step * u, updates)
    else:
      factor_old = step * old_token_rate(config)
      since = state.count - growth.updates + 1
      factor_new = step * _new_token_factor(config, since, adam_count + 1)
      updates = map_entries(
        lambda is_old, u: u * jnp.where(is_old, factor_old, factor_new), growth.old, updates
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
  layers = max(max(array.depth) for array in jax.tree.leaves(info) if array.in_layers)

  def scaled(info: ParamInfo, update: jax.Array) -> jax.Array:
    if info.depth is None:
      return update
    if isinstance(info.depth, int):
      return update * decay ** (layers + 1 - info.depth)
    above = layers + 1 - jnp.asarray(info.depth)  # The first axis is 'layers'.
    return update * decay ** above.reshape(-1, *[1] * (update.ndim - 1))

  return jax.tree.map(scaled, info, updates)


def _new_token_factor(config: OptimConfig, update: jax.Array, adam_count: jax.Array) -> jax.Array:
  """Return the factor on the updates of the new tokens.

  `update` is the number of this update since the growth, from 1, and `adam_count` that in Adam's
  count, which Adam's own correction uses. Both are equal if Adam starts at the growth: after
  moments are dropped, or a conversion.
  """
  update, adam_count = (jnp.maximum(n, 1).astype(jnp.float32) for n in (update, adam_count))
  factor = jnp.minimum(1.0, update / (config.new_token_warmup + 1))
  if config.new_token_correction:
    factor *= _bias_correction(config, update) / _bias_correction(config, adam_count)
  return factor


def _bias_correction(config: OptimConfig, count: jax.Array) -> jax.Array:
  """Return the factor of Adam's bias correction on the update after `count` updates."""
  return jnp.sqrt(1 - config.beta2**count) / (1 - config.beta1**count)
