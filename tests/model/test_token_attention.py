"""Clipped distances and scales by length, of whole texts and from a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenformer_jax.config import (
  NoPositionsConfig,
  PositionScaleConfig,
  RotaryConfig,
  SeenScaleConfig,
  SoftmaxConfig,
)
from tokenformer_jax.model.layer import FROM_START, Context
from tokenformer_jax.model.mixers.gated_unit import WEIGHTS
from tokenformer_jax.model.mixers.length_scale import LengthScaled, scale_by_length
from tokenformer_jax.model.positions import Rotary
from tokenformer_jax.model.token_attention import TokenAttention, make_positions

LENGTH, WIDTH, WIDE = 24, 8, 12  # of texts, of queries and keys, and of values
PADDING = np.array([0, 3, 11])


@functools.cache
def _attention(
  clip: int = 0, window: int = 0, causal: bool = True, fraction: float = 1.0, scores='softmax'
) -> TokenAttention:
  positions = RotaryConfig(fraction, clip=clip) if fraction else NoPositionsConfig()
  encoding = make_positions(SoftmaxConfig(positions=positions), WIDTH, causal)
  return TokenAttention(encoding, causal, window, WEIGHTS[scores])


def _arrays(heads: int = 2) -> list[jax.Array]:
  """Queries, keys and values."""
  rng = np.random.default_rng(0)
  widths = (WIDTH, WIDTH, WIDE)
  return [jnp.asarray(rng.normal(size=(3, LENGTH, heads, w)), jnp.float32) for w in widths]


def _turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
  """Rotate by angles of each plane in float64: entry i is paired with entry i + K/2."""
  first, second = np.split(x, 2, axis=-1)
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize(('clip', 'causal'), [(1, True), (5, True), (5, False)])
def test_clipped_distances_are_the_formula(clip, causal):
  """Pair by pair: the query is turned by min(i − j, clip) positions, and the key is not."""
  query, key, value = (np.float64(x) for x in _arrays())
  slots = np.arange(LENGTH)
  distance_TxS = slots[:, None] - slots[None]
  turns_K = 10000.0 ** (-2 * np.arange(WIDTH // 2) / WIDTH)
  angles = np.minimum(distance_TxS, clip)[..., None] * turns_K
  turned = _turned(query[:, :, None], angles[None, :, :, None])
  scores = np.einsum('BTSHK,BSHK->BHTS', turned, key) / np.sqrt(WIDTH)
  weights = np.exp(scores) * ((distance_TxS >= 0) | (not causal))
  want = np.einsum('BHTS,BSHK->BTHK', weights / weights.sum(-1, keepdims=True), value)
  got = jax.jit(lambda *x: _attention(clip, causal=causal)(*x, FROM_START)[0])(*_arrays())
  np.testing.assert_allclose(got, want, atol=1e-5, err_msg='not ReRoPE')


# Slots that are read together: a prompt, then one by one or several.
PARTS = {'one by one': [9, *[1] * 15], 'several at a time': [9, 1, 13, 1]}


@functools.cache
def _read_and_whole(clip: int, window: int, scores: str):
  """A function that reads slots into a cache, and the output for whole texts."""
  attention = _attention(clip, window, scores=scores)

  @functools.partial(jax.jit, static_argnames='first')
  def read(cache, arrays, start, first):
    return attention(*arrays, Context(0 if first else start, PADDING), cache)

  whole = jax.jit(lambda *x: attention(*x, Context(0, PADDING))[0])(*_arrays())
  return read, whole


@pytest.mark.parametrize(('clip', 'window', 'scores'), [(5, 0, 'softmax'), (3, 8, 'squared_relu')])
@pytest.mark.parametrize('parts', PARTS.values(), ids=PARTS)
def test_attention_from_a_cache_is_that_of_the_whole_text(parts, clip, window, scores):
  attention = _attention(clip, window, scores=scores)
  read, want = _read_and_whole(clip, window, scores)
  cache, outputs = attention.init_cache(3, 2, LENGTH, (WIDTH, WIDE), jnp.float32), []
  arrays = [np.asarray(x) for x in _arrays()]
  for start, size in zip(np.cumsum([0, *parts]), parts, strict=False):
    now = [x[:, start : start + size] for x in arrays]
    out, cache = read(cache, now, start, first=bool(start == 0))
    outputs.append(out)
  is_token = np.arange(LENGTH)[None] >= PADDING[:, None]
  np.testing.assert_allclose(
    np.concatenate(outputs, axis=1)[is_token],
    np.asarray(want)[is_token],
    atol=1e-5,
    err_msg='a slot is lost, seen too long, or taken for another',
  )


# Scales by length


def _factors(
  config: SeenScaleConfig | PositionScaleConfig, positions: np.ndarray, seen: np.ndarray
) -> np.ndarray:
  scale = jax.jit(functools.partial(scale_by_length, config))
  return np.asarray(scale(np.ones((*positions.shape, 1, 1), np.float32), positions, seen))[
    ..., 0, 0
  ]


def test_the_factor_of_a_position_is_one_up_to_the_trained_length():
  positions = np.arange(-3, 4 * 512)[None]  # those of padding are negative
  got = _factors(PositionScaleConfig(length=512), positions, positions + 1)
  inside = positions < 512
  assert np.all(got[inside] == 1), 'short texts are computed otherwise than in training'
  np.testing.assert_allclose(got[~inside], np.log(positions[~inside] + 1) / np.log(512), rtol=1e-6)


def test_the_factor_of_seen_keys_begins_to_grow_at_the_smallest_count():
  seen = np.array([[1, 15, 16, 17, 512, 4096]])
  got = _factors(SeenScaleConfig(), np.zeros_like(seen), seen)
  np.testing.assert_allclose(got, np.log(np.maximum(seen, 16)) / np.log(512), rtol=1e-6)


@pytest.mark.parametrize(
  ('causal', 'window', 'want'),
  [
    (True, 0, [[1, 2, 3, 4, 5, 6], [1, 1, 1, 2, 3, 4]]),
    (True, 3, [[1, 2, 3, 3, 3, 3], [1, 1, 1, 2, 3, 3]]),
    (False, 0, [[6] * 6, [4] * 6]),
  ],
)
def test_queries_are_scaled_by_the_keys_that_they_see(causal, window, want):
  rotary = Rotary(NoPositionsConfig(), WIDTH)
  scaled = LengthScaled(rotary, SeenScaleConfig(least=2, base=4.0), causal, window)
  context = Context(0, np.array([0, 2]))

  @jax.jit
  def run():
    positions = context.positions(6)
    return scaled.query(jnp.ones((2, 6, 1, 1)), positions, context)[..., 0, 0], positions

  got, positions = map(np.asarray, run())
  counts, is_token = np.maximum(want, 2), positions >= 0
  np.testing.assert_allclose(got[is_token], (np.log(counts) / np.log(4))[is_token], rtol=1e-6)
