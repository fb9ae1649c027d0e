"""Softmax attention with skips around the projections of values and of the output."""

from typing import Any

import jax
from flax import nnx

from tokenformer_jax.config import ModelConfig, SoftmaxConfig
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.norm import apply_gain, gain
from tokenformer_jax.model.projections import NoProjection


class SkipAttention(Attention):
  """V = g₁ x + g₂ value(x), and the output g₁ h + g₂ proj(h) of the heads h; either may be absent.

  A projection with a skip starts at zero (He & Hofmann 2023, arXiv 2311.01906).
  """

  def __init__(self, config: SoftmaxConfig, model: ModelConfig, *, rngs: nnx.Rngs, **how: Any):
    super().__init__(config, model, rngs=rngs, **how)
    self.heads_gain, self.proj_gain = (gain(rngs), gain(rngs)) if config.proj_skip else (None, None)
    self.input_gain, self.value_gain = (
      (gain(rngs), gain(rngs)) if config.value_skip else (None, None)
    )
    self.as_heads = NoProjection(model.width)

  @staticmethod
  def zero_at_start(config: SoftmaxConfig) -> tuple[str, ...]:
    """Return the projections that start at zero: those with a skip."""
    skips = {'value': config.value_skip, 'proj': config.proj_skip}
    return tuple(name for name, has_skip in skips.items() if has_skip)

  def values(self, x_BxTxD: jax.Array, width: int) -> jax.Array:
    """Return the values [B, T, H, `width`], filled with zeros."""
    if self.input_gain is None:
      return super().values(x_BxTxD, width)
    skipped = self.as_heads(x_BxTxD, (self.heads, width))
    projected = super().values(x_BxTxD, width)
    return apply_gain(self.input_gain, skipped) + apply_gain(self.value_gain, projected)

  def output(self, heads_BxTxHxK: jax.Array) -> jax.Array:
    """Return the output [B, T, D] of heads."""
    projected = apply_gain(self.proj_gain, super().output(heads_BxTxHxK))
    if self.heads_gain is None:
      return projected
    return apply_gain(self.heads_gain, self.as_heads(heads_BxTxHxK)) + projected
