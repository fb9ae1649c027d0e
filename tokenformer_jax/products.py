"""Products of activations with matrices of parameters, and rows of tables."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from tokenformer_jax.params import Axes
from tokenformer_jax.sharding import RULES, constrain, platform

_TWO_STEPS = 16  # devices along `tokens`, from which on heads are scattered in two steps


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
  """The product with a matrix of parameters, which may be split over devices.

  Args:
    x: activations [B, T, I], or as heads [B, T, H, K], which zeros may fill.
    matrix: [I, O] or [O, I], as it is stored; cast to the dtype of x.
    axes: its logical axes; one is `width`.
    contract: the position of I.
    out_heads: their number H and their width K, filled with zeros, for heads as the output.

  Returns:
    [B, T, O], or [B, T, H, K].
  """
  of_width, matrix = axes[contract] == 'width', matrix.astype(x.dtype)
  heads, tokens = out_heads or x.shape[2:], jax.sharding.get_abstract_mesh().shape.get('tokens', 1)
  of_in, of_out = ('BTHK' if x.ndim == 4 else 'BTI'), ('BTHK' if out_heads else 'BTO')

  def times(x: jax.Array, part: jax.Array, of_in: str = of_in, of_out: str = of_out) -> jax.Array:
    """The product with the whole width and all or a part of the other axis, and its heads."""
    sides = (of_in, of_out) if contract == 0 else (of_out, of_in)
    order = [side.replace('BT', '') for side in sides]
    if 'HK' in order:
      at = order.index('HK')
      number = heads[0] * part.shape[at] // matrix.shape[at]
      places = tuple(None if axis == 'width' else axis for axis in axes)
      part = split_heads(part, at, (number, heads[1]), places)
    return product(f'{of_in},{"".join(order)}->{of_out}', x, part)

  def of_device(x: jax.Array, part: jax.Array) -> jax.Array:
    if not tokens_are_split() or (of_width and x.ndim == 3):
      return times(x, part)
    # Heads that are exchanged are the first axis: see `_scatter`.
    if of_width:
      return times(_gather('tokens', 0, x.dtype, jnp.moveaxis(x, 2, 0)), part, of_in='HBTK')
    if out_heads:
      return jnp.moveaxis(_scatter_heads(times(x, part, of_out='HBTK')), 0, 2)
    return jax.lax.psum(times(x, part), 'tokens')

  if 'BTHK' in (of_in, of_out) and heads[0] % tokens:
    return times(x, matrix)
  split_in, split_out = x.ndim == 4 or not of_width, of_width or bool(out_heads)
  return on_each_device(of_device, x, matrix, axes, split_in=split_in, split_out=split_out)


def look_up(table: jax.Array, ids_BxT: jax.Array, axes: Axes, dtype: jnp.dtype) -> jax.Array:
  """Return rows of a table of parameters, [B, T, D] in `dtype`.

  The gradient of a row is summed in the dtype of the table, float32, on each device and between
  devices: a frequent token has thousands of gradients in a batch, and a sum in bfloat16 stops
  growing after a few hundred.

  Args:
    table: [V, D], as it is stored.
    ids_BxT: numbers of its rows.
    axes: its logical axes; the second is `width`.
    dtype: of the activations; a table that is split over `fsdp` is gathered in it.
  """

  def of_device(ids_BxT: jax.Array, table: jax.Array) -> jax.Array:
    if not tokens_are_split():
      return jnp.take(table, ids_BxT, axis=0).astype(dtype)
    ids_BxT = ids_BxT - len(table) * jax.lax.axis_index('tokens')
    here_BxTx1 = ((ids_BxT >= 0) & (ids_BxT < len(table)))[..., None]
    rows_BxTxD = jnp.take(table, ids_BxT, axis=0, mode='clip').astype(dtype)
    return jax.lax.psum(jnp.where(here_BxTx1, rows_BxTxD, 0), 'tokens')

  return on_each_device(of_device, ids_BxT, table, axes, gathered_in=dtype)


def on_each_device(
  f: Callable[[Any, jax.Array], Any],
  rows: Any,
  matrix: jax.Array,
  axes: Axes,
  *,
  split_in: bool = False,
  split_out: Any = False,
  gathered_in: jnp.dtype | None = None,
) -> Any:
  """`f(rows, matrix)` on each device, for its rows and the whole width of its part of a matrix.

  A device gathers the width over `fsdp`, and gets its part of the gradient, summed over the devices
  that have other rows, by reduce-scatter. Left to XLA, the gradients of a layer would be whole on
  each device first, in one all-reduce of twice the bytes.

  On one device, and where rows or matrix do not divide, f has everything.

  Args:
    f: a function, which sums over `tokens` if `tokens_are_split()`.
    rows: arrays [B, …].
    matrix: of two axes, as it is stored.
    axes: its logical axes; one is `width`, the other is split by `tokens`.
    split_in: whether `tokens` splits the third axis of the rows.
    split_out: whether it splits the third axis of the result, or of each of its arrays.
    gathered_in: the dtype in which the matrix is gathered, for a gradient that is summed in more
      precision: f gets the matrix, and devices sum its gradient, in the dtype of the matrix. By
      default all three have that dtype.

  Returns:
    What f does, arrays [B, …] or of one number for each device that has other rows.
  """
  sizes = jax.sharding.get_abstract_mesh().shape
  if math.prod(sizes.values()) == 1:
    return f(rows, matrix)
  places = ['fsdp' if axis == 'width' else 'tokens' for axis in axes]
  parts = sizes['replica'] * sizes['fsdp'], *(sizes[place] for place in places)
  lengths = len(jax.tree.leaves(rows)[0]), *matrix.shape
  if any(length % part for length, part in zip(lengths, parts, strict=True)):
    return f(rows, matrix)
  tokens = 'tokens' if sizes['tokens'] > 1 else None
  whole, split = PartitionSpec(RULES['batch']), PartitionSpec(RULES['batch'], None, tokens)

  def of_device(rows: Any, part: jax.Array) -> Any:
    part = jax.lax.pcast(part, 'replica', to='varying')
    return f(rows, _gather('fsdp', axes.index('width'), gathered_in or part.dtype, part))

  return jax.shard_map(
    of_device,
    in_specs=(
      split if split_in else whole,
      PartitionSpec(*(place if place == 'fsdp' else tokens for place in places)),
    ),
    out_specs=jax.tree.map(lambda is_split: split if is_split else whole, split_out),
  )(rows, matrix)


def tokens_are_split() -> bool:
  """Whether this is traced for a device of a mesh, one of several along `tokens`."""
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.manual_axes) and mesh.shape['tokens'] > 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(mesh_axis: str, axis: int, dtype: jnp.dtype, part: jax.Array) -> jax.Array:
  """The whole axis of an array, on each device; its gradient is summed and scattered.

  Values are rounded to `dtype` to be moved; the gradient moves in the dtype of the array.
  """
  whole = jax.lax.all_gather(part.astype(dtype), mesh_axis, axis=axis, tiled=True)
  return whole.astype(part.dtype)


def _gather_forward(
  mesh_axis: str, axis: int, dtype: jnp.dtype, part: jax.Array
) -> tuple[jax.Array, None]:
  return _gather(mesh_axis, axis, dtype, part), None


def _gather_backward(
  mesh_axis: str, axis: int, dtype: jnp.dtype, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
  del dtype
  gradient = _scatter(jnp.moveaxis(gradient, axis, 0), mesh_axis)
  return (jnp.moveaxis(gradient, 0, axis),)


_gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def _scatter_heads(heads_HxBxTxK: jax.Array) -> jax.Array:
  """The sum over devices along `tokens`, each of which gets its heads; the gradient is gathered."""
  return _scatter(heads_HxBxTxK, 'tokens')


def _scatter_heads_forward(heads_HxBxTxK: jax.Array) -> tuple[jax.Array, None]:
  return _scatter_heads(heads_HxBxTxK), None


def _scatter_heads_backward(_: None, gradient_HxBxTxK: jax.Array) -> tuple[jax.Array]:
  return (jax.lax.all_gather(gradient_HxBxTxK, 'tokens', tiled=True),)


_scatter_heads.defvjp(_scatter_heads_forward, _scatter_heads_backward)


def _scatter(x: jax.Array, mesh_axis: str) -> jax.Array:
  """The sum of what devices have, of which each gets its part of the first axis.

  On TPUs in two steps, in groups of devices a stride apart and of neighbours, and of an axis whose
  parts are together in memory: any other reduce-scatter over all of 16 or 64 devices XLA writes as
  an all-reduce there. Gradients of weights are told to be laid out so, or it may choose otherwise
  for one of them. Over 4 along `tokens` it keeps one step, if what is split is an axis of its own,
  and makes all-reduces of two.
  """
  devices = jax.lax.axis_size(mesh_axis)
  inner = max(d for d in range(1, math.isqrt(devices) + 1) if devices % d == 0)
  if platform() != 'tpu' or inner == 1 or (mesh_axis == 'tokens' and devices < _TWO_STEPS):
    return jax.lax.psum_scatter(x.reshape(devices, -1, *x.shape[1:]), mesh_axis)
  if mesh_axis == 'fsdp':
    x = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
  rows = np.arange(devices).reshape(-1, inner)
  for groups in (rows.T, rows):
    x = jax.lax.psum_scatter(x, mesh_axis, axis_index_groups=groups.tolist(), tiled=True)
  return x


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
