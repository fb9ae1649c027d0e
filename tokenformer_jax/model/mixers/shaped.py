"""Shaped attention of Simplified Transformer Blocks: identity, attention and uniform attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig, SoftmaxConfig
from tokenformer_jax.model.layer import Context
from tokenformer_jax.model.mixers.skips import SkipAttention
from tokenformer_jax.model.norm import gain


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
    is_plain = cache is None and context.starts_BxT is None and context.padding_B is None
    if is_plain and self.attend.causal and not self.attend.window:
      counts_T = jnp.arange(1.0, value.shape[1] + 1)
      mean = jnp.cumsum(value.astype(jnp.float32), axis=1) / counts_T[None, :, None, None]
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
