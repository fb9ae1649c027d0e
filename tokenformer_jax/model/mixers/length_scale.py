"""Scores that grow with the length of the text, which keeps attention focused."""

import math

import jax
import jax.numpy as jnp

from tokenformer_jax.config import PositionScaleConfig, SeenScaleConfig
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.positions import Rotary


class LengthScaled:
  """Positions of `rotary`, after queries are multiplied by a factor that grows with the length."""

  def __init__(
    self, rotary: Rotary, config: SeenScaleConfig | PositionScaleConfig, causal: bool, window: int
  ):
    self.rotary, self.config, self.causal, self.window = rotary, config, causal, window
    self.key, self.pairs, self.score = rotary.key, rotary.pairs, rotary.score

  def query(self, query: jax.Array, positions_BxT: jax.Array, context: Context) -> jax.Array:
    """Return scaled queries [B, T, H, K] with their positions."""
    seen = seen_keys(context.document_positions(positions_BxT), self.causal, self.window)
    query = scale_by_length(self.config, query, positions_BxT, seen)
    return self.rotary.query(query, positions_BxT, context)


def scale_by_length(
  config: SeenScaleConfig | PositionScaleConfig,
  query: jax.Array,
  positions_BxT: jax.Array,
  seen: jax.Array | int,
) -> jax.Array:
  """Multiply queries by a factor that grows with the length, which keeps attention focused.

  This multiplies the scores of a query (Su 2021, kexue.fm/archives/8823). Positions of padding are
  negative. `seen` is the number of keys that each query sees, [B, T] or one number.
  """
  match config:
    case SeenScaleConfig():
      counts = jnp.maximum(seen, config.least).astype(jnp.float32)
      factor = jnp.log(counts) / math.log(config.base)
    case PositionScaleConfig():
      counts = jnp.maximum(positions_BxT + 1, 1).astype(jnp.float32)
      factor = jnp.maximum(1, jnp.log(counts) / math.log(config.length))
  # With documents in rows the keys differ by row, and positions may not.
  shape = jnp.broadcast_shapes(jnp.shape(factor), positions_BxT.shape)
  factor_BxTx1x1 = jnp.broadcast_to(factor, shape)[..., None, None]
  return (query.astype(jnp.float32) * factor_BxTx1x1).astype(query.dtype)


def seen_keys(positions_BxT: jax.Array, causal: bool, window: int) -> jax.Array:
  """Return the number of keys [B, T] that the queries at these positions of a document see.

  Positions are negative for padding; without `causal` they are those of whole texts. A `window` of
  0 is no limit.
  """
  if not causal:
    return jnp.broadcast_to(positions_BxT[:, -1:] + 1, positions_BxT.shape)
  seen_BxT = jnp.maximum(positions_BxT + 1, 1)
  return jnp.minimum(seen_BxT, window) if window else seen_BxT
