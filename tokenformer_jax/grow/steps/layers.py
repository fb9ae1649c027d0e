"""Add layers that compute nothing at first, and take them out again.

The arrays of a new layer that add to the residual stream (`ParamInfo.adds_to_residual`) are zero
at first, so that the layer passes its input on unchanged, bit for bit. These arrays have a gradient
at once, and its other arrays one update later. If a branch ends with a norm, the scale of the norm
is zero and not the projection before it, because the norm would scale the projection's first update
up to full size. Zero-initialized outputs of added layers are those of LLaMA Pro (Wu et al. 2024,
arXiv 2401.02415), which copies the other arrays.

Layers are matched by their names in the pattern, in order: every layer of the larger model is one
of the smaller model, or new. So two patterns and `grow.place` say which layers are new.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from tokenformer_jax.config import (
  LayerConfig,
  ModelConfig,
  NoProjectionConfig,
  matching,
  with_references,
)
from tokenformer_jax.config import pattern as pattern_lib
from tokenformer_jax.config.model import BASE, layer_path
from tokenformer_jax.config.pattern import Repeat
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow.steps.step import Arrays, Keys, Selection, Step
from tokenformer_jax.model import models, trunk
from tokenformer_jax.model.params import Params, Path, lookup

EXACT_COPIES = ('copies', 'stacked_copies')
_WHOLE = ('whole_copies', 'whole_stacked_copies')


def wanted(model: ModelConfig, layers: int | None, pattern: str | None) -> ModelConfig:
  """Return a model with more layers of a single row, or with a new pattern; or the model itself."""
  if layers is not None and pattern is not None:
    raise UserError(
      f'{arg.layers} and {arg.pattern} both say which layers there are; give one of them'
    )
  if pattern is not None:
    known = (BASE, *model.variants)
    text = pattern_lib.as_text(pattern_lib.parse(pattern, known, arg.pattern))
    return with_references(dataclasses.replace(model, pattern=text))
  if layers is None:
    return model
  (row, _, tied), *others = model.repeats
  if others or tied:
    raise UserError(
      f'{arg.layers}={layers} does not say which layers of the pattern {model.pattern!r} are '
      f'to be more; write the new pattern: {arg.pattern}=…'
    )
  if layers < model.depth or layers % len(row):
    multiple = f' of whole rows of {len(row)}' if len(row) > 1 else ''
    raise UserError(
      f'{arg.layers} is {layers}, and the model has {model.depth} layers{multiple}; it must '
      f'be {"a multiple of the row and " if multiple else ""}at least as many'
    )
  text = pattern_lib.as_text([Repeat(row, layers // len(row))])
  return dataclasses.replace(model, pattern=text)


def _copied(source: ModelConfig, target: ModelConfig, place: str) -> list[int | None]:
  """Return which layer of the source each new layer copies: the last before it, or the first.

  Stacked copies repeat the layers before them in their order: c1 c2 becomes c1 c2 c1 c2.
  """
  old = matching.old_layers(source, target, place)
  names = pattern_lib.names(target.repeats)
  copied: list[int | None] = [None] * len(old)
  if place not in (*EXACT_COPIES, *_WHOLE):
    return copied
  if place in matching.STACKED:
    return _stacked(names, old)
  last: dict[str, int] = {}
  for name, layer in reversed(list(zip(names, old, strict=True))):
    if layer is not None:
      last[name] = layer  # in the end the first layer of each name
  for number, (name, layer) in enumerate(zip(names, old, strict=True)):
    if layer is not None:
      last[name] = layer
    else:
      copied[number] = last.get(name)
  return copied


def _stacked(names: Sequence[str], old: Sequence[int | None]) -> list[int | None]:
  """Return, for each new layer, the next of the old layers of its name before it, in turn."""
  copied: list[int | None] = [None] * len(old)
  for name in set(names):
    before: list[int] = []
    number = 0
    for at in (at for at, other in enumerate(names) if other == name):
      if (layer := old[at]) is not None:
        before, number = [*([] if number else before), layer], 0
      elif before:
        copied[at], number = before[number % len(before)], number + 1
  return copied


def _obstacle(layer: LayerConfig) -> str | None:
  """Return why a layer whose outputs are zero changes its input, or None if it does not."""
  kind = layer.wiring.kind
  if kind in ('post_norm', 'boundary'):
    return f'wiring.kind={kind} it is normalized again'
  if kind == 'skipless' or (kind == 'parallel' and not getattr(layer.wiring, 'skip', True)):
    return f'wiring.kind={kind} there is no skip connection'
  if isinstance(getattr(layer.mixer, 'proj', None), NoProjectionConfig):
    return 'mixer.proj.kind=none the mixer has no output projection that could be zero'
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
    for number, (layer, origin) in enumerate(zip(new, origins, strict=True)):
      if layer.row != layer.run:  # The first run of tied layers has made their arrays.
        continue
      self._stacks.setdefault(layer.stack, []).append(None if origin is None else old[origin])
      self._numbers.setdefault(layer.stack, []).append(number)

  def take(
    self, path: Path, old: Arrays, fresh: Callable[[int], jax.Array] | None = None
  ) -> jax.Array:
    """Return the array at `path`, made from stacked arrays of the old pattern.

    `fresh` makes the entries [n, …] of the layers that are made from none.
    """
    _, rest = self.split(path)
    first, arrays, counted = {}, [], 0
    for stack in dict.fromkeys(layer.stack for layer in self._stack(path) if layer is not None):
      arrays.append(old((path[0], DictKey(stack), *rest) if stack else (path[0], *rest)))
      first[stack], counted = counted, counted + len(arrays[-1])
    rows, own = [], 0
    for layer in self._stack(path):
      rows.append(counted + own if layer is None else first[layer.stack] + layer.row)
      own += layer is None
    if own and fresh is not None:
      arrays.append(fresh(own))
    whole = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)
    return whole if rows == list(range(len(whole))) else jnp.take(whole, np.array(rows), axis=0)

  def split(self, path: Path) -> tuple[Path, Path]:
    """Return the path of the layer of the array at `path`, and the array's path in the layer."""
    at = 2 if self._several else 1
    return path[:at], path[at:]

  def of_layers(self, path: Path, values: Sequence[int]) -> np.ndarray:
    """Return the values of the layers of the array at `path`, given those of all layers."""
    return np.array([values[number] for number in self._numbers[self._name(path)]])

  def _name(self, path: Path) -> str:
    return path[1].key if self._several else ''

  def _stack(self, path: Path) -> list[trunk.LayerPath | None]:
    return self._stacks[self._name(path)]


@dataclasses.dataclass(frozen=True)
class AddLayers(Step):
  """Adds layers: drawn, or copies of old ones.

  Attributes:
    place: see `GrowConfig`.
    base: the model before, without the tokens that the same growth adds.
  """

  place: str
  base: ModelConfig

  def check(self) -> None:
    """Check that the source's layers are among the target's, and that new layers can be exact."""
    old = matching.old_layers(self.before, self.after, self.place)
    copied = _copied(self.before, self.after, self.place)
    names = pattern_lib.names(self.after.repeats)
    for name, layer, copy in zip(names, old, copied, strict=True):
      keeps_outputs = self.place in _WHOLE and copy is not None
      reason = None if layer is not None or keeps_outputs else _obstacle(self.after.layers[name])
      if reason:
        raise UserError(
          f'a new layer must pass its input on unchanged at first, and with {layer_path(name)}.'
          f'{reason}; only whole copies of old layers can be added, which is not exact: '
          'place=whole_copies'
        )
    self._check_tied(old)

  def _check_tied(self, old: Sequence[int | None]) -> None:
    """Check that tied layers are new, or runs of layers that were tied already."""
    paths = list(trunk.layer_paths(self.before.repeats))
    rows: dict[trunk.LayerPath, list[int]] = {}
    for number, path in enumerate(trunk.layer_paths(self.after.repeats)):
      rows.setdefault(path._replace(run=0), []).append(number)
    for numbers in rows.values():
      known = (old[number] for number in numbers)
      origins = {None if one is None else paths[one]._replace(run=0) for one in known}
      if len(origins) > 1 and not (self.place in _WHOLE and len(origins - {None}) == 1):
        raise UserError(
          f'model.pattern is {self.before.pattern!r} in the source and {self.after.pattern!r} in '
          'the target, which ties layers that have arrays of their own, or runs tied layers more '
          'often; a growth can untie layers (write * for ^), add other tied ones, or, with '
          'place=whole_copies, run them more often, which is not exact'
        )

  def inexact(self) -> str:
    if self.place in _WHOLE and set(_copied(self.before, self.after, self.place)) != {None}:
      return 'the copies of layers add once more what the layers add'
    return ''

  @functools.cached_property
  def _old_layers(self) -> tuple[int | None, ...]:
    return matching.old_layers(self.before, self.after, self.place)

  @functools.cached_property
  def _stacks(self) -> Stacks:
    copied = _copied(self.before, self.after, self.place)
    origins = [
      copy if old is None else old for old, copy in zip(self._old_layers, copied, strict=True)
    ]
    return Stacks(self.before.repeats, self.after.repeats, origins)

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    """Return the parameter at `path`: in new layers drawn as in a new model, or copied.

    The arrays whose products new layers add are zero. In copies, the tokens that the same growth
    adds to the old layers are drawn: with zero keys, as there, and zero values they would be dead.
    """
    info, like, is_zero = self.info(path), self.like(path), self._is_zero(path)
    if not info.in_layers:
      return old(path)

    def fresh(count: int) -> jax.Array:
      shape = (count, *like.shape[1:])
      if is_zero:
        return jnp.full(shape, info.zero, like.dtype)
      key = jax.random.fold_in(keys(path), 2)
      return (info.first or info.initializer)(key, shape, like.dtype)

    new = self._stacks.take(path, old, fresh)
    if self.place not in EXACT_COPIES:
      return new
    if is_zero:
      return self._with_new(path, new, info.zero)
    axis, count = info.token_axis, lookup(self._base_counts, path)
    if axis is None or count == new.shape[axis]:
      return new
    kept, _ = jnp.split(new, [count], axis)
    _, drawn = jnp.split(fresh(len(new)), [count], axis)
    return self._with_new(path, new, jnp.concatenate([kept, drawn], axis))

  def _is_zero(self, path: Path) -> bool:
    """Return whether the array at `path` is zero in a new layer."""
    if not self.info(path).adds_to_residual:
      return False
    block, (part, *_) = self._stacks.split(path)
    own = lookup(models.define(self.after).info, block)
    return 'scale' not in own.get(f'{part.key}_after_norm', {})

  @functools.cached_property
  def _base_counts(self) -> Params:
    return models.define(matching.as_deep(self.base, self.after)).token_counts

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a moment of the parameter at `path`: zero in new layers, except in whole copies.

    Those of whole stacked copies are zero as well, as in Chen et al. 2026 (arXiv 2609.19107).
    """
    del order
    like = self.like(path)
    if not self.info(path).in_layers:
      return old(path)
    new = self._stacks.take(
      path, old, lambda count: jnp.zeros((count, *like.shape[1:]), like.dtype)
    )
    return new if self.place == 'whole_copies' else self._with_new(path, new, 0)

  def _with_new(self, path: Path, array: jax.Array, new: jax.Array | float) -> jax.Array:
    """Return the array with other values in its new layers."""
    is_new = self._stacks.of_layers(path, [layer is None for layer in self._old_layers])
    if not is_new.any():
      return array
    return jnp.where(is_new.reshape(-1, *[1] * (array.ndim - 1)), new, array)

  def inverse(self) -> 'TakeLayers':
    now = {layer: number for number, layer in enumerate(self._old_layers) if layer is not None}
    origins = tuple(now[layer] for layer in range(self.before.depth))
    return TakeLayers(self.after, self.before, origins)


@dataclasses.dataclass(frozen=True)
class TakeLayers(Selection):
  """Keeps the layers with the numbers `origins`, from 0 on."""

  origins: tuple[int, ...]

  def select(self, path: Path, old: Arrays) -> jax.Array:
    if not self.info(path).in_layers:
      return old(path)
    stacks = Stacks(self.before.repeats, self.after.repeats, self.origins)
    return stacks.take(path, old)
