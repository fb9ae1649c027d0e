"""Build the optimizer of a run: clipping, one of `optimizers.py`, decay, and a learning rate.

After a growth, old and new tokens of one array may have different rates: see `LastGrowth`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tokenformer_jax.config import OptimConfig, frozen_groups, old_token_rate
from tokenformer_jax.model.params import ParamInfo, Params
from tokenformer_jax.parallel.rules import Axes
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


Ranges = tuple[tuple[int, int], ...]  # the first index of each range, and the one after its last


@dataclasses.dataclass(frozen=True)
class Entries:
  """The entries of an array that lie in some ranges along each of some axes.

  Attributes:
    axes: the logical axes of the array.
    ranges: the ranges along each limited axis, by its name; None: there are no such entries.
  """

  axes: Axes
  ranges: Mapping[str, Ranges] | None

  def mask(self, shape: tuple[int, ...], name: str = '') -> jax.Array | bool:
    """Return which entries these are in the array, or in its statistic `name`, of this shape.

    The mask broadcasts to the shape. A statistic without a limited axis is over other entries as
    well, and has none of these. The mask is computed from positions, so programs hold no constants.
    """
    axes = kept_axes(name, self.axes)
    if self.ranges is None or not set(self.ranges) <= set(axes):
      return False

    def along(axis: int, ranges: Ranges) -> jax.Array:
      sizes = [size if i == axis else 1 for i, size in enumerate(shape)]
      position = jax.lax.broadcasted_iota(jnp.int32, sizes, axis)
      inside = ((position >= first) & (position < end) for first, end in ranges)
      return functools.reduce(operator.or_, inside, jnp.zeros(sizes, bool))

    masks = (along(axes.index(axis), ranges) for axis, ranges in self.ranges.items())
    return functools.reduce(operator.and_, masks, True)


def old_entries(info: Params, growth: LastGrowth) -> Params:
  """Return the `Entries` of each array that it had before the growth."""

  def of_array(info: ParamInfo, tokens: int, experts: int) -> Entries:
    ranges: dict[str, Ranges] = {}
    if info.token_axis is not None:
      ranges['param_tokens'] = ((0, tokens),)
    if info.expert_axis is not None and experts != ALL:
      ranges[info.axes[info.expert_axis]] = ((0, experts),)
    if isinstance(info.depth, tuple) and not set(growth.new_layers).isdisjoint(info.depth):
      ranges['layers'] = tuple(
        (i, i + 1) for i, number in enumerate(info.depth) if number not in growth.new_layers
      )
    return Entries(info.axes, ranges)

  return jax.tree.map(of_array, info, growth.old_tokens, _old_experts(growth))


def group_entries(info: Params, numbers: Collection[int]) -> Params:
  """Return the `Entries` of each array that are parameter tokens of the groups with these numbers.

  Groups count from 1; a projection may have fewer.
  """

  def of_array(info: ParamInfo) -> Entries:
    if info.token_axis is None:
      return Entries(info.axes, None)
    ends = np.cumsum(info.groups).tolist()
    ranges = zip([0, *ends], ends, strict=False)
    held = tuple(one for number, one in enumerate(ranges, start=1) if number in numbers)
    return Entries(info.axes, {'param_tokens': held})

  return jax.tree.map(of_array, info)


def _by_entry(
  entries: Params, f: Callable[..., jax.Array], *trees: Params, name: str = ''
) -> Params:
  """Map `f(mask, *arrays)` over trees like the parameters, which hold their statistic `name`."""

  def on_array(entries: Entries, *arrays: Any) -> Any:
    if is_masked(arrays[0]):
      return arrays[0]
    return f(entries.mask(arrays[0].shape, name), *arrays)

  return jax.tree.map(on_array, entries, *trees)


def decay_mask(info: Params) -> Params:
  """Return a tree of booleans: true for tokens, embeddings and kernels, not norms and biases."""
  return jax.tree.map(lambda array: array.role not in optimizers.WITHOUT_DECAY, info)


def make_optimizer(
  config: OptimConfig,
  rate: optax.Schedule,
  info: Params,
  growth: LastGrowth | None = None,
) -> optax.GradientTransformation:
  """Return the optimizer `optim.kind` on gradients clipped by their global norm.

  Weights decay as in AdamW (Loshchilov & Hutter 2019): by the rate, and not through the optimizer.
  For each name the structure of the state is the same for every config, with and without a growth.
  `rate` is from `schedules.schedule`, `info` is `Definition.info`.
  """
  old = None if growth is None else old_entries(info, growth)
  frozen = frozen_groups(config)
  in_frozen = group_entries(info, frozen) if frozen else None
  freezes_old = old is not None and old_token_rate(config) == 0
  counts = _hidden_tokens(info, growth) if freezes_old else jax.tree.map(lambda _: 0, info)
  hidden = jax.tree.map(lambda i, count: optimizers.hidden_tokens(i, frozen, count), info, counts)
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  clipped = optax.chain(clip, optimizers.scale(config, info, hidden))
  for entries in (old if freezes_old else None, in_frozen):
    if entries is not None:
      clipped = _without(clipped, entries)
  chain = optax.chain(
    clipped,
    optax.add_decayed_weights(config.weight_decay, mask=decay_mask(info)),
    _scale_by_rates(config, rate, info, growth, old),
  )

  def update(gradient: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
    (_, before), *_, rates = state
    # Only Adam has a correction to undo, and only its state is a single part with a count.
    counted = before if config.new_token_correction else rates
    updates, state = chain.update(moved(info, gradient), state, params, adam_count=counted.count)
    if in_frozen is not None:
      updates = _by_entry(in_frozen, lambda held, u: jnp.where(held, 0, u), updates)
    return _with_own(config, info, gradient, updates, old), state

  return optax.GradientTransformation(chain.init, update)


def moved(info: Params, gradient: Params) -> Params:
  """Return the gradient of the arrays that the optimizer moves, with zeros for the others."""
  return jax.tree.map(
    lambda array, g: g if array.own_update is None else jnp.zeros_like(g), info, gradient
  )


def _with_own(
  config: OptimConfig, info: Params, gradient: Params, updates: Params, old: Params | None
) -> Params:
  """Return the updates, with `own_update` for arrays that the optimizer does not move.

  After a growth, `optim.old_tokens` holds for old entries of these arrays as well.
  """
  own = jax.tree.map(
    lambda array, g: optax.MaskedNode() if array.own_update is None else array.own_update(g),
    info,
    gradient,
  )
  if old is not None:
    factor = old_token_rate(config)
    own = _by_entry(old, lambda is_old, u: u * jnp.where(is_old, factor, 1), own)
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


def _without(inner: optax.GradientTransformation, entries: Params) -> optax.GradientTransformation:
  """Hide gradients and statistics of some entries from `inner`, and keep these statistics.

  `inner` clips by the norm of the other entries' gradient alone, and orthogonalizes them alone.
  """
  by_entry = functools.partial(_by_entry, entries)

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
  config: OptimConfig,
  rate: optax.Schedule,
  info: Params,
  growth: LastGrowth | None,
  old: Params | None,
) -> optax.GradientTransformation:
  """Multiply updates by −rate and, after a growth, by the factors of old and new tokens."""

  def update(
    updates: Params, state: Any, params: Params | None = None, *, adam_count: jax.Array
  ) -> tuple[Params, Any]:
    del params
    step = -rate(state.count)
    if config.layer_decay != 1:
      updates = _by_depth(config.layer_decay, info, updates)
    if growth is None or old is None:
      updates = jax.tree.map(lambda u: step * u, updates)
    else:
      factor_old = step * old_token_rate(config)
      since = state.count - growth.updates + 1
      factor_new = step * _new_token_factor(config, since, adam_count + 1)
      updates = _by_entry(
        old, lambda is_old, u: u * jnp.where(is_old, factor_old, factor_new), updates
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
