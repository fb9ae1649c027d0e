"""Widen a trained Transformer: its MLPs alone, or all of it as a baseline for parameter tokens.

  neurons       drawn neurons in the MLPs, whose outputs are zero at first
  hypercloning  every unit c times, in order (Samragh et al. 2024, arXiv 2409.12903, symmetric)
  net2net       copies of units drawn at random (Chen et al. 2016, arXiv 1511.05641, Net2WiderNet)
  net2net_fill  [[W, new], [new, new]], the form of the TokenFormer paper (eq. 13); not exact

The first keeps the function because new neurons add zero. Their outputs have a gradient at once,
and their inputs one update later, as in added layers (`layers.py`).
The next two keep the function: each weight reads one of the c copies of a unit, drawn at random
(the paper divides the weight by c). So no weight is rounded and no two copies have the same
gradient; copies with equal gradients would stay equal for ever. LayerNorm sees the same mean and
variance only if all units of the residual stream have equally many copies, so the width must be a
multiple of the old one. Heads keep their width. If a head of keys serves several heads of queries,
a copy of it serves copies of them. With net2net, the feed-forward layer may get any larger number
of inner units.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import MLPConfig, ModelConfig
from tokenformer_jax.config.mixers import width_of_heads
from tokenformer_jax.errors import UserError, arg
from tokenformer_jax.grow.steps.remove import KeepFirst
from tokenformer_jax.grow.steps.step import Arrays, Keys, Step, owners, with_noise, with_zeros
from tokenformer_jax.model import models
from tokenformer_jax.model.mlp import hidden_width
from tokenformer_jax.model.norm import WITH_SCALE
from tokenformer_jax.model.params import ParamInfo, Path, Role, lookup


class Sizes(NamedTuple):
  """The sizes that a Transformer grows by."""

  width: int
  heads: int
  key_heads: int  # heads of keys and values
  head_width: int
  hidden: tuple[int, ...]  # units inside each MLP, in the order of the layers and their parts

  @property
  def sharing(self) -> int:
    """Count the heads of queries that a head of keys serves."""
    return self.heads // self.key_heads


def sizes(model: ModelConfig) -> Sizes:
  """Return the sizes of a Transformer."""
  modules = [part for layer in model.layers.values() for _, part in config_lib.parts(layer)]
  heads = {
    (part.heads, getattr(part, 'key_heads', part.heads), width_of_heads(part, model.width))
    for part in modules
    if hasattr(part, 'heads')
  }
  if len(heads) > 1:
    raise UserError(
      'the layers of this model have different numbers of heads, or heads of different widths; a '
      'Transformer is made wider only if all its layers have the same'
    )
  hidden = (hidden_width(part, model) for part in modules if isinstance(part, MLPConfig))
  return Sizes(model.width, *next(iter(heads or {(1, 1, model.width)})), tuple(hidden))


def resized(
  model: ModelConfig,
  width: int | None = None,
  heads: int | None = None,
  ffn_width: int | None = None,
) -> ModelConfig:
  """Return a Transformer with other sizes; None keeps a size, except that heads follow the width.

  Each head of keys goes on serving as many heads of queries.
  """
  old = sizes(model)
  width = width or model.width
  heads = heads or max(1, round(old.heads * width / old.width))
  if heads % old.sharing:
    raise UserError(
      f'each head of keys serves {old.sharing} heads of queries, and {heads} is not a multiple of '
      f'{old.sharing}; give {arg.heads}=N as well'
    )
  if len(set(old.hidden)) > 1 and ffn_width is not None:
    raise UserError(
      f'the MLPs of this model have different widths, {", ".join(map(str, old.hidden))}, and '
      f'{arg.ffn_width} would be that of all; leave it out to widen what is around them'
    )

  def other(path: str, part: Any) -> Any:
    del path
    if isinstance(part, MLPConfig):
      return dataclasses.replace(part, width=ffn_width or part.width)
    if not hasattr(part, 'heads'):
      return part
    if width % heads and not getattr(part, 'head_width', 0):
      raise UserError(
        f'width {width} is not a multiple of {heads} heads; give {arg.heads}=N as well'
      )
    served = {'kv_heads': heads // old.sharing} if getattr(part, 'kv_heads', 0) else {}
    return dataclasses.replace(part, heads=heads, **served)

  wider = model.map_layers(lambda name, layer: config_lib.map_parts(layer, other))
  return dataclasses.replace(wider, width=width)


class _Wider(Step):
  """A step after which a Transformer has another width, other heads, or wider MLPs."""

  method: str

  @functools.cached_property
  def sizes(self) -> tuple[Sizes, Sizes]:
    """The sizes before and after."""
    return sizes(self.before), sizes(self.after)

  def check(self) -> None:
    for name, layer in self.before.layers.items():
      if not config_lib.has_own_values(layer.mixer):
        raise UserError(
          f'layer {name!r} has a mixer other than softmax attention with value and output '
          f'projections, which {self.method} cannot widen'
        )
    before, after = self.sizes
    pairs = [('width', before.width, after.width), ('heads', before.heads, after.heads)]
    pairs += [('ffn_width', *pair) for pair in zip(before.hidden, after.hidden, strict=True)]
    for name, old, new in pairs:
      if new < old:
        raise UserError(f'the model has {name}={old}, and {new} is smaller; it can only grow')


def _check_heads(before: Sizes, after: Sizes, method: str) -> None:
  """Check that the heads of the wider model can be copies of the heads that there are."""
  if before.head_width != after.head_width:
    raise UserError(
      f'{after.heads} heads of width {after.head_width} were asked for; {method} keeps the width '
      f'of heads, {before.head_width}, so width {after.width} has '
      f'{after.width // before.head_width} heads'
    )
  if after.key_heads % before.key_heads or after.sharing % before.sharing:
    raise UserError(
      f'{after.heads} heads of queries with {after.key_heads} of keys are not equally many copies '
      f'of the {before.heads} with {before.key_heads} that the model has, which {method} needs; '
      f'take heads={before.heads * max(2, round(after.heads / before.heads))}'
    )


_EMBEDDINGS = (Role.EMBEDDING, Role.TIED_EMBEDDING)
# The axis along which an array reads units that may have copies, from its end.
_READS = {Role.KERNEL: -2, Role.ROUTER: -2, Role.HEAD: -1, Role.GATE: -1}


@dataclasses.dataclass(frozen=True)
class CopyUnits(_Wider):
  """Copies units, so that each weight reads one of the copies.

  Three sizes of a model depend on its width: a scale of embeddings grows by √c for c times the
  width, a scale of logits shrinks by √c, and a tied head adds up c copies. Embeddings, the head and
  the scale of the final norm make up for them.

  Attributes:
    method: 'net2net' or 'hypercloning'.
    noise: see `GrowConfig`.
    seed: of the choice of units.
  """

  method: str
  noise: float = 0.0
  seed: int = 0

  def check(self) -> None:
    super().check()
    before, after = self.sizes
    if after.width % before.width:
      raise UserError(
        f'width {after.width} is not a multiple of the {before.width} that the model has, so '
        f'{self.method} would change what its norms compute; take a multiple, or '
        'method=net2net_fill, which is not exact'
      )
    if after.width > before.width and self.before.position_embedding == 'sincos':
      raise UserError(
        'position_embedding=sincos has other numbers in a wider model, so that it cannot be '
        'widened exactly; use method=net2net_fill'
      )
    _check_heads(before, after, self.method)
    for old, new in zip(before.hidden, after.hidden, strict=True):
      if self.method == 'hypercloning' and new % old:
        raise UserError(
          f'ffn_width {new} is not a multiple of the {old} that the model has, which hypercloning '
          'needs; take a multiple, or method=net2net'
        )
    norm = self.before.final_norm
    if after.width > before.width and self.before.tied_head and norm not in WITH_SCALE:
      raise UserError(
        f'a tied head under final_norm={norm} cannot be widened exactly: only a final norm with a '
        'scale can divide by the number of copies; use method=net2net_fill'
      )

  def inexact(self) -> str:
    return f'noise={self.noise} is added to the copies' if self.noise else ''

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    array, info, units = old(path), self.info(path), self._units_of(path)
    reading, new = _reading_axis(info), array
    for axis, own in units.items():
      if axis != reading:
        new = jnp.take(new, own, axis=axis)
    if reading in units:
      new = _split(new, units[reading], reading, keys(path))
    if info.role in _EMBEDDINGS:
      new = _over(new, self._embedded)
    elif info.role is Role.HEAD:
      new = new * self._read if self._read != 1 else new
    elif self._is_before_the_head(info) and self._normed != 1:
      offset = 1.0 if info.role is Role.GAIN and self.before.final_norm == 'rms_offset' else 0.0
      new = (new + offset) / self._normed - offset
    if not self.noise or array.shape == new.shape:
      return new
    return with_noise(new, self.noise, keys(path))

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a mean of the wider model's gradients, or of their squares, which copies share.

    Every weight that reads a unit reads one of its c copies. So a copy has 1/c of the mean gradient
    and, as terms of random signs add up, 1/c of the mean square.
    """
    info, new, units = self.info(path), old(path), self._units_of(path)
    for axis, own in units.items():
      new = jnp.take(new, own, axis=axis)
    before_head, last = self._is_before_the_head(info), len(info.axes) - 1
    if info.role in _EMBEDDINGS and self._embedded != 1:
      new = new * self._embedded**order
    elif info.role is Role.HEAD:
      new = _over(new, self._read**order)
    elif before_head:
      new = _over(new, (self._embedded * self._read) ** order)
    if last in units and _reading_axis(info) != last and not before_head:
      copies = np.bincount(units[last])[units[last]].astype(np.float32)
      new = new / jnp.asarray(copies.reshape([1] * last + [-1]))
    return new

  # The factors by which the width changes what embeddings, the head and the final norm return.

  @property
  def _times(self) -> float:
    return self.after.width / self.before.width

  @property
  def _embedded(self) -> float:
    return self._times**0.5 if self.before.embedding_scale else 1.0

  @property
  def _read(self) -> float:
    return self._times**0.5 if self.before.scaled_logits else 1.0

  @property
  def _normed(self) -> float:
    return self._times / (self._embedded * self._read)

  def _is_before_the_head(self, info: ParamInfo) -> bool:
    """Return whether an array belongs to the norm whose output a tied head reads."""
    return self.before.tied_head and info.depth is None and info.role in (Role.GAIN, Role.BIAS)

  def _units_of(self, path: Path) -> dict[int, np.ndarray]:
    """Return the old unit that each new unit copies, by the axes that have copies."""
    old, new = lookup(models.define(self.before).abstract, path), self.like(path)
    named = zip(self.info(path).axes, old.shape, new.shape, strict=True)
    larger = {axis: sizes for axis, sizes in enumerate(named) if sizes[1] != sizes[2]}
    return {axis: self._units[sizes] for axis, sizes in larger.items()}

  @functools.cached_property
  def _units(self) -> dict[tuple[str, int, int], np.ndarray]:
    """The old unit that each new unit copies, by the name of an axis, its old and new size."""
    before, after = self.sizes
    rng, tile = np.random.default_rng(self.seed), self.method == 'hypercloning'
    width = _balanced(rng, before.width, after.width, tile=tile)
    of_width = before.width, after.width
    units = {(name, *of_width): width for name in ('width', 'norm', 'expert_width')}
    of_keys = _balanced(rng, before.key_heads, after.key_heads, tile=tile)
    served = _balanced(rng, before.sharing, after.sharing, tile=tile)
    of_queries = (of_keys[:, None] * before.sharing + served).ravel()
    for count, heads in ((before.key_heads, of_keys), (before.heads, of_queries)):
      entries = (heads[:, None] * before.head_width + np.arange(before.head_width)).ravel()
      units['heads', count * before.head_width, len(entries)] = entries
    for old, new in zip(before.hidden, after.hidden, strict=True):
      hidden = np.arange(new) % old
      if not tile and new > old:
        hidden[old:] = rng.integers(old, size=new - old)
      for name in ('hidden', 'expert_hidden'):
        units.setdefault((name, old, new), hidden)
    return units


def _over(array: jax.Array, divisor: float) -> jax.Array:
  """Return the quotient; the array itself for a divisor of 1."""
  return array if divisor == 1 else array / divisor


def _reading_axis(info: ParamInfo) -> int | None:
  """Return the axis along which an array reads units that may have copies, or None."""
  axis = _READS.get(info.role)
  return None if axis is None else len(info.axes) + axis


def _split(array: jax.Array, units: np.ndarray, axis: int, key: jax.Array) -> jax.Array:
  """Give each weight that reads a unit to one of the unit's copies."""
  shape = [-1 if i == axis else 1 for i in range(array.ndim)]
  copies = jnp.asarray(np.bincount(units).reshape(shape))
  owner = jnp.take(owners(key, array.shape, copies), units, axis=axis)
  mine = owner == jnp.asarray(_earlier_copies(units).reshape(shape))
  return jnp.where(mine, jnp.take(array, units, axis=axis), 0)


def _earlier_copies(units: np.ndarray) -> np.ndarray:
  """Count, for every new unit, the units before it that copy the same old unit."""
  order = np.argsort(units, kind='stable')
  in_order = units[order]
  earlier = np.empty_like(units)
  earlier[order] = np.arange(len(units)) - np.searchsorted(in_order, in_order)
  return earlier


@dataclasses.dataclass(frozen=True)
class FillBlocks(_Wider):
  """Puts each old array into the first corner of a drawn one: net2net_fill."""

  method = 'net2net_fill'

  def inexact(self) -> str:
    return 'the new blocks add to every output'

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    array = old(path)
    fresh = self.info(path).initializer(keys(path), self.like(path).shape, array.dtype)
    return fresh.at[tuple(slice(size) for size in array.shape)].set(array)

  def moment(self, path: Path, old: Arrays, order: int) -> jax.Array:
    """Return a mean of gradients or of their squares, zero for new entries."""
    del order
    array = old(path)
    zeros = jnp.zeros(self.like(path).shape, array.dtype)
    return zeros.at[tuple(slice(size) for size in array.shape)].set(array)


class AddNeurons(FillBlocks):
  """Adds drawn neurons to MLPs, whose outputs are zero."""

  method = 'neurons'

  def check(self) -> None:
    super().check()
    before, after = self.sizes
    if before._replace(hidden=()) != after._replace(hidden=()):
      raise UserError(
        f'method=neurons needs {arg.ffn_width}=N, and keeps the width and the heads; leave '
        f'{arg.width} and {arg.heads} out, or choose net2net or hypercloning for them'
      )

  def inexact(self) -> str:
    return ''

  def param(self, path: Path, old: Arrays, keys: Keys) -> jax.Array:
    shape, like = old(path).shape, self.like(path).shape
    if shape == like:
      return old(path)
    axis = _reading_axis(self.info(path))
    if axis is not None and shape[axis] != like[axis]:
      return with_zeros(old(path), like[axis] - shape[axis], axis)
    return super().param(path, old, keys)

  def inverse(self) -> Step:
    return KeepFirst(self.after, self.before)


def _balanced(rng: np.random.Generator, old: int, new: int, *, tile: bool) -> np.ndarray:
  """Return the old unit that each new unit copies: each equally often, the first ones in order."""
  rounds = [np.arange(old)]
  rounds += [np.arange(old) if tile else rng.permutation(old) for _ in range(new // old - 1)]
  return np.concatenate(rounds)
