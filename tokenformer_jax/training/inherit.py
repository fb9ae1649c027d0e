"""Begin a model with the arrays of another one, wherever the two have the same.

A distilled model may begin with the teacher's weights (Fedus et al. 2021, arXiv 2101.03961: the
non-expert weights of a mixture of experts). Layers are matched by their numbers, so the patterns
and the stacks of the two models may differ. An array is copied if its path inside the layer, its
shape and its metadata are equal, and if the part of the layer that it belongs to has the same
config. All other arrays stay as they were drawn.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model import models, trunk
from tokenformer_jax.model.params import ParamInfo, Params

# The parts of a layer's config that decide the meaning of an array, by the first name of its path.
# All other arrays are norms and gains.
_PARTS = {'attention': ('mixer',), 'ffn': ('ffn',)}
_OTHERS = ('norm', 'norm_of_ffn', 'wiring')

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Source:
  """The array of the other model to copy a layer's array, or a whole array, from."""

  path: Names
  index: int | None = None  # the layer in its stack; None outside of the layers


Sources = dict[Names, list[Source | None]]


def sources(model: ModelConfig, other: ModelConfig) -> Sources:
  """Return the source of each array of a model: one entry, or one for each layer of a stack."""
  own, theirs = _described(model), _described(other)
  places, other_places = (list(trunk.layer_paths(m.repeats)) for m in (model, other))
  layers, other_layers = model.in_order, other.in_order

  def find_source(path: Names, number: int) -> Source | None:
    rest = path[2:] if places[0].stack else path[1:]
    if number > other.depth:
      return None
    place = other_places[number - 1]
    at = (path[0], place.stack, *rest) if place.stack else (path[0], *rest)
    is_same = at in theirs and _same(own[path], theirs[at], stacked=True)
    parts = _PARTS.get(rest[0], _OTHERS)
    layer, other_layer = layers[number - 1], other_layers[number - 1]
    is_same = is_same and all(getattr(layer, p) == getattr(other_layer, p) for p in parts)
    return Source(at, place.row) if is_same else None

  found: Sources = {}
  for path, (info, _) in own.items():
    if info.in_layers:
      found[path] = [find_source(path, number) for number in info.depth]
    else:
      is_same = path in theirs and _same(own[path], theirs[path], stacked=False)
      found[path] = [Source(path) if is_same else None]
  return found


def _described(model: ModelConfig) -> dict[Names, tuple[ParamInfo, jax.ShapeDtypeStruct]]:
  """Return the metadata and the shape of every array, by the names of its path."""
  definition = models.define(model)
  infos = jax.tree_util.tree_leaves_with_path(definition.info)
  leaves = jax.tree.leaves(definition.abstract)
  return {_names(path): (info, leaf) for (path, info), leaf in zip(infos, leaves, strict=True)}


def _names(path: Any) -> Names:
  return tuple(key.key for key in path)


def _same(
  array: tuple[ParamInfo, jax.ShapeDtypeStruct],
  other: tuple[ParamInfo, jax.ShapeDtypeStruct],
  *,
  stacked: bool,
) -> bool:
  """Return whether two arrays have one shape (of a layer, if they are stacked) and one meaning."""
  (info, leaf), (other_info, other_leaf) = array, other
  compared = ('axes', 'role', 'active', 'groups', 'adds_to_residual')
  if any(getattr(info, name) != getattr(other_info, name) for name in compared):
    return False
  if stacked:
    return leaf.shape[1:] == other_leaf.shape[1:]
  return leaf.shape == other_leaf.shape and info.depth == other_info.depth


def begin(drawn: Params, other: Params, found: Sources) -> Params:
  """Return the parameters: copied where `sources` found a source, and drawn elsewhere."""

  def copy(path: Any, array: jax.Array) -> jax.Array:
    origins = found[_names(path)]
    if not any(origins):
      return array
    if origins[0] is not None and origins[0].index is None:
      return jnp.copy(_at(other, origins[0].path))  # The step donates the copy.
    rows = [
      array[i] if origin is None else _at(other, origin.path)[origin.index]
      for i, origin in enumerate(origins)
    ]
    return jnp.stack(rows)

  return jax.tree.map_with_path(copy, drawn)


def _at(params: Params, path: Names) -> jax.Array:
  for name in path:
    params = params[name]
  return params


def description(model: ModelConfig, found: Sources) -> str:
  """Return a sentence: the numbers of copied and drawn parameters, and the drawn arrays."""
  copied, drawn, names = 0, 0, []
  for path, (_, leaf) in _described(model).items():
    layers = len(found[path])
    missing = sum(origin is None for origin in found[path])
    copied += leaf.size // layers * (layers - missing)
    drawn += leaf.size // layers * missing
    if missing:
      part = f' in {missing} of {layers} layers' if missing < layers else ''
      names.append(f'{"/".join(path[:-1]) or path[-1]}{part}')
  places = f' ({", ".join(dict.fromkeys(names))})' if names else ''
  return f"{copied:,} parameters are the teacher's, and {drawn:,} are drawn{places}"
