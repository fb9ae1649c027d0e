"""A step of a growth: a view of the arrays of one model as those of another.

A tree of arrays is a function from a path to an array. A step reads arrays of the model before it
and returns one of the model after it. So steps compose, arrays are made one at a time, and shapes
come from the same code (`jax.eval_shape`).
"""

import abc
import dataclasses
import zlib
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model import models
from tokenformer_jax.model.params import ParamInfo, Params, Path, lookup

Arrays = Callable[[Path], jax.Array]  # a tree of arrays
Keys = Callable[[Path], jax.Array]  # the key of the draws of the array at a path, see `drawing_key`


@dataclasses.dataclass(frozen=True)
class Step(abc.ABC):
  """A change of a model, from `before` to `after`.

  A step that leaves an array as it is returns the object that it reads, so that the array is not
  copied.

  Attributes:
    data: arrays that the step needs besides those of the model before.
  """

  before: ModelConfig
  after: ModelConfig
  permanent: ClassVar[str] = ''  # why no step gives back the model before
  data: Arrays | None = dataclasses.field(default=None, kw_only=True, compare=False)

  def check(self) -> None:
    """Check that the step can be made; raise a `UserError` otherwise."""
    return

  def inexact(self) -> str:
    """Return why the model after the step computes something else, or ''."""
    return ''

  @abc.abstractmethod
  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    """Return the parameter at `path` after the step; draw with the key `keys(path)`."""

  @abc.abstractmethod
  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return the mean of its gradients (order 1) or of their squares (order 2)."""

  def own(self, path: Path) -> jax.Array:
    """Return the array at a path of the step's data."""
    assert self.data is not None, f'{type(self).__name__} needs data'
    return self.data(path)

  def inverse(self) -> 'Step | None':
    """Return the step that gives back the model before; None if there is none."""
    return None

  # The metadata, shapes and dtypes of the two models.

  @property
  def info_before(self) -> Params:
    return models.define(self.before).info

  def info(self, path: Path) -> ParamInfo:
    return lookup(models.define(self.after).info, path)

  def like(self, path: Path) -> jax.ShapeDtypeStruct:
    return lookup(models.define(self.after).abstract, path)

  def had(self, path: Path) -> bool:
    """Return whether the model before has an array at this path."""
    tree = models.define(self.before).abstract
    for key in path:
      if not isinstance(tree, dict) or key.key not in tree:
        return False
      tree = tree[key.key]
    return not isinstance(tree, dict)


class Selection(Step):
  """A step that keeps entries of arrays: moments are those of the entries."""

  @abc.abstractmethod
  def select(self, path: Path, old: Arrays) -> jax.Array:
    """Return the kept entries of the array at `path`."""

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    del keys
    return self.select(path, old)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    del order
    return self.select(path, old)


def with_zeros(old: jax.Array, count: int, axis: int) -> jax.Array:
  """Return an array with `count` zeros behind it along an axis."""
  if not count:
    return old
  shape = (*old.shape[:axis], count, *old.shape[axis + 1 :])
  return jnp.concatenate([old, jnp.zeros(shape, old.dtype)], axis)


# Draws. An array at a path has its own draws, in every process and on every mesh. Salts are
# arguments of the programs that draw, so that arrays of one shape share a program.


def drawing_salt(path: Path) -> np.uint32:
  """Return the salt that gives an array its own draws; it is equal in all processes."""
  return np.uint32(zlib.crc32(jax.tree_util.keystr(path, simple=True, separator='/').encode()))


def drawing_key(seed: int, salt: jax.Array) -> jax.Array:
  """Return the key of an array's draws, the same on every mesh."""
  return jax.random.fold_in(jax.random.key(seed), salt)


def owners(key: jax.Array, shape: tuple[int, ...], copies: int | jax.Array) -> jax.Array:
  """Draw for every entry of an array the copy that gets it; the other copies get 0.

  The copies add up to the array without rounding, in any floating-point format, and no two are
  equal. Equal copies would have equal gradients, and would stay equal for ever. The number of
  copies may be an array that broadcasts to `shape`.
  """
  return jax.random.randint(jax.random.fold_in(key, 1), shape, 0, copies)


def with_noise(array: jax.Array, noise: float, key: jax.Array) -> jax.Array:
  """Add normal noise of `noise` times the array's root mean square."""
  if not noise:
    return array
  scale = noise * jnp.sqrt(jnp.mean(jnp.square(array)))
  return array + scale * jax.random.normal(key, array.shape, array.dtype)
