"""Attention over a cache gives the same output as attention over the whole text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_model

from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.cache import KV, Ring
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.params import define

LENGTH = 24
X_BxTxD = np.random.default_rng(1).normal(size=(3, LENGTH, 32)).astype(np.float32)
PADDING = np.array([0, 3, 11])  # less and more than the windows below


@functools.cache
def _attention(window: int):
  model = tiny_model(window=window)
  definition = define(
    lambda rngs: Attention(model.layer.mixer, model, execution=Execution(), rngs=rngs)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.5, p.dtype), definition.abstract
  )
  return definition.bind(params)


@functools.cache
def _whole(window: int, padded: bool) -> jax.Array:
  context = Context(0, PADDING if padded else None)
  return jax.jit(lambda x: _attention(window)(x, context)[0])(X_BxTxD)


@functools.cache
def _read(window: int, padded: bool):
  @functools.partial(jax.jit, static_argnames='first')
  def read(cache, x, start, first):
    context = Context(0 if first else start, PADDING if padded else None)
    return _attention(window)(x, context, cache)

  return read


# Slots that are read together: a prompt, then one by one or several.
PARTS = {
  'prompt, then one by one': [9, *[1] * 15],
  'a prompt of one': [*[1] * LENGTH],
  'several at a time': [9, 7, 1, 7],
  'a long prompt': [17, 7],
}


@pytest.mark.parametrize('padded', [False, True], ids=['whole rows', 'left-padded'])
@pytest.mark.parametrize('window', [0, 5])
@pytest.mark.parametrize('parts', PARTS.values(), ids=PARTS)
def test_attention_from_a_cache_is_that_of_the_whole_text(parts, window, padded):
  read = _read(window, padded)
  cache, outputs = _attention(window).init_cache(3, LENGTH, jnp.float32), []
  for start, size in zip(np.cumsum([0, *parts]), parts, strict=False):
    out, cache, _ = read(cache, X_BxTxD[:, start : start + size], start, first=bool(start == 0))
    outputs.append(out)
  is_token = np.arange(LENGTH)[None] >= (PADDING[:, None] if padded else np.zeros((3, 1)))
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1)[is_token],
    np.asarray(_whole(window, padded))[is_token],
    atol=1e-4,
    err_msg='a slot is lost, seen too long, or taken for another',
  )


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
