"""Add parameter tokens to a model, and remove them.

Tokens lie along the logical axis `param_tokens`, new ones behind old ones. The functions are pure,
work on trees of arrays and on single arrays, and can be traced under jit.
"""

import zlib
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import GrowConfig, GrowthMethod, PattentionConfig, token_groups
from tokenformer_jax.model.params import (
  Definition,
  ParamInfo,
  Params,
  Path,
  Role,
  lookup,
  token_axis,
)
from tokenformer_jax.parallel.rules import Axes, is_axes


class MoreTokens:
  """Makes every array of a model with more parameter tokens from the old one.

  Args:
    added: a model with only the new tokens; it has their initializers.
    copies: the number of copies of the tokens of each array, for the method `duplicate`.
    config: the growth.
  """

  def __init__(self, added: Definition, copies: dict[Path, int], config: GrowConfig):
    self._added, self._copies, self._config = added, copies, config

  def param(self, path: Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    """Return the parameter at `path` after growth; for the salt see `drawing_key`."""
    info = lookup(self._added.info, path)
    axis = info.token_axis
    if axis is None or not self._new(path, axis):
      return old
    config, is_key = self._config, info.role is Role.KEY
    if config.method.kind == 'duplicate':
      return self._duplicate(path, old, is_key, axis, salt)
    how = config.method
    zero = how.kind == 'zero_keys' if is_key else how.new_values == 'zero'
    shape = lookup(self._added.abstract, path).shape
    key = drawing_key(config.seed, salt)
    if zero:
      fresh = jnp.zeros(shape, old.dtype)
    elif is_key and how.new_keys != 'init':
      fresh = _like_trained(old, shape, axis, key, how)
    else:
      fresh = info.initializer(key, shape, old.dtype)
    return jnp.concatenate([old, fresh], axis)

  def moment(self, path: Path, old: jax.Array, order: int) -> jax.Array:
    """Return a mean of gradients (order 1) or of their squares (2); new tokens start at zero.

    The value of a copy has the whole gradient of the old value, so it has the same moments. The
    gradient of its key is a sum over the entries of the value that the copy has, 1/c of them for c
    copies. So it has 1/c of the old mean and, as terms of random signs add up, 1/c of the old mean
    square.
    """
    info = lookup(self._added.info, path)
    axis = info.token_axis
    if axis is None or not (new := self._new(path, axis)):
      return old
    if self._config.method.kind == 'duplicate':
      copies = self._copies[path]
      part = old / copies if info.role is Role.KEY else old
      return jnp.concatenate([part] * copies, axis)
    shape = (*old.shape[:axis], new, *old.shape[axis + 1 :])
    return jnp.concatenate([old, jnp.zeros(shape, old.dtype)], axis)

  def _new(self, path: Path, axis: int) -> int:
    return lookup(self._added.abstract, path).shape[axis]

  def _duplicate(
    self, path: Path, old: jax.Array, is_key: bool, axis: int, salt: jax.Array
  ) -> jax.Array:
    copies, key = self._copies[path], drawing_key(self._config.seed, salt)
    if is_key:
      first, *others = [old] * copies
    else:
      owner = owners(key, old.shape, copies)
      first, *others = (jnp.where(owner == copy, old, 0) for copy in range(copies))
    noisy = with_noise(jnp.concatenate(others, axis), self._config.method.noise, key)
    return jnp.concatenate([first, noisy], axis)


def _like_trained(
  old: jax.Array, shape: tuple[int, ...], axis: int, key: jax.Array, how: GrowthMethod
) -> jax.Array:
  """Return keys [..., N, D] of the size of trained ones: drawn, or copied in order with noise."""
  scale = jnp.sqrt(jnp.mean(jnp.square(old), axis=(axis, -1), keepdims=True))
  normal = jax.random.normal(key, shape, old.dtype)
  if how.new_keys == 'trained':
    return scale * normal
  copied = jnp.take(old, jnp.arange(shape[axis]) % old.shape[axis], axis=axis)
  return copied + how.noise * scale * normal


def inexact(
  name: str, old: PattentionConfig, new: PattentionConfig, config: GrowConfig
) -> str | None:
  """Return why the projection `name` does not compute what it did before, or None if it does.

  The method is `group`, `zero_keys` or `duplicate`.
  """
  grows = new.tokens > old.tokens
  before, after = token_groups(old), token_groups(new)
  if config.method.kind == 'duplicate':
    times = new.tokens // old.tokens
    reference, changed = before[0].reference, after[0].reference
    if reference * new.tokens != changed * old.tokens:
      return (
        f'{name} gets every token {times} times, and its reference count changes from '
        f'{reference} to {changed} instead of {reference * times}; use scale=resize'
      )
    epsilon = getattr(before[0].score, 'row_epsilon', 0)
    if grows and epsilon:
      return (
        f'row_epsilon={epsilon} of {name} is smaller against the norm of {times} '
        'times as many scores; use method=zero_keys, which is exact with it'
      )
    return None
  for was, now in zip(before, after, strict=False):
    if was.reference != now.reference:
      return (
        f'the reference count of {name} changes from {was.reference} to {now.reference}, and with '
        'it the scale of every old token; use scale=keep'
      )
  if grows and config.method.kind == 'group':
    zero = config.method.new_values == 'zero'
    return None if zero else f'the values of the new tokens of {name} are not zero'
  if grows and not before[-1].score.zero_at_zero:
    kind = before[-1].score.kind
    return (
      f'the score {kind} of {name} gives a new token, whose key is zero, the weight of exp(0) and '
      'not 0; use method=group or duplicate, which are exact for it'
    )
  return None


def owners(key: jax.Array, shape: tuple[int, ...], copies: int | jax.Array) -> jax.Array:
  """Draw for every entry of an array the copy that gets it; the other copies get 0.

  The copies add up to the array without rounding, in any floating-point format, and no two are
  equal. Equal copies would have equal gradients, and would stay equal for ever. The number of
  copies may be an array that broadcasts to `shape`.
  """
  return jax.random.randint(jax.random.fold_in(key, 1), shape, 0, copies)


def drawing_salt(path: Path) -> np.uint32:
  """Return the salt that gives an array its own draws; it is equal in all processes."""
  return np.uint32(zlib.crc32(jax.tree_util.keystr(path, simple=True, separator='/').encode()))


def drawing_key(seed: int, salt: jax.Array) -> jax.Array:
  """Return the key of an array's draws; the salt can be traced, so equal shapes share a program."""
  return jax.random.fold_in(jax.random.key(seed), salt)


def with_noise(array: jax.Array, noise: float, key: jax.Array) -> jax.Array:
  """Add normal noise of `noise` times the array's root mean square."""
  if not noise:
    return array
  scale = noise * jnp.sqrt(jnp.mean(jnp.square(array)))
  return array + scale * jax.random.normal(key, array.shape, array.dtype)


def merge(params: Params, added: Params, axes: Params) -> Params:
  """Append the parameter tokens of a model of the same width and depth, or from `extract`.

  `axes` are the logical axes of `params`, whose arrays without parameter tokens stay as they are.
  """
  more = dict(jax.tree_util.tree_flatten_with_path(added)[0])

  def append(path: Path, names: Axes, array: jax.Array) -> jax.Array:
    axis = token_axis(names)
    return array if axis is None or path not in more else jnp.concatenate([array, more[path]], axis)

  return jax.tree.map_with_path(append, axes, params, is_leaf=is_axes)


def only(params: Params, known: Collection[Path]) -> Params:
  """Return a tree of the arrays at these paths alone."""
  kept = jax.tree.map_with_path(lambda path, array: array if path in known else None, params)
  return _without_none(kept)


def extract(params: Params, axes: Params, old_tokens: Params) -> Params:
  """Return only the tokens behind the first `old_tokens` of each array.

  Arrays without such tokens are left out: files hold no empty arrays.
  """

  def behind(names: Axes, array: jax.Array, old: int) -> jax.Array | None:
    axis = token_axis(names)
    if axis is None or old == array.shape[axis]:
      return None
    return jax.lax.slice_in_dim(array, old, None, axis=axis)

  return _without_none(jax.tree.map(behind, axes, params, old_tokens, is_leaf=is_axes))


def remove(params: Params, axes: Params, old_tokens: Params) -> Params:
  """Return a model without the tokens of `extract`, bit for bit as before if no old one changed."""

  def first(names: Axes, array: jax.Array, old: int) -> jax.Array:
    axis = token_axis(names)
    return array if axis is None else jax.lax.slice_in_dim(array, 0, old, axis=axis)

  return jax.tree.map(first, axes, params, old_tokens, is_leaf=is_axes)


def shrink(params: Params, info: Params, importance: Params, target: Params) -> Params:
  """Keep the most important tokens of each group of each layer, in their order.

  The smaller model may have fewer groups; then the last ones go.

  Args:
    params: the parameters, or a moment of them.
    info: the `ParamInfo` of each array.
    importance: [..., N] for each array of parameter tokens, from `importance.score_tokens`.
    target: the `ParamInfo` of each array of the smaller model, which has the numbers to keep.
  """

  def keep(old: ParamInfo, array: jax.Array, score: jax.Array, smaller: ParamInfo) -> jax.Array:
    if old.token_axis is None or old.groups == smaller.groups:
      return array
    start, kept = 0, []
    for size, count in zip(old.groups, smaller.groups, strict=False):
      best = jax.lax.top_k(score[..., start : start + size], count)[1]
      kept.append(start + jnp.sort(best, axis=-1))
      start += size
    places = jnp.concatenate(kept, axis=-1)
    return jnp.take_along_axis(array, places[..., None], axis=old.token_axis)

  return jax.tree.map(keep, info, params, importance, target)


def _without_none(tree: Params) -> Params:
  if not isinstance(tree, dict):
    return tree
  kept = {key: _without_none(value) for key, value in tree.items()}
  return {k: v for k, v in kept.items() if not (v is None or (isinstance(v, dict) and not v))}
