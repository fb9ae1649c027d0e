"""Products of activations with matrices of parameters, and rows of tables."""

import dataclasses

import jax
import jax.numpy as jnp

from tokenformer_jax import per_device
from tokenformer_jax.params import Axes
from tokenformer_jax.sharding import constrain, parts, platform


def product(equation: str, x: jax.Array, matrix: jax.Array, **kwargs) -> jax.Array:
  """`jnp.einsum(equation, x, matrix)` of activations [B, T, …] and a matrix: [B, T, …].

  On a CPU that of x as [M, …], with M = B T: the gradient of the matrix then sums over one axis and
  not over two, for which XLA would first write a transposed copy of the output's gradient. On a TPU
  it is the other way round: T is the last axis of XLA's layout of activations, and B the first, so
  that M is no axis of theirs without a copy.

  Args:
    equation: `BTI,IO->BTO` for example.
    x: activations, [B, T, …].
    matrix: cast to the dtype of x.
    **kwargs: of `jnp.einsum`.
  """
  matrix = matrix.astype(x.dtype)
  if platform() != 'cpu':
    return jnp.einsum(equation, x, matrix, **kwargs)
  at, to = equation.index('BT'), equation.split('->')[1].index('BT')
  rows = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
  out = jnp.einsum(equation.replace('BT', 'M'), rows, matrix, **kwargs)
  return out.reshape(*out.shape[:to], *x.shape[at : at + 2], *out.shape[to + 1 :])


def project(
  x: jax.Array,
  matrix: jax.Array,
  axes: Axes,
  *,
  contract: int,
  out_heads: tuple[int, int] | None = None,
) -> jax.Array:
  """Multiply with a matrix of parameters, which may be split over devices.

  Args:
    x: activations [B, T, I], or as heads [B, T, H, K], which zeros may fill.
    matrix: [I, O] or [O, I], as it is stored; cast to the dtype of x.
    axes: its logical axes; one is `width`, and the other is split on several devices.
    contract: the position of I.
    out_heads: their number H and their width K, filled with zeros, for heads as the output.

  Returns:
    [B, T, O], or [B, T, H, K].
  """
  matrix = matrix.astype(x.dtype)
  of_x, of_out = ('BTHK' if x.ndim == 4 else 'BTI'), ('BTHK' if out_heads else 'BTO')
  heads = out_heads or (x.shape[2:] if x.ndim == 4 else None)
  on_part = _OnPart(of_x, of_out, axes, contract, heads, matrix.shape)
  if heads and heads[0] % parts('heads'):
    return on_part.product(x, matrix)
  if axes[contract] == 'width':
    case = on_part.from_heads if x.ndim == 4 else on_part.from_width
  else:
    case = on_part.to_heads if out_heads else on_part.to_width
  return per_device.on_each_device(
    lambda x, part: (case if per_device.is_split(on_part.split) else on_part.product)(x, part),
    x,
    matrix,
    axes,
    split_in=case != on_part.from_width,
    split_out=case != on_part.to_width,
  )


@dataclasses.dataclass(frozen=True)
class _OnPart:
  """The product of `project` with the part of the matrix that a device has, in four cases.

  Attributes:
    of_x: letters of the axes of x: `BTI` or `BTHK`.
    of_out: those of the result: `BTO` or `BTHK`.
    axes: as in `project`.
    contract: as in `project`.
    heads: their number and width, of x or the result, or None.
    shape: of the whole matrix.
  """

  of_x: str
  of_out: str
  axes: Axes
  contract: int
  heads: tuple[int, int] | None
  shape: tuple[int, int]

  @property
  def split(self) -> str:
    """The axis of the matrix that is split."""
    return next(axis for axis in self.axes if axis != 'width')

  def product(
    self, x: jax.Array, part: jax.Array, *, of_x: str = '', of_out: str = ''
  ) -> jax.Array:
    """Multiply with all or a part of the matrix, whose width is whole, seen as heads if it is."""
    of_x, of_out = of_x or self.of_x, of_out or self.of_out
    stored = [side.replace('BT', '') for side in (self.of_x, self.of_out)]
    if self.contract == 1:
      stored.reverse()
    if 'HK' in stored:
      at = stored.index('HK')
      number = self.heads[0] * part.shape[at] // self.shape[at]
      places = tuple(None if axis == 'width' else axis for axis in self.axes)
      part = split_heads(part, at, (number, self.heads[1]), places)
    return product(f'{of_x},{"".join(stored)}->{of_out}', x, part)

  def from_width(self, x: jax.Array, part: jax.Array) -> jax.Array:
    """Exchange nothing: x is whole, and the result is a part."""
    return self.product(x, part)

  def to_width(self, x: jax.Array, part: jax.Array) -> jax.Array:
    """Sum over devices, each of which has a part of x; the result is whole."""
    return per_device.total(self.product(x, part), self.split)

  # Heads of the width that are exchanged are the first axis: see `per_device.scatter`.

  def from_heads(self, x: jax.Array, part: jax.Array) -> jax.Array:
    """Gather x, of which each device has some heads; the result is a part."""
    whole_HxBxTxK = per_device.gather(jnp.moveaxis(x, 2, 0), 'heads', 0)
    return self.product(whole_HxBxTxK, part, of_x='HBTK')

  def to_heads(self, x: jax.Array, part: jax.Array) -> jax.Array:
    """Sum over devices, each of which has a part of x and gets its heads of the result."""
    summed_HxBxTxK = per_device.scatter(self.product(x, part, of_out='HBTK'), 'heads')
    return jnp.moveaxis(summed_HxBxTxK, 0, 2)


def look_up(table: jax.Array, ids_BxT: jax.Array, axes: Axes, dtype: jnp.dtype) -> jax.Array:
  """Return rows of a table of parameters, [B, T, D] in `dtype`.

  The gradient of a row is summed in the dtype of the table, float32, on each device and between
  devices: a frequent token has thousands of gradients in a batch, and a sum in bfloat16 stops
  growing after a few hundred.

  Args:
    table: [V, D], as it is stored.
    ids_BxT: numbers of its rows.
    axes: its logical axes; the second is `width`.
    dtype: of the activations; a table whose width is split is gathered in it.
  """

  def of_device(ids_BxT: jax.Array, table: jax.Array) -> jax.Array:
    if not per_device.is_split(axes[0]):
      return jnp.take(table, ids_BxT, axis=0).astype(dtype)
    ids_BxT = ids_BxT - per_device.first_index(axes[0], len(table))
    here_BxTx1 = ((ids_BxT >= 0) & (ids_BxT < len(table)))[..., None]
    rows_BxTxD = jnp.take(table, ids_BxT, axis=0, mode='clip').astype(dtype)
    return per_device.total(jnp.where(here_BxTx1, rows_BxTxD, 0), axes[0])

  return per_device.on_each_device(of_device, ids_BxT, table, axes, gathered_in=dtype)


def split_heads(
  matrix: jax.Array, axis: int, heads: tuple[int, ...], axes: tuple[str | None, ...]
) -> jax.Array:
  """A matrix [I, D], [D, O] or a bias [D] with its axis D as heads.

  Args:
    matrix: of any dtype.
    axis: the position of D.
    heads: their number H and their width K, which may be more than D/H: zeros fill it.
    axes: of the matrix when it is filled, as for `sharding.constrain`.
  """
  shape = list(matrix.shape)
  width = shape[axis] // heads[0]
  shape[axis : axis + 1] = heads[0], width
  if width == heads[1]:
    return matrix.reshape(shape)
  fill = [(0, heads[1] - width if i == axis + 1 else 0) for i in range(len(shape))]
  # XLA does not fill heads that are split over devices (with jax 0.10.2 it fails).
  return jnp.pad(constrain(matrix, *axes).reshape(shape), fill)
