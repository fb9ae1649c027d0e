"""Products of activations with matrices of parameters, and lookups in tables."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tokenformer_jax.parallel import per_device
from tokenformer_jax.parallel.rules import Axes, shard_count
from tokenformer_jax.parallel.sharding import constrain, platform

# From this many rows on, a product may take a turned matrix. For one row XLA would copy the matrix,
# which makes a token take far longer to write.
_FEWEST_ROWS = 64
_SPLIT = re.compile(',|->').split  # an equation into its arrays


def product(equation: str, x: jax.Array, matrix: jax.Array, **kwargs) -> jax.Array:
  """Return `jnp.einsum(equation, x, matrix)` of activations [B, T, …] and a matrix: [B, T, …].

  The matrix is cast to the dtype of x.

  On a CPU the product runs on x as [M, …], with M = B T, and on heads (H, K) as one axis. Every
  operand and gradient is then a matrix; for more axes XLA would write transposed copies of
  gradients and copies of the parameters. On a TPU x keeps its axes: in XLA's layout of activations
  T is the last axis and B the first, so merging them would need a copy.
  """
  matrix = matrix.astype(x.dtype)
  if platform() != 'cpu':
    return jnp.einsum(equation, x, matrix, **kwargs)
  of_x, of_matrix, of_out = _SPLIT(equation)
  sizes = dict(zip(of_x + of_matrix, x.shape + matrix.shape, strict=True))
  pairs = ('BT', 'HK') if equation.count('HK') == 2 else ('BT',)
  x, matrix = _merged(x, of_x, pairs), _merged(matrix, of_matrix, pairs)
  for pair in pairs:
    equation = equation.replace(pair, pair[0])
  merged_x, merged_matrix, merged_out = _SPLIT(equation)
  in_training = sizes['B'] * sizes['T'] >= _FEWEST_ROWS
  if in_training and matrix.ndim == 2 and len(matrix) > matrix.shape[1]:
    merged_matrix, matrix = merged_matrix[::-1], _with_own_gradient(matrix.T)
  out = jnp.einsum(f'{merged_x},{merged_matrix}->{merged_out}', x, matrix, **kwargs)
  return out.reshape([sizes[letter] for letter in of_out])


@jax.custom_jvp
def _with_own_gradient(matrix: jax.Array) -> jax.Array:
  """Return the matrix; its gradient is computed in this shape, then turned with the matrix.

  On a CPU a product of rows [M, I] and [M, O] takes up to 1.7 times as long for the result [O, I]
  as for [I, O], if O is the larger. XLA would turn the product instead of its result.
  """
  return matrix


@_with_own_gradient.defjvp
def _tangent(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
  (matrix,), (tangent,) = primals, tangents
  return matrix, jax.lax.optimization_barrier(tangent)


def _merged(array: jax.Array, letters: str, pairs: Sequence[str]) -> jax.Array:
  """Merge each pair of adjacent axes of the array into one axis."""
  for pair in pairs:
    if (at := letters.find(pair)) >= 0:
      array = array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])
      letters = letters.replace(pair, pair[0])
  return array


def project(
  x: jax.Array,
  matrix: jax.Array,
  axes: Axes,
  *,
  contract: int,
  out_heads: tuple[int, int] | None = None,
) -> jax.Array:
  """Multiply activations with a matrix of parameters, which may be split over devices.

  Args:
    x: activations [B, T, I], or heads [B, T, H, K], which zeros may fill.
    matrix: [I, O] or [O, I], as it is stored; cast to the dtype of x.
    axes: the logical axes of the matrix; one is `width`, and several devices split the other.
    contract: the position of I in the matrix.
    out_heads: (H, K) for an output of heads [B, T, H, K], filled with zeros; None: [B, T, O].
  """
  matrix = matrix.astype(x.dtype)
  x_axes, out_axes = ('BTHK' if x.ndim == 4 else 'BTI'), ('BTHK' if out_heads else 'BTO')
  stored = [x_axes.replace('BT', ''), out_axes.replace('BT', '')]
  if contract == 1:
    stored.reverse()
  heads = out_heads or (x.shape[2:] if x.ndim == 4 else None)
  from_width = axes[contract] == 'width'
  split = axes[1 - axes.index('width')]

  def multiply(
    x: jax.Array, shard: jax.Array, x_axes: str = x_axes, out_axes: str = out_axes
  ) -> jax.Array:
    """Multiply x with the matrix or a shard of it, which has its whole width."""
    if heads is not None:
      at = stored.index('HK')
      number = heads[0] * shard.shape[at] // matrix.shape[at]
      whole_width = tuple(None if axis == 'width' else axis for axis in axes)
      shard = split_heads(shard, at, (number, heads[1]), whole_width)
    return product(f'{x_axes},{"".join(stored)}->{out_axes}', x, shard)

  def on_shard(x: jax.Array, shard: jax.Array) -> jax.Array:
    # Heads that devices exchange are moved to the first axis, as `per_device.scatter` needs.
    if not per_device.is_split(split):
      return multiply(x, shard)
    if from_width and x.ndim == 4:
      whole_HxBxTxK: Any = per_device.gather(jnp.moveaxis(x, 2, 0), 'heads', 0)
      return multiply(whole_HxBxTxK, shard, x_axes='HBTK')
    if from_width:
      return multiply(x, shard)
    if out_heads:
      summed_HxBxTxK: Any = per_device.scatter(multiply(x, shard, out_axes='HBTK'), 'heads')
      return jnp.moveaxis(summed_HxBxTxK, 0, 2)
    return per_device.total(multiply(x, shard), split)

  if heads and heads[0] % shard_count('heads'):
    return multiply(x, matrix)
  is_in_split, is_out_split = not from_width or x.ndim == 4, from_width or bool(out_heads)
  return per_device.on_each_device(
    on_shard, x, matrix, axes, split_in=is_in_split, split_out=is_out_split
  )


def look_up(table: jax.Array, ids_BxT: jax.Array, axes: Axes, dtype: jnp.dtype) -> jax.Array:
  """Return rows of a table of parameters, [B, T, D] in `dtype`.

  The gradient of a row is summed in the dtype of the table, float32, on each device and between
  devices. A frequent token has thousands of gradients in a batch, and a sum in bfloat16 would stop
  growing after a few hundred.

  `axes` are those of the table [V, D]; the second is `width`. A table with a split width is
  gathered in `dtype`, that of the activations.
  """

  def on_device(ids_BxT: jax.Array, table: jax.Array) -> jax.Array:
    if not per_device.is_split(axes[0]):
      return jnp.take(table, ids_BxT, axis=0).astype(dtype)
    ids_BxT = ids_BxT - per_device.first_index(axes[0], len(table))
    here_BxTx1 = ((ids_BxT >= 0) & (ids_BxT < len(table)))[..., None]
    rows_BxTxD = jnp.take(table, ids_BxT, axis=0, mode='clip').astype(dtype)
    return per_device.total(jnp.where(here_BxTx1, rows_BxTxD, 0), axes[0])

  return per_device.on_each_device(on_device, ids_BxT, table, axes, gathered_in=dtype)


def repeat(parameter: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Return a parameter broadcast to `shape`, in `dtype`.

  The cast comes after the broadcast, so that the gradient sums over all rows in float32.
  """
  return jnp.broadcast_to(parameter, shape).astype(dtype)


def split_heads(
  matrix: jax.Array, axis: int, heads: tuple[int, ...], axes: tuple[str | None, ...]
) -> jax.Array:
  """Split the axis D of a matrix [I, D], [D, O] or a bias [D] into heads (H, K).

  Zeros fill heads if K is more than D/H. `axis` is the position of D; `axes` are the logical axes
  of the matrix.
  """
  shape = list(matrix.shape)
  width = shape[axis] // heads[0]
  shape[axis : axis + 1] = heads[0], width
  if width == heads[1]:
    return matrix.reshape(shape)
  fill = [(0, heads[1] - width if i == axis + 1 else 0) for i in range(len(shape))]
  # Constrain first, because XLA fails to fill heads that are split over devices (jax 0.10.2).
  return jnp.pad(constrain(matrix, *axes).reshape(shape), fill)
