"""Make the arrays of a model with more experts, or with fewer, from those of another model.

Arrays of experts and routers have the axes `experts` and `routes`, along which new experts lie
behind the old ones.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from tokenformer_jax.config import GrowConfig, ModelConfig
from tokenformer_jax.grow.tokens import drawing_key
from tokenformer_jax.model import models
from tokenformer_jax.model.params import ParamInfo, Params, Path, Role, lookup
from tokenformer_jax.tasks import Batch, Task


class MoreExperts:
  """Makes every array of a model with more experts from those of the model with fewer.

  Attributes:
    before: the shapes and dtypes of the smaller model's arrays.
    abstract: the same of the larger model's arrays.
    info: the `ParamInfo` of each array of the larger model.
  """

  def __init__(self, source: ModelConfig, target: ModelConfig, config: GrowConfig):
    """Grow `source`, from `experts.narrow`, to `target`, which has the same layers."""
    definition = models.define(target)
    self.before, self.abstract = models.define(source).abstract, definition.abstract
    self.info, self._config = definition.info, config

  def sources(self, path: Path) -> tuple[Path, ...]:
    """Return the path of the array that the one at `path` is made from; none for a new array."""
    return tuple(former for former in self._former(path) if _has(self.before, former))[:1]

  def _former(self, path: Path) -> Iterator[Path]:
    """Yield the paths that the array at `path` can have in the smaller model."""
    yield path
    for at, key in enumerate(path):
      rest = (*path[:at], *path[at + 1 :])
      if key.key == 'shared':
        yield rest
      is_expert = key.key == 'experts' and 'experts' in lookup(self.info, path).axes
      if is_expert and 'shared' not in lookup(self.abstract, path[:at]):
        yield from (rest, (*rest, DictKey('kernel')))  # of a Pattention, or of an MLP

  def param(self, path: Path, olds: Sequence[jax.Array], salt: jax.Array) -> jax.Array:
    """Return the parameter at `path`, given those of its `sources`; for the salt see `drawing_key`.

    Routers are drawn. New experts are drawn as in a new model, but add zero. A bias for the choice
    is so low for new experts that tokens choose the old ones, as long as no bias moves.
    """
    info, abstract = lookup(self.info, path), lookup(self.abstract, path)
    axis = info.expert_axis
    if olds and (axis is None or olds[0].shape == abstract.shape):
      return olds[0]
    if olds and olds[0].ndim < len(abstract.shape):
      return jnp.broadcast_to(jnp.expand_dims(olds[0], axis), abstract.shape)
    shape = _behind(abstract.shape, axis, olds)
    key = jax.random.fold_in(drawing_key(self._config.seed, salt), 3)
    if info.adds_to_residual:
      fresh = jnp.zeros(shape, abstract.dtype)
    elif info.role is Role.BALANCE and olds:
      fresh = jnp.broadcast_to(jnp.min(olds[0], axis, keepdims=True) - 1, shape)
    else:
      fresh = (info.first or info.initializer)(key, shape, abstract.dtype)
    return jnp.concatenate([*olds, fresh], axis) if olds else fresh

  def moment(self, path: Path, olds: Sequence[jax.Array], order: int) -> jax.Array:
    """Return a mean of gradients (order 1) or of their squares (2); zero for new experts.

    The gradients of E copies add up to the old one, because gates add up to 1: each has 1/E of the
    mean. A copy gets K/E of the tokens with a gate of about 1/K, and the squares of terms of random
    signs add up, so it has 1/(E K) of the mean square.
    """
    info, abstract = lookup(self.info, path), lookup(self.abstract, path)
    axis = info.expert_axis
    if olds and (axis is None or olds[0].shape == abstract.shape):
      return olds[0]
    if olds and olds[0].ndim < len(abstract.shape):
      part = olds[0] / self.parts(path, order)
      return jnp.broadcast_to(jnp.expand_dims(part, axis), abstract.shape)
    fresh = jnp.zeros(_behind(abstract.shape, axis, olds), abstract.dtype)
    return jnp.concatenate([*olds, fresh], axis) if olds else fresh

  def parts(self, path: Path, order: int) -> int:
    """Return the number that a moment is divided by for each copy."""
    info = lookup(self.info, path)
    count = lookup(self.abstract, path).shape[info.expert_axis]
    return count if order == 1 else count * round(info.active * count)

  def inverse(self) -> 'FewerExperts':
    """Return the stage that takes the new experts out again; of copies the first one stays."""
    return FewerExperts(self)


def _behind(shape: tuple[int, ...], axis: int, olds: Sequence[jax.Array]) -> tuple[int, ...]:
  """Return the shape of the new entries, behind those of the old array if there is one."""
  if not olds:
    return shape
  return (*shape[:axis], shape[axis] - olds[0].shape[axis], *shape[axis + 1 :])


def _has(tree: Params, path: Path) -> bool:
  for key in path:
    if not isinstance(tree, dict) or key.key not in tree:
      return False
    tree = tree[key.key]
  return not isinstance(tree, dict)


class FewerExperts:
  """Makes every array of a smaller model from those of a larger one: the inverse of a growth.

  Attributes:
    abstract: the shapes and dtypes of the smaller model's arrays.
  """

  def __init__(self, more: MoreExperts):
    self.abstract, self._more = more.before, more
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(more.abstract))
    self._larger = {source: path for path in paths for source in more.sources(path)}

  def sources(self, path: Path) -> tuple[Path, ...]:
    """Return the path in the larger model of the array that the one at `path` is made from."""
    return (self._larger[path],)

  def param(self, path: Path, olds: Sequence[jax.Array], salt: jax.Array) -> jax.Array:
    """Return the parameter at `path`; nothing is drawn."""
    del salt
    return self._first(path, olds[0])

  def moment(self, path: Path, olds: Sequence[jax.Array], order: int) -> jax.Array:
    """Return a moment of the parameter at `path`."""
    old, shape = olds[0], lookup(self.abstract, path).shape
    kept = self._first(path, old)
    if len(shape) == old.ndim:
      return kept
    return kept * self._more.parts(self._larger[path], order)

  def _first(self, path: Path, old: jax.Array) -> jax.Array:
    shape, info = lookup(self.abstract, path).shape, self._more.info
    if old.shape == shape:
      return old
    axis = lookup(info, self._larger[path]).expert_axis
    if len(shape) < old.ndim:
      return jnp.take(old, 0, axis)
    return jax.lax.slice_in_dim(old, 0, shape[axis], axis=axis)


def take(tree: Params, info: Params, numbers: Params) -> Params:
  """Return a tree of parameters, or of a moment of them, with some experts of each layer.

  For each array with experts, `numbers` has the numbers [L, N] of those that stay, from 0.
  """

  def take_array(info: ParamInfo, array: jax.Array, kept_LxN: jax.Array) -> jax.Array:
    axis = info.expert_axis
    if axis is None:
      return array
    shape = [1] * array.ndim
    shape[0], shape[axis] = kept_LxN.shape
    return jnp.take_along_axis(array, kept_LxN.reshape(shape), axis)

  return jax.tree.map(take_array, info, tree, numbers)


def loads(task: Task, params: Params, batch: Batch) -> Params:
  """Return the share of all choices that each expert has, float32 [L, E] for each array of experts.

  It is the gradient of the auxiliary loss with respect to the router's balancing bias
  (`router._as_gradient`), plus 1/E. The task is that of a model from `experts.balanced_by_bias`,
  whose biases may be missing in `params`. Other arrays have the scalar 0.
  """
  info, abstract = task.definition.info, task.definition.abstract

  def fill(path: Path, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return lookup(params, path) if _has(params, path) else jnp.zeros(shape.shape, shape.dtype)

  filled = jax.tree.map_with_path(fill, abstract)
  biases = {
    path: lookup(filled, path)
    for path, leaf in jax.tree_util.tree_leaves_with_path(info)
    if leaf.role is Role.BALANCE
  }

  def auxiliary(biases: dict[Path, jax.Array]) -> jax.Array:
    bound = jax.tree.map_with_path(lambda path, p: biases.get(path, p), filled)
    sums = task.sums(bound, batch)
    return sums.aux.divided(sums.counts)[0]

  excess = jax.grad(auxiliary)(biases)
  # The module of each bias is the router, which lies beside the experts.
  found = {path[:-2]: share + 1 / share.shape[-1] for path, share in excess.items()}

  def load(path: Path, _: jax.Array) -> jax.Array:
    if lookup(info, path).expert_axis is None:
      return jnp.zeros(())
    return next(found[path[:at]] for at in range(len(path)) if path[:at] in found)

  return jax.tree.map_with_path(load, params)


def most_used(loads: Params, info: Params, smaller: Params) -> Params:
  """Return the numbers [L, N] of the experts with the largest loads, in rising order, for `take`.

  `smaller` has the shapes of the arrays of the model with N experts.
  """

  def choose(info: ParamInfo, load: jax.Array, array: jax.ShapeDtypeStruct) -> jax.Array:
    axis = info.expert_axis
    return load if axis is None else jnp.sort(jax.lax.top_k(load, array.shape[axis])[1], axis=-1)

  return jax.tree.map(choose, info, loads, smaller)


def without(info: Params, abstract: Params, gone: Sequence[int]) -> Params:
  """Return the numbers [L, N] of all experts but `gone`, counted from 1, for `take`."""

  def choose(info: ParamInfo, array: jax.ShapeDtypeStruct) -> np.ndarray:
    axis = info.expert_axis
    if axis is None:
      return np.zeros((), np.int32)
    kept = [i for i in range(array.shape[axis]) if i + 1 not in gone]
    return np.tile(np.array(kept, np.int32), (array.shape[0], 1))

  return jax.tree.map(choose, info, abstract)
