"""A function and its gradient, computed together, for tests that compare both."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def with_gradients(f: Callable[..., jax.Array], *arguments: jax.Array) -> tuple[jax.Array, ...]:
  """What f returns, and the gradients of all arguments for some gradient of that."""
  out, backward = jax.vjp(f, *arguments)
  return out, *backward(jnp.cos(out))
