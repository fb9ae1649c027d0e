"""Attention over a cache gives the same output as attention over the whole text."""

import functools

import jax
import jax.numpy as jnp
import pytest
from tiny import normal_params, tiny_model

from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.cache import KV, Ring
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.params import define

LENGTH = 24


@functools.cache
def _attention(window: int):
  model = tiny_model(window=window)
  definition = define(
    lambda rngs: Attention(model.layer.mixer, model, execution=Execution(), rngs=rngs)
  )
  return definition.bind(normal_params(definition, 0.5))


@pytest.mark.parametrize(('window', 'kind', 'slots'), [(0, KV, 24), (5, Ring, 5), (100, Ring, 24)])
def test_a_cache_has_the_slots_that_can_be_seen(window, kind, slots):
  cache = _attention(window).init_cache(3, LENGTH, jnp.bfloat16)
  assert isinstance(cache, kind) and cache.keys.dtype == jnp.bfloat16
  assert cache.keys.shape == cache.values.shape == (3, 4, slots, 8), 'memory for unseen slots'
  axes = _attention(window).cache_axes()
  assert jax.tree.structure(cache) == jax.tree.structure(
    axes, is_leaf=lambda node: type(node) is tuple
  ), 'a cache is another than its axes'


@pytest.mark.parametrize(('start', 'length'), [(0, 3), (0, 9), (3, 1), (7, 4), (6, 12)])
def test_a_ring_keeps_the_last_slots(start, length):
  ring = Ring(*[jnp.full((1, 1, 5, 1), -1.0)] * 2)
  slots = jnp.arange(start + length, dtype=jnp.float32).reshape(1, 1, -1, 1)
  if start:
    ring = ring.write(KV(slots[:, :, :start], slots[:, :, :start]), 0)
  ring = ring.write(KV(slots[:, :, start:], -slots[:, :, start:]), start)
  last = range(max(0, start + length - 5), start + length)
  want = [-1.0] * 5
  for slot in last:
    want[slot % 5] = slot
  assert ring.keys.ravel().tolist() == want, 'a slot is not at its place, or an old one is kept'
