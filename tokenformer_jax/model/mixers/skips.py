"""Softmax attention with a skip around the projection of values."""

from typing import Any

import jax
from flax import nnx

from tokenformer_jax.config import ModelConfig, SoftmaxConfig
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.norm import apply_gain, gain
from tokenformer_jax.model.projections import NoProjection


class SkipAttention(Attention):
  """V = g₁ x + g₂ value(x), if the config asks for it.

  The projection then starts at zero (He & Hofmann 2023, arXiv 2311.01906).
  """

  def __init__(self, config: SoftmaxConfig, model: ModelConfig, *, rngs: nnx.Rngs, **how: Any):
    super().__init__(config, model, rngs=rngs, **how)
    self.input_gain, self.value_gain = (
      (gain(rngs), gain(rngs)) if config.value_skip else (None, None)
    )
    self.as_heads = NoProjection(model.width)

  @staticmethod
  def zero_at_start(config: SoftmaxConfig) -> tuple[str, ...]:
    """Return the projections that start at zero: those with a skip."""
    return ('value',) if config.value_skip else ()

  def project(self, x_BxTxD: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values [B, T, H, `width`], filled with zeros."""
    query, key, value = super().project(x_BxTxD, width)
    if self.input_gain is not None:
      skipped = self.as_heads(x_BxTxD, (self.heads, width))
      value = apply_gain(self.input_gain, skipped) + apply_gain(self.value_gain, value)
    return query, key, value
