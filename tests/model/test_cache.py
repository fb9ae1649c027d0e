"""A ring keeps the last slots of a text."""

import jax
import numpy as np
import pytest

from tokenformer_jax.model.cache import KV, Ring


@pytest.mark.parametrize(('start', 'length'), [(0, 9), (7, 1), (6, 12)])
def test_a_ring_keeps_the_last_slots(start, length):
  ring = Ring(*[np.full((1, 1, 5, 1), -1, np.float32)] * 2)
  slots = np.arange(start + length, dtype=np.float32).reshape(1, 1, -1, 1)
  write = jax.jit(Ring.write, static_argnames='start')
  if start:
    ring = write(ring, KV(slots[:, :, :start], slots[:, :, :start]), start=0)
  ring = write(ring, KV(slots[:, :, start:], -slots[:, :, start:]), start=start)
  last = range(max(0, start + length - 5), start + length)
  want = [-1.0] * 5
  for slot in last:
    want[slot % 5] = slot
  assert ring.keys.ravel().tolist() == want, 'a slot is not at its place, or an old one is kept'
