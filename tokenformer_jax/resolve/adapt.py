"""Adapt a trained vision transformer to other images: a head of their classes, other positions."""

import dataclasses

import jax
import jax.numpy as jnp

from tokenformer_jax.config import ModelConfig, ViTConfig
from tokenformer_jax.grow.steps.step import Arrays, Keys, Step
from tokenformer_jax.model import models, vit
from tokenformer_jax.model.params import Path, lookup


def adapted(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the source with the target's classes, initialization and number of positions.

  A language model stays as it is. `Adapt` makes the same changes to parameters.
  """
  if not (isinstance(source, ViTConfig) and isinstance(target, ViTConfig)):
    return source
  changes = {'classes': target.classes, 'init': target.init}
  if source.position_embedding == target.position_embedding == 'learned':
    changes['max_length'] = target.max_length
  return dataclasses.replace(source, **changes)


@dataclasses.dataclass(frozen=True)
class Adapt(Step):
  """Draws a new head if the classes differ, and resamples positions.

  `seed` is that of the head. `new_head` draws one even if the old one has the right shape.
  """

  seed: int
  new_head: bool = False

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    del keys
    if self._draws(path, old):
      return lookup(models.define(self.after).init(jax.random.key(self.seed)), path)
    if self._resamples(path, old):
      return vit.resample_positions(old(path), self.after.max_length)
    return old(path)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a moment; it is zero in a new head, and where resampling could make it negative."""
    del order
    if self._draws(path, old) or self._resamples(path, old):
      return jnp.zeros(self.like(path).shape, self.like(path).dtype)
    return old(path)

  def _draws(self, path: Path, old: Arrays) -> bool:
    """Return whether the array at a path is one of a new head."""
    return path[0].key == 'head' and (self.new_head or old(path).shape != self.like(path).shape)

  def _resamples(self, path: Path, old: Arrays) -> bool:
    return path[0].key == 'positions' and old(path).shape != self.like(path).shape
