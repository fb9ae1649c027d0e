"""Give tied layers, and a head that is the embedding, arrays of their own.

A tied array is used k times, and its gradient is the sum of those of its uses. After the step each
use has a copy, so no parameter as it is used changes, and no output. The gradient of a copy is one
term of the sum: in the mean, a k-th of it. So means of gradients are divided by k (of Adam,
Muon and Lion), and means of squares by k² (of Adam and Adafactor). Where all uses have equal
gradients, the next update of each copy is the one that the tied array would have got.
"""

import dataclasses
import functools
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from tokenformer_jax.config import ModelConfig, matching
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.steps.layers import Stacks
from tokenformer_jax.grow.steps.step import Arrays, Keys, Step
from tokenformer_jax.model.params import Path

_EMBEDDING, _HEAD = (DictKey('embedding'),), (DictKey('head'),)

What = Literal['layers', 'head']


def wanted(model: ModelConfig, what: What) -> ModelConfig:
  """Return the model without tied layers, or with a head of its own."""
  if what == 'head' and model.tied_head:
    return dataclasses.replace(model, tied_head=False)
  if what == 'layers' and any(repeat.tied for repeat in model.repeats):
    return matching.untied(model)
  reason = 'the head has a matrix of its own'
  if what == 'layers':
    reason = f'model.pattern is {model.pattern!r}, where no layers are tied (layer^2)'
  raise UserError(f'there is nothing to untie: {reason}')


class Untie(Step):
  """Copies tied arrays, one for each use."""

  permanent: ClassVar[str] = (
    'the last growth gave tied layers, or the head, arrays of their own, which training moves apart'
  )

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    """Return a copy of the tied array for each of its uses."""
    del keys
    return self._copy(path, old)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a moment of the tied array for each of its uses, divided by their number^order."""
    array, uses = self._copy(path, old), self._uses(path)
    return array if np.all(uses == 1) else array / uses.astype(array.dtype) ** order

  def _copy(self, path: Path, old: Arrays) -> jax.Array:
    if path == _HEAD and not self.had(path):
      return jnp.copy(old(_EMBEDDING))  # A training step donates each buffer once.
    return self._stacks.take(path, old) if self.info(path).in_layers else old(path)

  def _uses(self, path: Path) -> np.ndarray:
    """Return the uses of the old array for one of the new one; broadcasts to the new one."""
    if self.info(path).in_layers:
      uses = self._stacks.of_layers(path, self._uses_of_layers)
      return uses.reshape(-1, *[1] * (len(self.like(path).shape) - 1))
    unties_head = self.before.tied_head and not self.after.tied_head
    return np.array(2 if unties_head and path in (_EMBEDDING, _HEAD) else 1)

  @functools.cached_property
  def _stacks(self) -> Stacks:
    return Stacks(self.before.repeats, self.after.repeats, range(self.after.depth))

  @functools.cached_property
  def _uses_of_layers(self) -> list[int]:
    def runs(model: ModelConfig) -> list[int]:
      return [one.count // one.rows for one in model.repeats for _ in range(one.size)]

    return [old // new for old, new in zip(runs(self.before), runs(self.after), strict=True)]
