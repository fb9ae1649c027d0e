"""Devices that compute wrong."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def flip_bit(array: jax.Array, device: int) -> jax.Array:
  """Return an array with the lowest bit of the first number of a device's part flipped.

  `device` is its place in `jax.devices()`.
  """
  parts = []
  for shard in array.addressable_shards:
    part = shard.data
    if shard.device == jax.devices()[device]:
      wrong = np.array(part)
      wrong.reshape(-1).view(f'uint{8 * wrong.itemsize}')[0] ^= 1
      part = jax.device_put(wrong, shard.device)
    parts.append(part)
  return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def with_fault(step: Callable[..., Any], call: int, device: int) -> Callable[..., Any]:
  """Return a training step; one of its calls, counted from 1, has a wrong bit on a device."""
  calls = 0

  def faulty(*arguments: Any) -> Any:
    nonlocal calls
    calls += 1
    state, figures = step(*arguments)
    if calls == call:
      params = {**state['params'], 'embedding': flip_bit(state['params']['embedding'], device)}
      state = {**state, 'params': params}
    return state, figures

  return faulty
