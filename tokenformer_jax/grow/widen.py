"""Widen a trained Transformer: the baselines for the growth of parameter tokens.

  hypercloning  every unit c times, in order (Samragh et al. 2024, arXiv 2409.12903, symmetric)
  net2net       copies of units drawn at random (Chen et al. 2016, arXiv 1511.05641, Net2WiderNet)
  net2net_fill  [[W, new], [new, new]], the form of the TokenFormer paper (eq. 13); not exact

The first two keep the function: each weight reads one of the c copies of a unit, drawn at random
(the paper divides the weight by c). So no weight is rounded and no two copies have the same
gradient; copies with equal gradients would stay equal for ever. LayerNorm sees the same mean and
variance only if all units of the residual stream have equally many copies, so the width must be a
multiple of the old one. Heads keep their width. With net2net, the feed-forward layer may get any
larger number of inner units.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import GrowConfig, MLPConfig, ModelConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.tokens import drawing_key, owners, with_noise
from tokenformer_jax.model.layers import hidden_width
from tokenformer_jax.model.params import Definition, ParamInfo, Params, Path, Role, lookup


class Sizes(NamedTuple):
  """The sizes that a Transformer grows by."""

  width: int
  heads: int
  hidden: int  # units inside the feed-forward layer

  @property
  def head_width(self) -> int:
    return self.width // self.heads


def sizes(model: ModelConfig) -> Sizes:
  """Return the sizes of a Transformer.

  Raises:
    UserError: its layers do not have the same sizes.
  """
  layers = [*model.layers.values()]
  if model.pool == 'attention':
    layers.append(model.layer)  # The pool is such a layer.
  parts = [part for layer in layers for _, part in config_lib.parts(layer)]
  heads = {part.heads for part in parts if hasattr(part, 'heads')}
  hidden = {hidden_width(part, model) for part in parts if isinstance(part, MLPConfig)}
  if len(heads) > 1 or len(hidden) > 1:
    raise UserError(
      'the layers of this model have different numbers of heads or widths of their feed-forward '
      'parts; a Transformer is made wider only if all its layers have the same'
    )
  return Sizes(model.width, *(heads or {1}), *(hidden or {0}))


def resized(
  model: ModelConfig,
  width: int | None = None,
  heads: int | None = None,
  ffn_width: int | None = None,
) -> ModelConfig:
  """Return a Transformer with other sizes; None keeps a size, except that heads follow the width.

  Raises:
    UserError: see `sizes`; or the width is not a multiple of the heads.
  """
  old = sizes(model)
  width = width or model.width
  heads = heads or max(1, round(old.heads * width / old.width))
  if width % heads:
    raise UserError(f'width {width} is not a multiple of {heads} heads; give --heads=N as well')

  def other(path: str, part: Any) -> Any:
    del path
    if isinstance(part, MLPConfig):
      return dataclasses.replace(part, width=ffn_width or part.width)
    return dataclasses.replace(part, heads=heads) if hasattr(part, 'heads') else part

  wider = model.map_layers(lambda name, layer: config_lib.map_parts(layer, other))
  return dataclasses.replace(wider, width=width)


def check(source: ModelConfig, target: ModelConfig, method: str) -> None:
  """Check that the method can make `target` from `source`.

  Raises:
    UserError: it cannot; the message says why.
  """
  for name, layer in source.layers.items():
    if not config_lib.is_plain(layer.mixer):
      raise UserError(
        f'layer {name!r} has a mixer other than softmax attention with value and output '
        'projections, and without kv_heads, head_width and qk_norm, which '
        f'{method} cannot widen'
      )
  before, after = sizes(source), sizes(target)
  for name, old, new in zip(('width', 'heads', 'ffn_width'), before, after, strict=True):
    if new < old:
      raise UserError(f'the model has {name}={old}, and {new} is smaller; it can only grow')
  if method == 'net2net_fill':
    return
  if after.width % before.width:
    raise UserError(
      f'width {after.width} is not a multiple of the {before.width} that the model has, so '
      f'{method} would change what LayerNorm computes; take a multiple, or method=net2net_fill, '
      'which is not exact'
    )
  if after.width > before.width and source.embedding_scale:
    raise UserError(
      'embedding_scale multiplies embeddings by √width, which is another number in a wider model; '
      'use method=net2net_fill, which is not exact'
    )
  if before.head_width != after.head_width:
    raise UserError(
      f'{after.heads} heads of width {after.head_width} were asked for; {method} keeps the width '
      f'of heads, {before.head_width}, so width {after.width} has '
      f'{after.width // before.head_width} heads'
    )
  if method == 'hypercloning' and before.hidden and after.hidden % before.hidden:
    raise UserError(
      f'ffn_width {after.hidden} is not a multiple of the {before.hidden} that the model has, '
      'which hypercloning needs; take a multiple, or method=net2net'
    )
  if after.width > before.width and source.tied_head and source.final_norm != 'affine':
    raise UserError(
      f'a tied head under final_norm={source.final_norm} cannot be widened exactly: only a final '
      'norm with parameters can divide by the number of copies; use method=net2net_fill'
    )


class CopiedUnits:
  """Makes every array of the wider model from the old one, for net2net and hypercloning."""

  def __init__(self, info: Params, source: ModelConfig, target: ModelConfig, config: GrowConfig):
    self._info, self._config = info, config
    self._tied = any(leaf.role is Role.TIED_EMBEDDING for leaf in jax.tree.leaves(info))
    rng = np.random.default_rng(config.seed)
    tile = config.method == 'hypercloning'
    before, after = sizes(source), sizes(target)
    width = _balanced(rng, before.width, after.width, tile=tile)
    heads = _balanced(rng, before.heads, after.heads, tile=tile)
    hidden = np.arange(after.hidden) % max(1, before.hidden)
    if not tile and after.hidden > before.hidden:
      hidden[before.hidden :] = rng.integers(before.hidden, size=after.hidden - before.hidden)
    entries = (heads[:, None] * before.head_width + np.arange(before.head_width)).ravel()
    # The old unit that each new unit of an axis copies.
    self._units = {'width': width, 'norm': width, 'heads': entries, 'hidden': hidden}

  def param(self, path: Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    """Return the parameter at `path` of the wider model; for the salt see `drawing_key`."""
    info, new = lookup(self._info, path), old
    names, reading = info.axes, _reading_axis(info)
    key = drawing_key(self._config.seed, salt)
    for axis, name in enumerate(names):
      if name in self._units and axis != reading:
        new = jnp.take(new, self._units[name], axis=axis)
    if reading is not None and names[reading] in self._units:
      new = self._split(new, names[reading], reading, key)
    elif self._divides_for_the_head(info):
      new = new / self._copies(names[-1], len(names) - 1, new.ndim)
    if old.shape == new.shape:
      return new
    return with_noise(new, self._config.noise, key)

  def moment(self, path: Path, old: jax.Array, order: int) -> jax.Array:
    """Return a mean of the wider model's gradients, or of their squares, which copies share.

    Every weight that reads a unit reads one of its c copies. So a copy has 1/c of the mean gradient
    and, as terms of random signs add up, 1/c of the mean square.
    """
    del order
    info, new = lookup(self._info, path), old
    names = info.axes
    for axis, name in enumerate(names):
      if name in self._units:
        new = jnp.take(new, self._units[name], axis=axis)
    last = len(names) - 1
    whole_gradient = _reading_axis(info) == last or self._divides_for_the_head(info)
    if names[last] in self._units and not whole_gradient:
      new = new / self._copies(names[last], last, new.ndim)
    return new

  def _split(self, array: jax.Array, name: str, axis: int, key: jax.Array) -> jax.Array:
    """Give each weight that reads a unit to one of the unit's copies."""
    units = self._units[name]
    shape = [-1 if i == axis else 1 for i in range(array.ndim)]
    copies = jnp.asarray(np.bincount(units).reshape(shape))
    owner = jnp.take(owners(key, array.shape, copies), units, axis=axis)
    mine = owner == jnp.asarray(_earlier_copies(units).reshape(shape))
    return jnp.where(mine, jnp.take(array, units, axis=axis), 0)

  def _divides_for_the_head(self, info: ParamInfo) -> bool:
    """Return whether an array belongs to the norm that divides for a tied head."""
    return self._tied and info.depth is None and info.role in (Role.GAIN, Role.BIAS)

  def _copies(self, name: str, axis: int, ndim: int) -> jax.Array:
    units = self._units[name]
    copies = np.bincount(units)[units].astype(np.float32)
    return jnp.asarray(copies.reshape([-1 if i == axis else 1 for i in range(ndim)]))


def _reading_axis(info: ParamInfo) -> int | None:
  """Return the axis along which an array reads units that may have copies, or None."""
  last = len(info.axes) - 1
  return {Role.KERNEL: last - 1, Role.HEAD: last}.get(info.role)


def _earlier_copies(units: np.ndarray) -> np.ndarray:
  """Count, for every new unit, the units before it that copy the same old unit."""
  order = np.argsort(units, kind='stable')
  in_order = units[order]
  earlier = np.empty_like(units)
  earlier[order] = np.arange(len(units)) - np.searchsorted(in_order, in_order)
  return earlier


class FilledBlocks:
  """Makes every array of the wider model from the old one, for net2net_fill."""

  def __init__(self, target: Definition, config: GrowConfig):
    self._target, self._config = target, config

  def param(self, path: Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    """Return a new parameter with the old one in its first corner."""
    initializer = lookup(self._target.info, path).initializer
    shape = lookup(self._target.abstract, path).shape
    fresh = initializer(drawing_key(self._config.seed, salt), shape, old.dtype)
    return fresh.at[tuple(slice(size) for size in old.shape)].set(old)

  def moment(self, path: Path, old: jax.Array, order: int) -> jax.Array:
    """Return a mean of gradients or of their squares, zero for new entries."""
    del order
    shape = lookup(self._target.abstract, path).shape
    return jnp.zeros(shape, old.dtype).at[tuple(slice(size) for size in old.shape)].set(old)


def _balanced(rng: np.random.Generator, old: int, new: int, *, tile: bool) -> np.ndarray:
  """Return the old unit that each new unit copies: each equally often, the first ones in order."""
  rounds = [np.arange(old)]
  rounds += [np.arange(old) if tile else rng.permutation(old) for _ in range(new // old - 1)]
  return np.concatenate(rounds)
