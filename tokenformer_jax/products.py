"""Products of activations with matrices of parameters."""

import jax
import jax.numpy as jnp

from tokenformer_jax.sharding import constrain, platform


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
  rows = x.reshape(-1, *x.shape[2:])
  out = jnp.einsum(equation.replace('BT', 'M'), rows, matrix, **kwargs)
  return out.reshape(*x.shape[:2], *out.shape[1:])


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
