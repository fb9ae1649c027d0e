"""Rotary positions in both layouts, whole and partial, near and far."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny import with_gradients

from tokenformer_jax.config import (
  LinearScalingConfig,
  Llama3ScalingConfig,
  NoPositionsConfig,
  RotaryConfig,
  YarnScalingConfig,
)
from tokenformer_jax.model.positions import Rotary, rotary_width, slowed

BASE = 10000.0
LAYOUTS = ('half_split', 'interleaved')
EACH_LAYOUT = pytest.mark.parametrize('layout', LAYOUTS)

GOLDEN = np.load(tiny_run.ROOT / 'tests/golden/rope.npz')
PARTIAL = json.loads(str(GOLDEN['meta']))['partial_rotary_dim']
# What float32 angles reach at these positions; angles of bfloat16 fail by far.
TOLERANCES = {'default': 2e-6, 'offset': 1e-4, 'far': 1e-3}


@functools.partial(jax.jit, static_argnames=('layout', 'width'))
def _rotate(x, positions, layout='half_split', width=8):
  """Rotate by positions [T], or [B, T]."""
  config = RotaryConfig(fraction=width / x.shape[-1], base=BASE, layout=layout)
  return Rotary(config, x.shape[-1])(x, jnp.atleast_2d(positions))


def _heads(seed: int, length: int = 6, dtype=np.float32) -> np.ndarray:
  """[B, T, H, K] with K = 8."""
  return np.random.default_rng(seed).normal(size=(2, length, 3, 8)).astype(dtype)


@EACH_LAYOUT
@pytest.mark.parametrize('part', ['full', 'partial'])
@pytest.mark.parametrize('where', TOLERANCES)
def test_rotations_are_the_golden_ones(layout, part, where):
  for name in ('q', 'k'):
    x = GOLDEN[name]
    width = x.shape[-1] if part == 'full' else PARTIAL
    np.testing.assert_allclose(
      _rotate(x, GOLDEN[f'positions/{where}'], layout, width),
      GOLDEN[f'{layout}/{part}/{where}/{name}'],
      atol=TOLERANCES[where],
      err_msg=f'{name} is not rotated as by the public code',
    )


def test_without_positions_nothing_is_rotated():
  x = _heads(0)
  assert Rotary(NoPositionsConfig(), 8)(x, 1 + np.arange(6)[None]) is x


@EACH_LAYOUT
def test_bfloat16_keeps_the_angles(layout):
  x, positions = _heads(0, dtype=jnp.bfloat16), 10**6 + np.arange(6)
  got, want = (np.float32(_rotate(one, positions, layout)) for one in (x, np.float32(x)))
  error = np.abs(got - want)
  bound = 2**-8 * np.abs(want) + 1e-5  # the rounding to bfloat16
  assert np.all(error < bound), 'angles of far positions are rounded to bfloat16'


# TokenFormer's four sizes have heads of 64, 64, 80 and 96 entries.
@pytest.mark.parametrize(('head', 'rotated'), [(64, 16), (80, 20), (96, 24), (8, 2), (12, 2)])
def test_rotary_width(head, rotated):
  assert rotary_width(head, 0.25) == rotated, 'a quarter of each head, in whole planes, is rotated'


# By the functions of transformers 5, with base 500000 and 16 entries.
SCALED = {
  LinearScalingConfig(4.0): (
    [0.25, 0.0484807, 0.00940151, 0.00182317, 0.000353553, 6.8562e-05, 1.32957e-05, 2.57835e-06],
    1.0,
  ),
  Llama3ScalingConfig(8.0, 1.0, 4.0, 8192): (
    [1.0, 0.193923, 0.037606, 0.00729267, 0.000524846, 3.4281e-05, 6.64787e-06, 1.28917e-06],
    1.0,
  ),
  YarnScalingConfig(4.0, length=32768): (
    [1.0, 0.193923, 0.037606, 0.00729267, 0.00106066, 0.000137124, 1.32957e-05, 2.57835e-06],
    1.138629436111989,
  ),
}


@pytest.mark.parametrize('scaling', SCALED, ids=lambda scaling: scaling.kind)
def test_scaled_rotations_are_those_of_transformers(scaling):
  frequencies, factor = SCALED[scaling]
  turns = 500000.0 ** (-np.arange(8) / 8) / (2 * np.pi)
  np.testing.assert_allclose(2 * np.pi * slowed(scaling, turns, 500000.0), frequencies, rtol=1e-5)
  rotary = Rotary(RotaryConfig(0.5, 500000.0, scaling=scaling), 32)
  x = np.random.default_rng(0).normal(size=(1, 3, 1, 32)).astype(np.float32)
  positions = np.array([[0, 7, 900]])
  angles = positions[0][:, None] * np.array(frequencies)
  first, second = x[0, :, 0, :8], x[0, :, 0, 8:16]
  want = factor * np.concatenate(
    [
      first * np.cos(angles) - second * np.sin(angles),
      second * np.cos(angles) + first * np.sin(angles),
    ],
    axis=1,
  )
  got = np.asarray(jax.jit(rotary)(x, positions))
  np.testing.assert_allclose(got[0, :, 0, :16], want, atol=2e-3)
  np.testing.assert_array_equal(got[..., 16:], x[..., 16:], 'entries that do not turn are scaled')


def test_a_gpu_rotates_alike(monkeypatch):
  x = _heads(3)
  rotary = Rotary(RotaryConfig(fraction=0.5, base=BASE), 8)

  def both():
    return jax.jit(functools.partial(with_gradients, lambda x: rotary(x, np.arange(6)[None])))

  expected = both()(x)
  monkeypatch.setattr('tokenformer_jax.model.positions.platform', lambda: 'gpu')
  assert 'dot_general' not in str(jax.make_jaxpr(both())(x))
  for one, other in zip(both()(x), expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
