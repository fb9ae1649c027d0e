"""Shaped attention of Simplified Transformer Blocks: identity, attention and uniform attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig, SoftmaxConfig
from tokenformer_jax.model import sequence
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.mixers.skips import SkipAttention
from tokenformer_jax.model.norm import gain

_CHUNK = 128  # positions whose prefix sums are one product with a triangular matrix


class ShapedAttention(SkipAttention):
  """α V + β A V − γ C V, with gains for each head, attention A, and the mean C V of visible values.

  Noci et al. 2023 (arXiv 2306.17759). Queries start at zero, so A starts as C and the layer passes
  V on (He & Hofmann 2023, arXiv 2311.01906).
  """

  def __init__(self, config: SoftmaxConfig, model: ModelConfig, *, rngs: nnx.Rngs, **how: Any):
    super().__init__(config, model, rngs=rngs, **how)
    self.identity_gain = gain(rngs, heads=self.heads)  # α
    self.attention_gain = gain(rngs, heads=self.heads)  # β
    self.uniform_gain = gain(rngs, heads=self.heads)  # γ

  @staticmethod
  def zero_at_start(config: SoftmaxConfig) -> tuple[str, ...]:
    """Return the projections that start at zero: queries, and those with a skip."""
    return ('query', *SkipAttention.zero_at_start(config))

  def mix(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context, cache: Any
  ) -> tuple[jax.Array, Any]:
    """Return α V + β A V − γ C V [B, T, H, K], and the cache with the new slots."""
    if cache is None:
      mixed, mean = self._over_rows(query, key, value, context)
    else:
      # C is the attention of a query of zeros, whose scores are equal.
      mean, _ = super().mix(jnp.zeros_like(query), key, value, context, cache)
      mixed, cache = super().mix(query, key, value, context, cache)
    alpha, beta, gamma = (
      head_gain[...][None, None, :, None]
      for head_gain in (self.identity_gain, self.attention_gain, self.uniform_gain)
    )
    shaped = alpha * value.astype(jnp.float32) + beta * mixed.astype(jnp.float32) - gamma * mean
    return shaped.astype(value.dtype), cache

  def _over_rows(
    self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context
  ) -> tuple[jax.Array, jax.Array]:
    """Return A V and C V of whole rows."""
    attend = self.attend
    query, key = attend.encode(query, key, context)
    query, key, value = sequence.whole_rows(query, key, value)
    mixed = attend.over_whole_rows(query, key, value, context)
    is_plain = context.starts_BxT is None and context.padding_B is None
    if is_plain and attend.causal and not attend.window:
      mean = prefix_sums(value) / jnp.arange(1.0, value.shape[1] + 1)[None, :, None, None]
    else:
      mean = attend.over_whole_rows(jnp.zeros_like(query), key, value, context)
    return sequence.split_rows(mixed, self.heads), sequence.split_rows(mean, self.heads)


def prefix_sums(x_BxTxHxK: jax.Array) -> jax.Array:
  """Return the sums over the slots up to each one, in float32.

  Sums inside a chunk are a product with a triangular matrix, which the matrix unit computes; sums
  over chunks are few.
  """
  batch, length, *rest = x_BxTxHxK.shape
  chunk = min(_CHUNK, length)
  filled = jnp.pad(x_BxTxHxK.reshape(batch, length, -1), ((0, 0), (0, -length % chunk), (0, 0)))
  within_BxNxCxR = jnp.einsum(
    'CS,BNSR->BNCR',
    jnp.tri(chunk, dtype=filled.dtype),
    filled.reshape(batch, -1, chunk, filled.shape[-1]),
    preferred_element_type=jnp.float32,
    precision='highest',
  )
  totals_BxNxR = within_BxNxCxR[:, :, -1]
  before_BxNxR = jnp.cumsum(totals_BxNxR, axis=1) - totals_BxNxR
  sums = (within_BxNxCxR + before_BxNxR[:, :, None]).reshape(batch, -1, filled.shape[-1])
  return sums[:, :length].reshape(batch, length, *rest)
