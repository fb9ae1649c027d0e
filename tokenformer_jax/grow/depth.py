"""Add layers that compute nothing at first, and take them out again.

The arrays of a new layer that add to the residual stream (`ParamInfo.adds_to_residual`) are zero
at first, so that the layer passes its input on unchanged, bit for bit. These arrays have a gradient
at once, and its other arrays one update later. Zero-initialized outputs of added layers are those
of LLaMA Pro (Wu et al. 2024, arXiv 2401.02415), which copies the other arrays.

Layers are matched by their names in the pattern, in order: every layer of the larger model is one
of the smaller model, or new. So two patterns and `grow.place` say which layers are new.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from tokenformer_jax.config import (
  GrowConfig,
  LayerConfig,
  ModelConfig,
  NoProjectionConfig,
  matching,
  with_references,
)
from tokenformer_jax.config import pattern as pattern_lib
from tokenformer_jax.config.model import BASE, layer_path
from tokenformer_jax.config.pattern import Repeat
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.tokens import Path, drawing_key, lookup
from tokenformer_jax.model import models, trunk
from tokenformer_jax.model.params import Params
from tokenformer_jax.runs.checkpoint_meta import Lineage

T = TypeVar('T')

_COPYING = ('copies', 'whole_copies')


def wanted(model: ModelConfig, layers: int | None, pattern: str | None) -> ModelConfig:
  """Return a model with more layers of a single row, or with a new pattern; or the model itself.

  Raises:
    UserError: both are given, or `layers` fits no larger pattern of such rows.
  """
  if layers is not None and pattern is not None:
    raise UserError('--layers and --pattern both say which layers there are; give one of them')
  if pattern is not None:
    known = (BASE, *model.variants)
    text = pattern_lib.as_text(pattern_lib.parse(pattern, known, '--pattern'))
    return with_references(dataclasses.replace(model, pattern=text))
  if layers is None:
    return model
  (row, _), *others = model.repeats
  if others:
    raise UserError(
      f'--layers={layers} does not say which layers of the pattern {model.pattern!r} are to be '
      'more; write the new pattern: --pattern=…'
    )
  if layers < model.depth or layers % len(row):
    multiple = f' of whole rows of {len(row)}' if len(row) > 1 else ''
    raise UserError(
      f'--layers is {layers}, and the model has {model.depth} layers{multiple}; it must be '
      f'{"a multiple of the row and " if multiple else ""}at least as many'
    )
  text = pattern_lib.as_text([Repeat(row, layers // len(row))])
  return dataclasses.replace(model, pattern=text)


def _copied(source: ModelConfig, target: ModelConfig, place: str) -> list[int | None]:
  """Return which layer of the source each new layer copies: the last before it, or the first."""
  found = matching.old_layers(source, target, place)
  names = pattern_lib.names(target.repeats)
  copied: list[int | None] = [None] * len(found)
  if place not in _COPYING:
    return copied
  last: dict[str, int] = {}
  for name, layer in reversed(list(zip(names, found, strict=True))):
    if layer is not None:
      last[name] = layer  # in the end the first layer of each name
  for number, (name, layer) in enumerate(zip(names, found, strict=True)):
    if layer is not None:
      last[name] = layer
    else:
      copied[number] = last.get(name)
  return copied


def check(source: ModelConfig, target: ModelConfig, place: str) -> None:
  """Check that the layers of the target can be added.

  Raises:
    UserError: no layer is added and `place` is for new ones, the source's layers are not among the
      target's, or a new layer could not pass its input on.
  """
  if source.repeats == target.repeats:
    if place not in ('copies', 'between'):  # the default, now and formerly
      raise UserError(f'grow.place={place} is for new layers, and none is added; leave it out')
    return
  found, copied = matching.old_layers(source, target, place), _copied(source, target, place)
  names = pattern_lib.names(target.repeats)
  for name, layer, copy in zip(names, found, copied, strict=True):
    keeps_outputs = place == 'whole_copies' and copy is not None
    reason = None if layer is not None or keeps_outputs else _obstacle(target.layers[name])
    if reason:
      raise UserError(
        f'a new layer must pass its input on unchanged at first, and with {layer_path(name)}.'
        f'{reason}; only whole copies of old layers can be added, which is not exact: '
        'place=whole_copies'
      )


def check_no_twins(
  source: ModelConfig, target: ModelConfig, lineage: Lineage, step: int, place: str
) -> None:
  """Check that copies of layers do not hold tokens or units that would stay equal for ever.

  Copies of tokens differ only in what they add until they are trained, and `place=copies` sets that
  to zero in the new layers.

  `lineage` and `step` are those of the source.

  Raises:
    UserError: an earlier growth copied tokens or units, and no training followed.
  """
  if place != 'copies' or source.repeats == target.repeats:
    return
  for ancestor in reversed(lineage):
    if ancestor.first_step != step:
      return
    how, step = ancestor.grow, ancestor.step
    copies = how.method.copies or how.method.new_keys == 'copies'
    if ancestor.action == 'grow' and copies and not how.method.noise:
      raise UserError(
        f'the growth of {ancestor.source} made copies that differ only in what they add, which '
        'place=copies sets to zero in new layers, so that they could stay equal for ever; train '
        'the model before you add layers, or use place=between or behind'
      )


def _obstacle(layer: LayerConfig) -> str | None:
  """Return why a layer whose outputs are zero changes its input, or None if it does not."""
  kind = layer.wiring.kind
  if kind == 'post_norm':
    return 'wiring.kind=post_norm it is normalized again'
  if kind == 'skipless' or (kind == 'parallel' and not layer.wiring.skip):
    return f'wiring.kind={kind} there is no skip connection'
  if isinstance(getattr(layer.mixer, 'proj', None), NoProjectionConfig):
    return 'mixer.proj.kind=none the mixer has no output projection that could be zero'
  if getattr(layer.mixer, 'proj_skip', False):
    return 'mixer.proj_skip=True the output has the heads as they are'
  return None


def inexact(source: ModelConfig, target: ModelConfig, place: str) -> str | None:
  """Return why the deeper model does not compute what the source does, or None if it does."""
  if place == 'whole_copies' and set(_copied(source, target, place)) != {None}:
    return 'the copies of layers add once more what the layers add'
  return None


class Stacks:
  """Makes the stacked arrays of one pattern from those of another.

  Args:
    before: the repeats of the given arrays.
    after: the repeats of the arrays to make.
    origins: for each layer of `after` the layer of `before` that it is made from, or None.
  """

  def __init__(
    self, before: Sequence[Repeat], after: Sequence[Repeat], origins: Sequence[int | None]
  ):
    old, new = list(trunk.layer_paths(before)), list(trunk.layer_paths(after))
    self._several = bool(new[0].stack)
    self._stacks: dict[str, list[trunk.LayerPath | None]] = {}
    self._numbers: dict[str, list[int]] = {}
    for number, (place, origin) in enumerate(zip(new, origins, strict=True)):
      self._stacks.setdefault(place.stack, []).append(None if origin is None else old[origin])
      self._numbers.setdefault(place.stack, []).append(number)

  def sources(self, path: Path) -> tuple[Path, ...]:
    """Return the paths of the stacked arrays that the one at `path` is made from."""
    rest = path[2:] if self._several else path[1:]
    return tuple(
      (path[0], DictKey(stack), *rest) if stack else (path[0], *rest)
      for stack in self._stacks_before(path)
    )

  def take(
    self, path: Path, arrays: Sequence[jax.Array], fresh: Callable[[int], jax.Array] | None = None
  ) -> jax.Array:
    """Return the array at `path` from those at `sources(path)`.

    `fresh` makes the entries [n, …] of the layers that are made from none.
    """
    first, counted = {}, 0
    for stack, array in zip(self._stacks_before(path), arrays, strict=True):
      first[stack], counted = counted, counted + len(array)
    rows, own = [], 0
    for place in self._stack(path):
      rows.append(counted + own if place is None else first[place.stack] + place.row)
      own += place is None
    parts = [*arrays, fresh(own)] if own and fresh is not None else list(arrays)
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return whole if rows == list(range(len(whole))) else jnp.take(whole, np.array(rows), axis=0)

  def of_layers(self, path: Path, values: Sequence[bool]) -> np.ndarray:
    """Return the values of the layers of the array at `path`, given those of all layers."""
    return np.array([values[number] for number in self._numbers[self._name(path)]])

  def _name(self, path: Path) -> str:
    return path[1].key if self._several else ''

  def _stack(self, path: Path) -> list[trunk.LayerPath | None]:
    return self._stacks[self._name(path)]

  def _stacks_before(self, path: Path) -> list[str]:
    return list(dict.fromkeys(place.stack for place in self._stack(path) if place is not None))


class MoreLayers:
  """Makes every array of a model with more layers from those of the model with fewer.

  Attributes:
    abstract: the shapes and dtypes of the larger model's arrays.
  """

  def __init__(self, source: ModelConfig, target: ModelConfig, config: GrowConfig):
    definition = models.define(target)
    self.abstract, self._info, self._config = definition.abstract, definition.info, config
    self._old_tokens = models.define(matching.as_deep(source, target)).token_counts
    found, copied = (
      which(source, target, config.place) for which in (matching.old_layers, _copied)
    )
    origins = [copy if old is None else old for old, copy in zip(found, copied, strict=True)]
    self._is_new = [old is None for old in found]
    self._stacks = Stacks(source.repeats, target.repeats, origins)

  def sources(self, path: Path) -> tuple[Path, ...]:
    """Return the paths of the arrays of the smaller model that the one at `path` is made from."""
    return self._stacks.sources(path) if lookup(self._info, path).in_layers else (path,)

  def param(self, path: Path, olds: Sequence[jax.Array], salt: jax.Array) -> jax.Array:
    """Return the parameter at `path`, given those of its `sources`; for the salt see `drawing_key`.

    New layers are drawn as in a new model, or copied; the arrays whose products they add are zero.
    In copies, the tokens that the same growth adds to the old layers are drawn: with zero keys, as
    there, and zero values they would be dead.
    """
    info, abstract = lookup(self._info, path), lookup(self.abstract, path)
    if not info.in_layers:
      return olds[0]
    key = jax.random.fold_in(drawing_key(self._config.seed, salt), 2)

    def fresh(count: int) -> jax.Array:
      shape = (count, *abstract.shape[1:])
      if info.adds_to_residual:
        return jnp.zeros(shape, abstract.dtype)
      return (info.first or info.initializer)(key, shape, abstract.dtype)

    new = self._stacks.take(path, olds, fresh)
    if self._config.place != 'copies':
      return new
    if info.adds_to_residual:
      return self._with_new(path, new, 0)
    axis, count = info.token_axis, lookup(self._old_tokens, path)
    if axis is None or count == new.shape[axis]:
      return new
    kept, _ = jnp.split(new, [count], axis)
    drawn = fresh(len(new))
    _, drawn = jnp.split(drawn, [count], axis)
    return self._with_new(path, new, jnp.concatenate([kept, drawn], axis))

  def moment(self, path: Path, olds: Sequence[jax.Array], order: int) -> jax.Array:
    """Return a moment of the parameter at `path`: zero in new layers, except in whole copies."""
    del order
    abstract = lookup(self.abstract, path)
    if not lookup(self._info, path).in_layers:
      return olds[0]
    new = self._stacks.take(
      path, olds, lambda count: jnp.zeros((count, *abstract.shape[1:]), abstract.dtype)
    )
    return self._with_new(path, new, 0) if self._config.place == 'copies' else new

  def _with_new(self, path: Path, array: jax.Array, new: jax.Array | int) -> jax.Array:
    """Return the array with other values in its new layers."""
    is_new = self._stacks.of_layers(path, self._is_new)
    if not is_new.any():
      return array
    return jnp.where(is_new.reshape(-1, *[1] * (array.ndim - 1)), new, array)


def remove(params: Params, model: ModelConfig, before: ModelConfig, place: str) -> Params:
  """Return the parameters of `model`, or a moment of them, without the layers not in `before`.

  `place` is the `grow.place` of the growth that added them.
  """
  if model.repeats == before.repeats:
    return params
  now = {
    old: at for at, old in enumerate(matching.old_layers(before, model, place)) if old is not None
  }
  stacks = Stacks(model.repeats, before.repeats, [now[layer] for layer in range(before.depth)])

  def take(path: Path, info: Any) -> jax.Array:
    if not info.in_layers:
      return lookup(params, path)
    return stacks.take(path, [lookup(params, source) for source in stacks.sources(path)])

  return jax.tree.map_with_path(take, models.define(before).info)
