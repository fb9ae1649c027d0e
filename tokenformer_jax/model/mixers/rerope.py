"""ReRoPE: relative positions that stop at a largest distance (Su 2023, kexue.fm/archives/9708)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tokenformer_jax.config import RotaryConfig
from tokenformer_jax.model import kernels
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.positions import Rotary


class NearFar(NamedTuple):
  """Queries, or keys, for pairs that are nearer than the largest distance, and for the others."""

  near: jax.Array  # rotated by its position
  far: jax.Array  # a query rotated by the largest distance; a key as it is


@dataclasses.dataclass(frozen=True)
class ClippedScore:
  """The scores of `NearFar` queries and keys, a `kernels.Score`."""

  clip: int  # the largest distance

  def __call__(
    self, query: NearFar, key: NearFar, queries_T: jax.Array, keys_S: jax.Array, letters: str
  ) -> jax.Array:
    """Return the scores [B, H, T, S] of the near or of the far pair, by their slots."""
    near, far = (
      kernels.dot_product(*pair, queries_T, keys_S, letters)
      for pair in zip(query, key, strict=True)
    )
    is_far_TxS = queries_T[:, None] - keys_S[None, :] >= self.clip
    return jnp.where(is_far_TxS[None, None], far, near)


class ClippedRotary(Rotary):
  """Rotary positions whose pairs have a relative position of at most `clip`.

  Queries and keys are rotated where they meet: caches and exchanges have them before rotation.
  """

  def __init__(self, config: RotaryConfig, head_width: int):
    super().__init__(config, head_width)
    self.clip = config.clip
    self.score = ClippedScore(config.clip)

  def query(self, query: jax.Array, positions_BxT: jax.Array, context: Context) -> jax.Array:
    """Return the queries unchanged."""
    del positions_BxT, context
    return query

  def key(self, key: jax.Array, positions_BxT: jax.Array) -> jax.Array:
    """Return the keys unchanged."""
    del positions_BxT
    return key

  def pairs(
    self, query: jax.Array, key: jax.Array, positions_BxT: jax.Array, positions_BxS: jax.Array
  ) -> tuple[NearFar, NearFar]:
    """Return the near and the far queries and keys [B, T, H, K]."""
    far = self(query, jnp.full((1, query.shape[1]), self.clip))
    queries = NearFar(self(query, positions_BxT), far)
    return queries, NearFar(self(key, positions_BxS), key)
