"""A wider Transformer from a trained one: the baselines that growth of parameter tokens is held to.

  hypercloning  every unit c times, in order (Samragh et al. 2024, arXiv 2409.12903, symmetric)
  net2net       copies of units drawn at random (Chen et al. 2016, arXiv 1511.05641, Net2WiderNet)
  net2net_fill  [[W, new], [new, new]], the form of the TokenFormer paper (eq. 13); not exact

The first two keep the function: of the c copies of a unit, each weight reads one, drawn at random
(the paper divides the weight by c). So no weight is rounded and no two copies have the same
gradient; copies with equal gradients would stay equal for ever. LayerNorm sees the same mean and
variance only if every unit of the residual stream has as many copies as the others,
so the width must be a multiple of the old one; heads keep their width. The units inside the
feed-forward layer may become any number with net2net.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import GrowConfig, ModelConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.tokens import Path, drawing_key, lookup, owners, with_noise
from tokenformer_jax.model.params import Definition, ParamInfo, Params, Role


def hidden_width(model: ModelConfig) -> int:
  """The number of units inside the feed-forward layer."""
  return model.ffn_width or 4 * model.width


def check(source: ModelConfig, target: ModelConfig, method: str) -> None:
  """Checks that the method can make `target` of `source`.

  Raises:
    UserError: it cannot; the message says why.
  """
  for name, old, new in (
    ('width', source.width, target.width),
    ('ffn_width', hidden_width(source), hidden_width(target)),
    ('heads', source.heads, target.heads),
  ):
    if new < old:
      raise UserError(f'the model has {name}={old}, and {new} is smaller; it can only grow')
  if method == 'net2net_fill':
    return
  if target.width % source.width:
    raise UserError(
      f'width {target.width} is not a multiple of the {source.width} that the model has, so '
      f'{method} would change what LayerNorm computes; take a multiple, or method=net2net_fill, '
      'which is not exact'
    )
  if source.width * target.heads != target.width * source.heads:
    raise UserError(
      f'{target.heads} heads of width {target.width // target.heads} were asked for; {method} '
      f'keeps the width of heads, {source.width // source.heads}, so width {target.width} has '
      f'{target.width * source.heads // source.width} heads'
    )
  if method == 'hypercloning' and hidden_width(target) % hidden_width(source):
    raise UserError(
      f'ffn_width {hidden_width(target)} is not a multiple of the {hidden_width(source)} that the '
      'model has, which hypercloning needs; take a multiple, or method=net2net'
    )
  if target.width > source.width and source.tied_head and source.final_norm != 'affine':
    raise UserError(
      f'a tied head under final_norm={source.final_norm} cannot be widened exactly: only a final '
      'norm with parameters can divide by the number of copies; use method=net2net_fill'
    )


class CopiedUnits:
  """How every array of the wider model is made of the old one, for net2net and hypercloning."""

  def __init__(self, info: Params, source: ModelConfig, target: ModelConfig, config: GrowConfig):
    self._info, self._config = info, config
    self._tied = any(one.role is Role.TIED_EMBEDDING for one in jax.tree.leaves(info))
    rng = np.random.default_rng(config.seed)
    tile = config.method == 'hypercloning'
    head_width = source.width // source.heads
    width = _balanced(rng, source.width, target.width, tile=tile)
    heads = _balanced(rng, source.heads, target.heads, tile=tile)
    hidden = np.arange(hidden_width(target)) % hidden_width(source)
    if not tile:
      hidden[hidden_width(source) :] = rng.integers(
        hidden_width(source), size=len(hidden) - hidden_width(source)
      )
    entries = (heads[:, None] * head_width + np.arange(head_width)).ravel()
    # For every new unit of an axis the old one that it copies.
    self._units = {'width': width, 'norm': width, 'heads': entries, 'hidden': hidden}

  def param(self, path: Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    """The parameter at `path` of the wider model; for the salt see `drawing_key`."""
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
    """Adam's moment: that of the gradient the wider model has, which its copies share.

    Every weight that reads a unit reads one of its c copies, so that a copy has 1/c of the mean
    gradient and, as parts of random signs add up, 1/c of the mean square.
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
    """Gives each weight that reads a unit to one of the unit's copies."""
    units = self._units[name]
    shape = [-1 if i == axis else 1 for i in range(array.ndim)]
    copies = jnp.asarray(np.bincount(units).reshape(shape))
    owner = jnp.take(owners(key, array.shape, copies), units, axis=axis)
    mine = owner == jnp.asarray(_earlier_copies(units).reshape(shape))
    return jnp.where(mine, jnp.take(array, units, axis=axis), 0)

  def _divides_for_the_head(self, info: ParamInfo) -> bool:
    """Return whether it is of the norm before a tied head, in whose place it divides."""
    return self._tied and info.depth is None and info.role in (Role.GAIN, Role.BIAS)

  def _copies(self, name: str, axis: int, ndim: int) -> jax.Array:
    units = self._units[name]
    copies = np.bincount(units)[units].astype(np.float32)
    return jnp.asarray(copies.reshape([-1 if i == axis else 1 for i in range(ndim)]))


def _reading_axis(info: ParamInfo) -> int | None:
  """Return the axis by which an array reads units that may have copies, or None."""
  last = len(info.axes) - 1
  return {Role.KERNEL: last - 1, Role.HEAD: last}.get(info.role)


def _earlier_copies(units: np.ndarray) -> np.ndarray:
  """For every new unit how many before it copy the same old one."""
  order = np.argsort(units, kind='stable')
  in_order = units[order]
  earlier = np.empty_like(units)
  earlier[order] = np.arange(len(units)) - np.searchsorted(in_order, in_order)
  return earlier


class FilledBlocks:
  """How every array of the wider model is made of the old one, for net2net_fill."""

  def __init__(self, target: Definition, config: GrowConfig):
    self._target, self._config = target, config

  def param(self, path: Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    """The parameter at `path` of the wider model: new, with the old one in its first corner."""
    initializer = lookup(self._target.info, path).initializer
    shape = lookup(self._target.abstract, path).shape
    fresh = initializer(drawing_key(self._config.seed, salt), shape, old.dtype)
    return fresh.at[tuple(slice(size) for size in old.shape)].set(old)

  def moment(self, path: Path, old: jax.Array, order: int) -> jax.Array:
    """Adam's moment, zero for what is new."""
    del order
    shape = lookup(self._target.abstract, path).shape
    return jnp.zeros(shape, old.dtype).at[tuple(slice(size) for size in old.shape)].set(old)


def _balanced(rng: np.random.Generator, old: int, new: int, *, tile: bool) -> np.ndarray:
  """For each of `new` units the old one that it copies; each as often, the first ones in order."""
  rounds = [np.arange(old)]
  rounds += [np.arange(old) if tile else rng.permutation(old) for _ in range(new // old - 1)]
  return np.concatenate(rounds)
