"""The product of activations with a matrix of parameters."""

import jax
import jax.numpy as jnp


def product(equation: str, x_BxTxI: jax.Array, matrix: jax.Array, **kwargs) -> jax.Array:
  """`jnp.einsum(equation, x, matrix)` of x as a matrix [M, I] with M = B T: [B, T, O].

  The gradient of the matrix then sums over one axis and not over two, for which XLA would first
  write a transposed copy of the output's gradient on a CPU.

  Args:
    equation: `MI,IO->MO` or `MI,OI->MO`.
    x_BxTxI: activations.
    matrix: [I, O] or [O, I], cast to the dtype of x.
    **kwargs: of `jnp.einsum`.
  """
  x_MxI = x_BxTxI.reshape(-1, x_BxTxI.shape[-1])
  out_MxO = jnp.einsum(equation, x_MxI, matrix.astype(x_BxTxI.dtype), **kwargs)
  return out_MxO.reshape(*x_BxTxI.shape[:-1], out_MxO.shape[-1])
