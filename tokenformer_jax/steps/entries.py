"""Entries of arrays that an optimizer treats apart: old ones after a growth, frozen groups."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.params import ParamInfo, Params
from tokenformer_jax.parallel.rules import Axes
from tokenformer_jax.steps.statistics import is_masked, kept_axes, map_state

NO_NEW_EXPERTS = -1  # in place of a number of old experts

Ranges = tuple[tuple[int, int], ...]  # the first index of each range, and the one after its last


@dataclasses.dataclass(frozen=True)
class Entries:
  """The entries of an array that lie in some ranges along each of some axes.

  Attributes:
    axes: the logical axes of the array.
    ranges: the ranges along each limited axis, by its name. An array without one of these axes has
      no such entries.
  """

  axes: Axes
  ranges: Mapping[str, Ranges]

  def mask(
    self,
    shape: tuple[int, ...],
    statistic: str = '',
    iota: Callable[..., Any] = jax.lax.broadcasted_iota,
  ) -> Any:
    """Return which entries these are in the array, or in its statistic, of this shape.

    The mask broadcasts to the shape. A statistic without a limited axis is over other entries as
    well, and has none of these. The mask is computed from the positions that `iota` makes, so
    programs hold no constants.
    """
    axes = kept_axes(statistic, self.axes)
    if not set(self.ranges) <= set(axes):
      return False

    def along(axis: int, ranges: Ranges) -> jax.Array:
      sizes = [size if i == axis else 1 for i, size in enumerate(shape)]
      position = iota(jnp.int32, sizes, axis)
      inside = ((position >= first) & (position < end) for first, end in ranges)
      return functools.reduce(operator.or_, inside, position < 0)

    masks = (along(axes.index(axis), ranges) for axis, ranges in self.ranges.items())
    return functools.reduce(operator.and_, masks, True)

  def are_all(self, shape: tuple[int, ...]) -> bool:
    """Return whether these are all entries of an array of this shape."""
    counts = {axis: sum(end - first for first, end in own) for axis, own in self.ranges.items()}
    return all(shape[self.axes.index(axis)] == count for axis, count in counts.items())


@dataclasses.dataclass(frozen=True)
class LastGrowth:
  """A model's last growth, for the optimizer.

  Attributes:
    updates: the count of updates at the growth.
    old: a tree like the parameters, with the `Entries` that each array had before the growth.
    before: the model before the growth, if it is known.
  """

  updates: int
  old: Params
  before: ModelConfig | None = None


def old_entries(
  info: Params,
  tokens: Params,
  new_layers: Collection[int] = (),
  experts: Params | None = None,
) -> Params:
  """Return the old `Entries` of each array.

  Args:
    info: `Definition.info`.
    tokens: the number of old parameter tokens of each array; any number for an array without.
    new_layers: the numbers of the layers that are new as a whole: see `ParamInfo.depth`.
    experts: the number of old experts of each array, or `NO_NEW_EXPERTS`. None: no new experts.
  """

  def of_array(info: ParamInfo, tokens: int, experts: int = NO_NEW_EXPERTS) -> Entries:
    ranges: dict[str, Ranges] = {}
    if info.token_axis is not None:
      ranges['param_tokens'] = ((0, tokens),)
    if info.expert_axis is not None and experts != NO_NEW_EXPERTS:
      ranges[info.axes[info.expert_axis]] = ((0, experts),)
    if isinstance(info.depth, tuple) and not set(new_layers).isdisjoint(info.depth):
      ranges['layers'] = tuple(
        (i, i + 1) for i, number in enumerate(info.depth) if number not in new_layers
      )
    return Entries(info.axes, ranges)

  return jax.tree.map(of_array, info, tokens, *(() if experts is None else (experts,)))


def frozen_entries(info: Params) -> Params | None:
  """Return the `Entries` of each array that lie in frozen groups; None without such groups."""
  if not any(any(array.frozen) for array in jax.tree.leaves(info)):
    return None

  def of_array(info: ParamInfo) -> Entries:
    spans = zip(_group_ranges(info), info.frozen, strict=False)
    return Entries(info.axes, {'param_tokens': tuple(span for span, frozen in spans if frozen)})

  return jax.tree.map(of_array, info)


def _group_ranges(info: ParamInfo) -> Ranges:
  ends = list(itertools.accumulate(info.groups))
  return tuple(zip([0, *ends], ends, strict=False))


def visible(shape: tuple[int, ...], *hidden: Entries) -> np.ndarray:
  """Return which entries of an array are in none of the `hidden`; broadcasts to its shape."""

  def iota(dtype: Any, sizes: Sequence[int], axis: int) -> np.ndarray:
    return np.arange(sizes[axis], dtype=dtype).reshape(sizes)

  masks = (np.logical_not(entries.mask(shape, iota=iota)) for entries in hidden)
  return functools.reduce(np.logical_and, masks, np.ones([1] * len(shape), bool))


def map_entries(
  f: Callable[..., jax.Array], entries: Params, *trees: Params, statistic: str = ''
) -> Params:
  """Map `f(mask, *arrays)` over trees like the parameters, which hold their `statistic`."""

  def on_array(entries: Entries, *arrays: Any) -> Any:
    if is_masked(arrays[0]):
      return arrays[0]
    return f(entries.mask(arrays[0].shape, statistic), *arrays)

  return jax.tree.map(on_array, entries, *trees)


def hide(inner: optax.GradientTransformation, entries: Params) -> optax.GradientTransformation:
  """Hide gradients and statistics of some entries from `inner`, and keep these statistics.

  `inner` clips by the norm of the other entries' gradient alone, and orthogonalizes them alone.
  """

  def zeroed(tree: Params, statistic: str = '') -> Params:
    return map_entries(
      lambda hidden, x: jnp.where(hidden, 0, x), entries, tree, statistic=statistic
    )

  def kept(statistic: str, before: Params, after: Params) -> Params:
    return map_entries(
      lambda hidden, a, b: jnp.where(hidden, a, b), entries, before, after, statistic=statistic
    )

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    seen = map_state(lambda name, tree: zeroed(tree, name), lambda _, count: count, state)
    updates, new = inner.update(zeroed(updates), seen, params)
    return updates, map_state(kept, lambda _, before, after: after, state, new)

  return optax.GradientTransformation(inner.init, update)
