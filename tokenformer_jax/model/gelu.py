"""GELU of scores that are scaled by their norm, with a derivative that takes few operations.

The gradient of the scores is the one operation of Pattention that the vector unit of a TPU can
limit (docs/planned_speed.md). So value and derivative share their factors, and constants are
multiplied into the scale, which is one number for a row.
"""

import math

import jax
import jax.numpy as jnp

_HALF_ROOT = math.sqrt(0.5)
_SLOPE = 2 / math.sqrt(math.pi)  # of erf at 0
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
  if gelu == 'tanh':
    return jax.nn.gelu(x, approximate=True)
  return _exact(x.astype(jnp.float32)).astype(x.dtype)


def activate_scaled(x: jax.Array, scale: jax.Array, gelu: str) -> jax.Array:
  """Return `activate(x · scale, gelu)` for float32 arrays; the scale broadcasts to x."""
  return jax.nn.gelu(x * scale, approximate=True) if gelu == 'tanh' else _exact_scaled(x, scale)


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
