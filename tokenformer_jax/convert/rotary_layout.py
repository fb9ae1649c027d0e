"""Change the rotary layout of a model without changing what it computes.

A layout pairs the r rotated entries of a head: i with i + r/2 (`half_split`), or 2i with 2i + 1
(`interleaved`). The same permutation of each head's queries and keys changes the layout and keeps
all scores. So this module permutes the outputs of the query and key projections, and their moments.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  GrowConfig,
  LayerConfig,
  LinearConfig,
  MeshConfig,
  ModelConfig,
  RotaryConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.model import layer_path, used_layers
from tokenformer_jax.errors import UserError, nearest
from tokenformer_jax.grow import grow_run
from tokenformer_jax.grow.apply import grow_state
from tokenformer_jax.grow.steps.step import Arrays, Selection
from tokenformer_jax.model import models, trunk
from tokenformer_jax.model.params import Params, Path, Role
from tokenformer_jax.model.positions import rotary_width
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths

LAYOUTS = config_lib.choices('model.layer.mixer.positions.layout')
# Arrays whose last axis is the output of a projection, or an entry of a head for its norm.
_OUTPUTS = (Role.KERNEL, Role.BIAS, Role.VALUE, Role.GAIN)


def convert_layout(params: Params, model: ModelConfig, layout: str) -> tuple[Params, ModelConfig]:
  """Return the parameters and the model of the same function with another rotary layout.

  Layers are stacked, and every size of the model is filled in. `layout` is one of `LAYOUTS`.
  """
  _check(model, layout)
  step = _step(model, layout)
  state = grow_state({'params': params, 'opt_state': ()}, model, (step,), GrowConfig())
  return state['params'], step.after


def convert_run(source: str, target: paths.Path, layout: str) -> ModelConfig:
  """Write a run with another rotary layout, at its step and with its optimizer's state.

  Return the new model. `source` is DIR or DIR@STEP.
  """
  directory, step = paths.split_source(source)
  grow_run.check_target(target, directory)
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_model(meta, directory)
    model = meta.config.model
    _check(model, layout)
    step = _step(model, layout)
    mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
    if meta.contents == 'params':
      params = grow_run.read_params(checkpoints, meta, mesh, models.define(model).abstract)
      state = {'params': convert_layout(params, model, layout)[0]}
    else:
      # The config keeps the moments and the step.
      state = grow_run.read_and_grow(checkpoints, meta, mesh, (step,), GrowConfig())
  model = step.after
  # Its id stays, because it has the same parameter tokens.
  new = dataclasses.replace(
    meta,
    config=dataclasses.replace(meta.config, model=model, init_from=''),
    # Earlier models in this layout, so that `grow remove` goes back to one that fits the arrays.
    lineage=tuple(
      dataclasses.replace(ancestor, model=_with_layout(ancestor.model, layout))
      for ancestor in meta.lineage
    ),
  )
  grow_run.write(target, new, state)
  return model


def _check(model: ModelConfig, layout: str) -> None:
  """Check that `convert_layout` can convert a model; for the errors see there."""
  if layout not in LAYOUTS:
    raise UserError(f'the layout is {layout!r}{nearest(layout, LAYOUTS)}')
  rotating = {name: layer for name, layer in used_layers(model).items() if _rotary(layer)}
  if not rotating:
    raise UserError('no layer of the model has rotary positions, so there is no layout to change')
  changing = {name: layer for name, layer in rotating.items() if _rotary(layer).layout != layout}
  if not changing:
    raise UserError(f'the rotary layout of the model is {layout} already; nothing would change')
  for name, layer in changing.items():
    if not isinstance(layer.mixer, SoftmaxConfig | LinearConfig):
      raise UserError(
        f'{layer_path(name)}.mixer.kind is {layer.mixer.kind}; a layout can be changed only where '
        'queries and keys have projections of their own, as with softmax and linear'
      )


def _rotary(layer: LayerConfig) -> RotaryConfig | None:
  """Return the rotary positions of a layer, or None."""
  positions = getattr(layer.mixer, 'positions', None)
  return positions if isinstance(positions, RotaryConfig) else None


def _with_layout(model: ModelConfig, layout: str) -> ModelConfig:
  """Return a model whose rotary positions all have the layout."""

  def change(path: str, part: Any) -> Any:
    del path
    is_rotary = isinstance(part, RotaryConfig)
    return dataclasses.replace(part, layout=layout) if is_rotary else part

  return model.map_layers(lambda name, layer: config_lib.map_parts(layer, change))


def _orders(model: ModelConfig, layout: str) -> dict[tuple[str, ...], np.ndarray]:
  """Return the new order of the last axis of each array to permute, by its path."""
  names = [name for repeat in model.repeats for name in repeat.layers * repeat.count]
  projections = {}
  for name, place in zip(names, trunk.layer_paths(model.repeats), strict=True):
    layer = model.layers[name]
    if (rotary := _rotary(layer)) and rotary.layout != layout:
      mixer = layer.mixer
      heads = {'query': mixer.heads, 'key': getattr(mixer, 'key_heads', mixer.heads)}
      if getattr(mixer, 'qk_norm', 'none') != 'none':
        heads |= {'query_norm': 1, 'key_norm': 1}
      for own, count in heads.items():
        order = _order(rotary, count, config_lib.width_of_heads(mixer, model.width))
        projections['blocks', *filter(None, [place.stack]), 'attention', own] = order
  infos = jax.tree_util.tree_leaves_with_path(models.define(model).info)
  paths_and_infos = [(tuple(key.key for key in path), info) for path, info in infos]
  return {
    path: projections[path[:-1]]
    for path, info in paths_and_infos
    if path[:-1] in projections and info.role in _OUTPUTS
  }


def _order(rotary: RotaryConfig, heads: int, head_width: int) -> np.ndarray:
  """Return, for each entry of queries and keys in the other layout, its index in this one."""
  rotated = np.arange(rotary_width(head_width, rotary.fraction))
  pairs = rotated.reshape(2, -1) if rotary.layout == 'half_split' else rotated.reshape(-1, 2)
  in_head = np.append(pairs.T.ravel(), np.arange(len(rotated), head_width))
  return (head_width * np.arange(heads)[:, None] + in_head).ravel()


@dataclasses.dataclass(frozen=True)
class _PermuteHeads(Selection):
  """Permutes the last axes of the arrays in `orders`."""

  orders: dict[tuple[str, ...], np.ndarray] = dataclasses.field(compare=False)

  def select(self, path: Path, old: Arrays) -> jax.Array:
    order = self.orders.get(tuple(key.key for key in path))
    return old(path) if order is None else jnp.take(old(path), order, axis=-1)


def _step(model: ModelConfig, layout: str) -> _PermuteHeads:
  return _PermuteHeads(model, _with_layout(model, layout), _orders(model, layout))
