"""GELU of scores that are scaled by their norm, with a derivative that takes few operations.

The gradient of the scores is the one operation of Pattention that the vector unit of a TPU can
limit (docs/planned_speed.md). So value and derivative share their factors, and constants are
multiplied into the scale, which is one number for a row.
"""

import functools
import math

import jax
import jax.numpy as jnp

from tokenformer_jax.parallel.sharding import platform

_HALF_ROOT = math.sqrt(0.5)
_SLOPE = 2 / math.sqrt(math.pi)  # of erf at 0
# The `tanh` approximation is x σ(x (a + b x²)) with these coefficients.
_LINEAR, _CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
# Keeps the scale of a row of zeros finite; far below the rounding of any other row.
EPSILON = 1e-12


def inverse_root(square: jax.Array, reference: jax.Array) -> jax.Array:
  """Return τ / ‖A‖₂, the scale of scores A, given ‖A‖₂² + `EPSILON` and τ²."""
  return jax.lax.rsqrt(square) * jnp.sqrt(reference)


def activate(x: jax.Array, gelu: str) -> jax.Array:
  """Apply GELU elementwise, by the error function (`exact`) or by its `tanh` approximation.

  `exact` computes erf in float32. It takes a third of the time of `jax.nn.gelu` on a CPU, and is
  cheaper on a TPU as well; `jax.nn.gelu` uses erfc to keep the relative error of results near 0.
  The absolute error is one rounding of x.
  """
  if gelu == 'tanh' and platform() == 'gpu':
    return _by_logistic(x.astype(jnp.float32)).astype(x.dtype)
  if gelu == 'tanh':
    return jax.nn.gelu(x, approximate=True)
  return _exact(x.astype(jnp.float32)).astype(x.dtype)


def activate_scaled(x: jax.Array, scale: jax.Array, gelu: str) -> jax.Array:
  """Return `activate(x · scale, gelu)` for float32 arrays; the scale broadcasts to x."""
  return activate(x * scale, gelu) if gelu == 'tanh' else _exact_scaled(x, scale)


def twice_slope(x: jax.Array, scale: jax.Array, gelu: str) -> jax.Array:
  """Return 2 GELU′(x · scale) for float32 arrays."""
  if gelu == 'tanh':
    _, slope = jax.jvp(lambda z: activate(z, gelu), (x * scale,), (jnp.full_like(x, 2.0),))
    return slope
  return _twice_slope(x * (scale * _HALF_ROOT))


def _twice_slope(root: jax.Array) -> jax.Array:
  """Return 2 GELU′(z), given z / √2."""
  return (1 + jax.lax.erf(root)) + root * (jnp.exp(-jnp.square(root)) * _SLOPE)


@jax.custom_jvp
def _exact(x: jax.Array) -> jax.Array:
  return 0.5 * x * (1 + jax.lax.erf(x * _HALF_ROOT))


@_exact.defjvp
def _exact_rule(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (x,), (change,) = primals, tangents
  return _exact(x), _twice_slope(x * _HALF_ROOT) * (0.5 * change)


@jax.custom_jvp
def _by_logistic(x: jax.Array) -> jax.Array:
  """Return the `tanh` approximation by exp.

  XLA for GPUs joins exp with other operations of a row. It gives tanh a kernel of its own, whose
  result in float32 it keeps for the backward pass.
  """
  return x * jax.nn.sigmoid(x * (_LINEAR + _CUBIC * jnp.square(x)))


@_by_logistic.defjvp
def _by_logistic_rule(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (x,), (change,) = primals, tangents
  share = jax.nn.sigmoid(x * (_LINEAR + _CUBIC * jnp.square(x)))
  rise = x * (_LINEAR + 3 * _CUBIC * jnp.square(x))
  return _by_logistic(x), share * (1 + rise * (1 - share)) * change


@jax.custom_jvp
def _exact_scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
  return x * (scale * 0.5) * (1 + jax.lax.erf(x * (scale * _HALF_ROOT)))


@_exact_scaled.defjvp
def _exact_scaled_rule(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  (x, scale), (d_x, d_scale) = primals, tangents
  # Multiply by 0.5 where there is one number for a row.
  change = d_x * (0.5 * scale) + x * (0.5 * d_scale)
  return _exact_scaled(x, scale), twice_slope(x, scale, 'exact') * change


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def activate_rows(scores: jax.Array, reference: int, gelu: str) -> jax.Array:
  """Return GELU(τ A / ‖A‖₂) of scores A [..., N] in their dtype; `reference` is τ².

  Value and gradient are chains of functions of a row and its sums, in which no sum has two uses.
  XLA for GPUs makes one kernel of such a chain, which reads its rows once. So nothing but the
  scores is kept for the gradient, which computes the norm again.
  """
  return activate(_normalized(scores, reference), gelu).astype(scores.dtype)


def _normalized(scores: jax.Array, reference: int) -> jax.Array:
  """Return τ A / ‖A‖₂ in float32."""
  x = scores.astype(jnp.float32)
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPSILON
  return x * inverse_root(square, jnp.float32(reference))


def _rows_forward(scores: jax.Array, reference: int, gelu: str) -> tuple[jax.Array, jax.Array]:
  return activate_rows(scores, reference, gelu), scores


def _rows_backward(
  reference: int, gelu: str, scores: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
  """With z = τ A / ‖A‖₂ and C = dW GELU′(z), return τ / ‖A‖₂ · (C − z (C · z) / τ²)."""
  # Without the barrier XLA may keep z, in float32, from the forward pass.
  scores = jax.lax.optimization_barrier(scores)
  x, z = scores.astype(jnp.float32), _normalized(scores, reference)
  change = gradient.astype(jnp.float32) * (0.5 * twice_slope(z, jnp.float32(1), gelu))
  change = change - z * (jnp.sum(change * z, axis=-1, keepdims=True) / reference)
  # The scale τ / ‖A‖₂ by a sum of its own, z · A = τ ‖A‖₂; for a row of zeros as in `_normalized`.
  along = jnp.sum(z * x, axis=-1, keepdims=True)
  scale = reference / jnp.maximum(along, math.sqrt(reference * EPSILON))
  return ((change * scale).astype(scores.dtype),)


activate_rows.defvjp(_rows_forward, _rows_backward)
