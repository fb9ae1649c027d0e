"""Products of activations with matrices of parameters."""

import jax
import jax.numpy as jnp


def product(equation: str, x: jax.Array, matrix: jax.Array, **kwargs) -> jax.Array:
  """`jnp.einsum(equation, x, matrix)` of x [B, T, …] as [M, …] with M = B T: [B, T, …].

  The gradient of the matrix then sums over one axis and not over two, for which XLA would first
  write a transposed copy of the output's gradient on a CPU.

  Args:
    equation: of axes M and others, `MI,IO->MO` for example.
    x: activations, [B, T, …].
    matrix: cast to the dtype of x.
    **kwargs: of `jnp.einsum`.
  """
  out = jnp.einsum(equation, x.reshape(-1, *x.shape[2:]), matrix.astype(x.dtype), **kwargs)
  return out.reshape(*x.shape[:2], *out.shape[1:])


def split_heads(matrix: jax.Array, axis: int, heads: int, head_width: int) -> jax.Array:
  """A matrix [D, O] or [I, D] with its axis D as heads, [H, K]; zeros fill K up to `head_width`."""
  shape = list(matrix.shape)
  width = shape[axis] // heads
  shape[axis : axis + 1] = heads, width
  fill = [(0, head_width - width if i == axis + 1 else 0) for i in range(len(shape))]
  return jnp.pad(matrix.reshape(shape), fill)
