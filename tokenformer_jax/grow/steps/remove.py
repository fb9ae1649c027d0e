"""Keep some of the parameter tokens of a model, or multiply their values."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.config.groups import Choice
from tokenformer_jax.grow.steps.step import Arrays, Keys, Selection, Step
from tokenformer_jax.model import group_trees, models
from tokenformer_jax.model.params import Params, Path, Role, lookup


class KeepFirst(Selection):
  """Keeps the first tokens or neurons: the inverse of steps that put others behind them."""

  def select(self, path: Path, old: Arrays) -> jax.Array:
    array, shape = old(path), self.like(path).shape
    return array if array.shape == shape else jax.lax.slice(array, [0] * len(shape), shape)


@dataclasses.dataclass(frozen=True)
class TakeGroups(Selection):
  """Keeps a choice of the groups of each projection, in its order."""

  choice: Choice

  def select(self, path: Path, old: Arrays) -> jax.Array:
    return group_trees.take_groups(old(path), lookup(self.info_before, path), self.choice)


@dataclasses.dataclass(frozen=True)
class TakeLastTokens(Selection):
  """Keeps the tokens behind those of the model `base`; a projection may keep none."""

  base: ModelConfig

  def select(self, path: Path, old: Arrays) -> jax.Array:
    array, definition = old(path), models.define(self.base)
    axis = lookup(self.info_before, path).token_axis
    first = lookup(models.define(self.before).counts_in(definition), path)
    return array if axis is None else jax.lax.slice_in_dim(array, first, None, axis=axis)


@dataclasses.dataclass(frozen=True)
class TakeTokens(Selection):
  """Keeps the tokens with the numbers [..., N] in `data`, which `most_important` chooses."""

  def select(self, path: Path, old: Arrays) -> jax.Array:
    array, axis = old(path), self.info(path).token_axis
    if axis is None or array.shape[axis] == self.like(path).shape[axis]:
      return array
    return jnp.take_along_axis(array, self.own(path)[..., None], axis=axis)


def most_important(importance: Params, before: ModelConfig, after: ModelConfig) -> Params:
  """Return the numbers of the most important tokens of each group of each layer, in order.

  The smaller model may have fewer groups; then the last ones go. `importance` is [..., N] for each
  array of parameter tokens, from `importance.score_tokens`.
  """
  info, smaller = models.define(before).info, models.define(after).info

  def choose(path: Path, score: jax.Array) -> jax.Array:
    kept, start = [], 0
    groups = zip(lookup(info, path).groups, lookup(smaller, path).groups, strict=False)
    for size, count in groups:
      best = jax.lax.top_k(score[..., start : start + size], count)[1]
      kept.append(start + jnp.sort(best, axis=-1))
      start += size
    return jnp.concatenate(kept, axis=-1) if kept else jnp.zeros((), jnp.int32)

  return jax.tree.map_with_path(choose, importance)


@dataclasses.dataclass(frozen=True)
class ScaleGroups(Step):
  """Multiplies the values of numbered groups, and thereby their share of an output."""

  numbers: Collection[int]
  factor: float

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    del keys
    array, info = old(path), self.info(path)
    ends = np.cumsum(info.groups)
    numbers = [number for number in self.numbers if number <= len(ends)]
    if info.token_axis is None or info.role is not Role.VALUE or not numbers:
      return array
    shape = [array.shape[axis] if axis == info.token_axis else 1 for axis in range(array.ndim)]
    position = jax.lax.broadcasted_iota(jnp.int32, shape, info.token_axis)
    chosen = jnp.zeros(shape, bool)
    for number in numbers:
      end = int(ends[number - 1])
      chosen |= (position >= end - info.groups[number - 1]) & (position < end)
    return jnp.where(chosen, self.factor * array, array)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    del order
    return old(path)
