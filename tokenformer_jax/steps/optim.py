"""Build the optimizer of a run: clipping, one of `optimizers.py`, decay, and a learning rate.

After a growth, old and new tokens of one array may have different rates: see `LastGrowth`.
"""

import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tokenformer_jax.config import OptimConfig, frozen_groups, old_token_rate
from tokenformer_jax.model.params import ParamInfo, Params
from tokenformer_jax.steps import optimizers
from tokenformer_jax.steps.statistics import is_masked, kept_axes, map_state

ALL = -1  # instead of a number of old experts: the array has no new ones
# A rate where only the optimizer's state matters, which does not depend on the rate.
NO_RATE = optax.schedules.constant_schedule(0.0)


@dataclasses.dataclass(frozen=True)
class LastGrowth:
  """A model's last growth, for the optimizer.

  Attributes:
    updates: the count of updates at the growth.
    old_tokens: a tree like the parameters, with the number of old parameter tokens of each array.
      An array without parameter tokens counts as old, for any number.
    new_layers: the numbers of the layers that are new as a whole: see `ParamInfo.depth`.
    old_experts: a tree like the parameters, with the number of old experts of each array; −1: the
      array has no new ones. None: no experts are new.
  """

  updates: int
  old_tokens: Params
  new_layers: tuple[int, ...] = ()
  old_experts: Params | None = None


def decay_mask(info: Params) -> Params:
  """Return a tree of booleans: true for tokens, embeddings and kernels, not norms and biases."""
  return jax.tree.map(lambda array: array.role not in optimizers.WITHOUT_DECAY, info)


def make_optimizer(
  config: OptimConfig,
  rate: optax.Schedule,
  info: Params,
  growth: LastGrowth | None = None,
) -> optax.GradientTransformation:
  """Return the optimizer `optim.name` on gradients clipped by their global norm.

  Weights decay as in AdamW (Loshchilov & Hutter 2019): by the rate, and not through the optimizer.
  For each name the structure of the state is the same for every config, with and without a growth.
  `rate` is from `schedules.schedule`, `info` is `Definition.info`.
  """
  freezes, frozen = growth is not None and old_token_rate(config) == 0, frozen_groups(config)
  old = _hidden_tokens(info, growth) if freezes else jax.tree.map(lambda _: 0, info)
  hidden = jax.tree.map(lambda i, count: optimizers.hidden_tokens(i, frozen, count), info, old)
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  clipped = optax.chain(clip, optimizers.scale(config, info, hidden))
  in_frozen = functools.partial(_by_group, info, frozen)
  if freezes:
    clipped = _without(clipped, functools.partial(_by_age, info, growth))
  if frozen:
    clipped = _without(clipped, in_frozen)
  chain = optax.chain(
    clipped,
    optax.add_decayed_weights(config.weight_decay, mask=decay_mask(info)),
    _scale_by_rates(config, rate, info, growth),
  )

  def update(gradient: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    (_, before), *_, rates = state
    # Only Adam has a correction to undo, and only its state is a single part with a count.
    counted = before if config.new_token_correction else rates
    updates, state = chain.update(moved(info, gradient), state, params, adam_count=counted.count)
    if frozen:
      updates = in_frozen(lambda held, u: jnp.where(held, 0, u), updates)
    return _with_own(config, info, gradient, updates, growth), state

  return optax.GradientTransformation(chain.init, update)


def moved(info: Params, gradient: Params) -> Params:
  """Return the gradient of the arrays that the optimizer moves, with zeros for the others."""
  return jax.tree.map(
    lambda array, g: g if array.own_update is None else jnp.zeros_like(g), info, gradient
  )


def _with_own(
  config: OptimConfig, info: Params, gradient: Params, updates: Params, growth: LastGrowth | None
) -> Params:
  """Return the updates, with `own_update` for arrays that the optimizer does not move.

  After a growth, `optim.old_tokens` holds for old entries of these arrays as well.
  """
  own = jax.tree.map(
    lambda array, g: optax.MaskedNode() if array.own_update is None else array.own_update(g),
    info,
    gradient,
  )
  if growth is not None:
    factor = old_token_rate(config)
    own = _by_age(info, growth, lambda old, u: u * jnp.where(old, factor, 1), own)
  return jax.tree.map(lambda _, new, u: u if is_masked(new) else new, info, own, updates)


def _hidden_tokens(info: Params, growth: LastGrowth) -> Params:
  """Return the number of old parameter tokens of each array, or of each of its layers.

  It is 0 in new layers, and where the old tokens lie in old experts.
  """

  def count_old(info: ParamInfo, count: int, experts: int) -> optimizers.Count:
    if experts >= 0:
      return 0
    if not info.in_layers or set(growth.new_layers).isdisjoint(info.depth):
      return count
    return np.where(np.isin(info.depth, growth.new_layers), 0, count)

  return jax.tree.map(count_old, info, growth.old_tokens, _old_experts(growth))


def _old_experts(growth: LastGrowth) -> Params:
  """Return `growth.old_experts`, with `ALL` for each array if no experts are new."""
  if growth.old_experts is not None:
    return growth.old_experts
  return jax.tree.map(lambda _: ALL, growth.old_tokens)


def _by_group(
  info: Params,
  numbers: Sequence[int],
  f: Callable[..., jax.Array],
  *trees: Params,
  name: str = '',
) -> Params:
  """Map `f(held, *arrays)` over trees; `held` is true for tokens of the groups with these numbers.

  The arguments are those of `_by_age`.
  """

  def on_array(info: ParamInfo, held: jax.Array, *arrays: Any) -> Any:
    if is_masked(arrays[0]):
      return arrays[0]
    axes = kept_axes(name, info.axes)
    if 'param_tokens' not in axes:
      return f(False, *arrays)
    kept = [size for axis, size in zip(info.axes, held.shape, strict=True) if axis in axes]
    return f(held.reshape(kept), *arrays)

  mask = pkgutil.resolve_name('tokenformer_jax.model.group_trees:mask')  # only with frozen groups
  return jax.tree.map(on_array, info, mask(info, numbers), *trees)


def _by_age(
  info: Params, growth: LastGrowth, f: Callable[..., jax.Array], *trees: Params, name: str = ''
) -> Params:
  """Map `f(old, *arrays)` over trees; `old` broadcasts to the array and is true for old entries.

  The trees are like the parameters. `name` is that of their statistic; '' for parameters. A mean
  over old and new tokens has no old entries.
  """

  def on_array(info: ParamInfo, count: int, experts: int, *arrays: Any) -> Any:
    if is_masked(arrays[0]):
      return arrays[0]
    axes, shape = kept_axes(name, info.axes), arrays[0].shape

    def along(axis: int, values: jax.Array) -> jax.Array:
      return values.reshape([-1 if i == axis else 1 for i in range(len(shape))])

    old = True
    if info.token_axis is not None and 'param_tokens' not in axes:
      old = False
    elif info.token_axis is not None:
      axis = axes.index('param_tokens')
      old = along(axis, jnp.arange(shape[axis]) < count)
    if experts >= 0:
      expert_axis = info.axes[info.expert_axis]
      at = axes.index(expert_axis) if expert_axis in axes else None
      old &= False if at is None else along(at, jnp.arange(shape[at]) < experts)
    if info.in_layers and not set(growth.new_layers).isdisjoint(info.depth):
      is_old = [number not in growth.new_layers for number in info.depth]
      old &= along(0, jnp.array(is_old))  # The first axis is 'layers'.
    return f(old, *arrays)

  return jax.tree.map(on_array, info, growth.old_tokens, _old_experts(growth), *trees)


def _without(
  inner: optax.GradientTransformation, by_entry: Callable[..., Params]
) -> optax.GradientTransformation:
  """Hide gradients and statistics of some entries from `inner`, and keep these statistics.

  `inner` clips by the norm of the other entries' gradient alone, and orthogonalizes them alone.
  `by_entry` is `_by_age` or `_by_group` without the last arguments; true for the hidden entries.
  """

  def hidden(tree: Params, name: str = '') -> Params:
    return by_entry(lambda held, x: jnp.where(held, 0, x), tree, name=name)

  def kept(name: str, before: Params, after: Params) -> Params:
    return by_entry(lambda held, a, b: jnp.where(held, a, b), before, after, name=name)

  def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    seen = map_state(lambda name, tree: hidden(tree, name), lambda _, count: count, state)
    updates, new = inner.update(hidden(updates), seen, params)
    return updates, map_state(kept, lambda _, before, after: after, state, new)

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
        info, growth, lambda old, u: u * jnp.where(old, factor_old, factor_new), updates
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
    if not info.in_layers:
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
