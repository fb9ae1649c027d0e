"""Rotary embedding: how queries and keys depend on their positions."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import (
  LinearScalingConfig,
  Llama3ScalingConfig,
  NoPositionsConfig,
  RotaryConfig,
  RotaryScalingConfig,
  YarnScalingConfig,
)
from tokenformer_jax.model import kernels
from tokenformer_jax.model.layer import Context
from tokenformer_jax.parallel.sharding import platform

_TURN = 2.0**32  # units of a whole turn in 32-bit angles


def rotary_width(head_width: int, fraction: float) -> int:
  """Return the number of rotated entries of a head, an even number."""
  return int(head_width * fraction) // 2 * 2


class Rotary:
  """Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 15) of the entries of a head.

  With r rotated entries, the i-th pair of entries is a plane that turns by base^(−2i/r) a position.
  A pair is i and i + r/2 in the layout `half_split` (GPT-NeoX), and 2i and 2i + 1 in the layout
  `interleaved` (RoFormer, GPT-J).
  """

  def __init__(self, config: RotaryConfig | NoPositionsConfig, head_width: int):
    """Plan the rotation of heads; `head_width` is K without zeros that fill heads."""
    self.width, self.score = 0, kernels.dot_product
    if isinstance(config, RotaryConfig):
      self.width = rotary_width(head_width, config.fraction)
      self.base, self.layout, self.scaling = config.base, config.layout, config.scaling

  @jax.named_scope('rotary')
  def __call__(self, x_BxTxHxK: jax.Array, positions_BxT: jax.Array) -> jax.Array:
    """Rotate heads [B, T, H, K] by positions [B, T], or [1, T] for all rows."""
    if not self.width:
      return x_BxTxHxK
    partner_KxK, turns_K = self._planes(x_BxTxHxK.shape[-1])
    angles_BxTxK = _angles(positions_BxT, turns_K)
    # On a CPU XLA would compute both again for every row and head; it keeps results of a product.
    same_KxK = np.eye(len(turns_K), dtype=np.float32)
    is_kept = platform() == 'cpu' and x_BxTxHxK.shape[1] > 1

    def wave(function: Callable[[jax.Array], jax.Array]) -> jax.Array:
      wave_BxTxK = function(angles_BxTxK)
      if is_kept:
        wave_BxTxK = jnp.matmul(wave_BxTxK, same_KxK, precision='highest')
      return wave_BxTxK[:, :, None]

    cos_BxTx1xK, sin_BxTx1xK = wave(jnp.cos), wave(jnp.sin)
    if (factor := gain(self.scaling)) != 1:
      gains_1x1x1xK = np.where(turns_K == 0, 1, factor).astype(np.float32)[None, None, None]
      cos_BxTx1xK, sin_BxTx1xK = gains_1x1x1xK * cos_BxTx1xK, gains_1x1x1xK * sin_BxTx1xK
    partners_BxTxHxK = self._partners(x_BxTxHxK, partner_KxK)
    rotated = x_BxTxHxK.astype(jnp.float32) * cos_BxTx1xK
    rotated = rotated + partners_BxTxHxK.astype(jnp.float32) * sin_BxTx1xK
    return rotated.astype(x_BxTxHxK.dtype)

  def query(self, query: jax.Array, positions_BxT: jax.Array, context: Context) -> jax.Array:
    """Return queries [B, T, H, K] with their positions, which are those of the context."""
    del context
    return self(query, positions_BxT)

  def key(self, key: jax.Array, positions_BxT: jax.Array) -> jax.Array:
    """Return keys [B, T, H, K] with their positions, as caches have them."""
    return self(key, positions_BxT)

  def pairs(
    self, query: jax.Array, key: jax.Array, positions_BxT: jax.Array, positions_BxS: jax.Array
  ) -> tuple[Any, Any]:
    """Return the arguments of `self.score`, from the results of `query` and `key`."""
    del positions_BxT, positions_BxS
    return query, key

  def _partners(self, x_BxTxHxK: jax.Array, partner_KxK: np.ndarray) -> jax.Array:
    """Return the other entry of each entry's plane, with its sign; see `_planes`."""
    half = self.width // 2
    if platform() == 'tpu' or self.layout == 'interleaved':
      matrix_KxK = partner_KxK.astype(x_BxTxHxK.dtype)
      return jnp.einsum('BTHK,KL->BTHL', x_BxTxHxK, matrix_KxK, precision='highest')
    # GPUs and CPUs move entries in the same loop that multiplies them by cosine and sine.
    first, second, rest = jnp.split(x_BxTxHxK, (half, self.width), axis=-1)
    return jnp.concatenate((-second, first, jnp.zeros_like(rest)), axis=-1)

  def _planes(self, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix that swaps the entries of each plane, and the turns of each entry.

    A product with a matrix of 0 and ±1 is exact. On a TPU this small product costs far less than
    moving a few entries of every head.
    """
    pairs = np.arange(self.width // 2)
    first, second = pairs, pairs + self.width // 2
    if self.layout == 'interleaved':
      first, second = 2 * pairs, 2 * pairs + 1
    partner_KxK, turns_K = np.zeros((head, head), np.float32), np.zeros(head)
    partner_KxK[second, first], partner_KxK[first, second] = -1, 1
    turns = self.base ** (-2 * pairs / self.width) / (2 * np.pi)
    turns_K[first] = turns_K[second] = slowed(self.scaling, turns, self.base)
    return partner_KxK, turns_K


def slowed(scaling: RotaryScalingConfig, turns: np.ndarray, base: float) -> np.ndarray:
  """Return the turns a position of planes whose i-th of n turns by base^(−i/n) / 2π."""
  if not isinstance(scaling, LinearScalingConfig):
    return turns
  match scaling:
    case Llama3ScalingConfig():
      low, high = scaling.low_frequency, scaling.high_frequency
      kept = np.clip((turns * scaling.length - low) / (high - low), 0, 1)
    case YarnScalingConfig():
      # The planes, as real numbers, that turn `fast` and `slow` times over the length.
      fast, slow = (
        len(turns) * math.log(scaling.length / (2 * math.pi * count)) / math.log(base)
        for count in (scaling.fast, scaling.slow)
      )
      first, last = max(math.floor(fast), 0), min(math.ceil(slow), 2 * len(turns) - 1)
      kept = 1 - np.clip((np.arange(len(turns)) - first) / max(last - first, 1e-3), 0, 1)
    case _:
      kept = 0
  return turns * (kept + (1 - kept) / scaling.factor)


def gain(scaling: RotaryScalingConfig) -> float:
  """Return the factor of rotated queries and keys."""
  if not isinstance(scaling, YarnScalingConfig):
    return 1.0
  return scaling.gain or 1 + 0.1 * math.log(scaling.factor)


def _angles(positions_BxT: jax.Array, turns_K: np.ndarray) -> jax.Array:
  """Return positions · turns as float32 angles [B, T, K] between −π and π.

  The product is taken modulo a turn in 32-bit integers, so an angle is as exact for a position of a
  million as for 1: a float32 product would be wrong by 0.03 there. Positions are int32, up to 2²⁴
  in size; `turns_K` is float64, in turns a position.
  """
  units_K = turns_K % 1 * _TURN
  whole_K = np.floor(units_K)
  rest_K = (units_K - whole_K).astype(np.float32)
  whole_K = whole_K.astype(np.uint32).view(np.int32)
  positions_BxTx1 = jnp.asarray(positions_BxT, jnp.int32)[..., None]
  rest_BxTxK = positions_BxTx1.astype(jnp.float32) * rest_K[None, None]
  units_BxTxK = positions_BxTx1 * whole_K[None, None] + jnp.round(rest_BxTxK).astype(jnp.int32)
  return units_BxTxK.astype(jnp.float32) * np.float32(2 * np.pi / _TURN)
