"""Make each array of a new tree from arrays of an old one, by the stages of a growth in turn."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import optax

from tokenformer_jax.grow import tokens
from tokenformer_jax.model.params import Definition, Params, Path, lookup
from tokenformer_jax.steps import optimizers, statistics


class ByArray(Protocol):
  """A growth that keeps every array at its path."""

  def param(self, path: Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    """Return the parameter at `path` after growth; for the salt see `tokens.drawing_key`."""

  def moment(self, path: Path, old: jax.Array, order: int) -> jax.Array:
    """Return the mean of its gradients (order 1) or of their squares (order 2) after growth."""


class Stage(Protocol):
  """A change of a model after which arrays can lie at other paths."""

  def sources(self, path: Path) -> tuple[Path, ...]:
    """Return the paths of the old arrays that the one at `path` is made from; none: it is new."""

  def param(self, path: Path, olds: Sequence[jax.Array], salt: jax.Array) -> jax.Array:
    """Return the parameter at `path`; for the salt see `tokens.drawing_key`."""

  def moment(self, path: Path, olds: Sequence[jax.Array], order: int) -> jax.Array:
    """Return the mean of its gradients (order 1) or of their squares (order 2)."""


@dataclasses.dataclass(frozen=True)
class InPlace:
  """A `ByArray` as a stage."""

  by_array: ByArray

  def sources(self, path: Path) -> tuple[Path, ...]:
    return (path,)

  def param(self, path: Path, olds: Sequence[jax.Array], salt: jax.Array) -> jax.Array:
    return self.by_array.param(path, olds[0], salt)

  def moment(self, path: Path, olds: Sequence[jax.Array], order: int) -> jax.Array:
    return self.by_array.moment(path, olds[0], order)


class ToArray(Protocol):
  """Makes an array of a tree from arrays of another tree."""

  def __call__(self, path: Path, olds: Sequence[jax.Array], salts: np.ndarray) -> jax.Array:
    """Return the array at `path`, made from `olds`, of which there may be none.

    For the salts see `Arrays.salts`.
    """


@dataclasses.dataclass(frozen=True)
class Arrays:
  """The arrays of the model `after`, each with those of the model `before` that it is made from."""

  before: Definition
  after: Definition
  stages: tuple[Stage, ...]

  def sources(self, path: Path) -> tuple[Path, ...]:
    """Return the paths in the old tree of the arrays that the one at `path` is made from."""
    return tuple(self._levels(path)[0])

  def _levels(self, path: Path) -> list[list[Path]]:
    """Return the paths of the arrays before each stage and, at the end, the path itself."""
    levels = [[path]]
    for stage in reversed(self.stages):
      levels.insert(0, [source for later in levels[0] for source in stage.sources(later)])
    return levels

  def salts(self, path: Path) -> np.ndarray:
    """Return the salts of the draws of each array that a stage makes, by its path."""
    made = itertools.chain(*self._levels(path)[1:])
    return np.array([tokens.drawing_salt(at) for at in made], np.uint32)

  def make(
    self, path: Path, olds: Sequence[jax.Array], how: Callable[..., jax.Array], salts: Sequence[Any]
  ) -> jax.Array:
    """Return the array at `path` from those at its `sources`, with the `salts` of the path.

    `how(stage, path, olds, salt)` makes an array of a stage.
    """
    arrays, at = list(olds), 0
    for stage, level in zip(self.stages, self._levels(path)[1:], strict=True):
      left, made = iter(arrays), []
      for to in level:
        taken = list(itertools.islice(left, len(stage.sources(to))))
        made.append(how(stage, to, taken, salts[at]))
        at += 1
      arrays = made
    return arrays[0]

  def map(self, f: Callable[[Path, list[Any]], Any], tree: Params, name: str = '') -> Params:
    """Return the new tree of the values of `f(path, olds)`.

    The old tree holds the parameters (`name` is empty) or the statistic `name` of them. Arrays that
    the statistic is not kept for stay masked.
    """

    def make(path: Path, _: Any) -> Any:
      olds = [lookup(tree, source) for source in self.sources(path)]
      if any(map(statistics.is_masked, olds)):
        return olds[0]
      if name and not olds and not self._is_kept(path, tree, name):
        return optax.MaskedNode()
      return f(path, olds)

    return jax.tree.map_with_path(make, self.after.abstract)

  def _is_kept(self, path: Path, tree: Params, name: str) -> bool:
    """Return whether a statistic is kept for a new array, as for those like it."""
    known = [
      (info, statistics.is_masked(lookup(tree, at)))
      for at, info in jax.tree_util.tree_leaves_with_path(self.before.info)
    ]
    return optimizers.is_kept(name, lookup(self.after.info, path), known)


MapArrays = Callable[[ToArray, Params, Arrays, str], Params]


def map_arrays(f: ToArray, tree: Params, arrays: Arrays, name: str = '') -> Params:
  """Map a function of path, arrays and salts over the parameters, or their statistic `name`."""
  return arrays.map(lambda path, olds: f(path, olds, arrays.salts(path)), tree, name)
