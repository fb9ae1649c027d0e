"""The pre-norm block, and the trunk of a model that is made of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model import pattern
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.layers import LayerNorm, feed_forward
from tokenformer_jax.model.trunk import (
  FROM_START,
  NO_INPUTS,
  NOTHING,
  Architecture,
  Aux,
  Context,
  Inputs,
)
from tokenformer_jax.parallel.sharding import constrain


class Block(nnx.Module):
  """x + Attention(Norm(x)), then x + FeedForward(Norm(x)) (TokenFormer, eq. 6-7)."""

  def __init__(
    self,
    config: ModelConfig,
    *,
    causal: bool = True,
    compute: Compute,
    rngs: nnx.Rngs,
  ):
    def norm():
      return LayerNorm(config.width, config.block_norm, epsilon=config.norm_epsilon, rngs=rngs)

    self.attention_norm, self.ffn_norm = norm(), norm()
    self.attention = Attention(config, causal=causal, compute=compute, rngs=rngs)
    self.ffn = feed_forward(config, compute=compute, rngs=rngs)

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return the attention's."""
    return self.attention.init_cache(batch, length, dtype)

  def cache_axes(self) -> Any:
    """Return the attention's."""
    return self.attention.cache_axes()

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: Any = None,
    inputs: Inputs = NO_INPUTS,
  ) -> tuple[jax.Array, Any, Aux]:
    """Return the block's output [B, T, D], the attention's cache, and nothing else."""

    def scaled(added_BxTxD: jax.Array, branch: int) -> jax.Array:
      if inputs.branch_scales_Bx2 is None:
        return added_BxTxD
      scales_B = inputs.branch_scales_Bx2[:, branch, None, None]
      return added_BxTxD * scales_B.astype(added_BxTxD.dtype)

    attended, cache = self.attention(self.attention_norm(x_BxTxD), context, cache)
    x_BxTxD = constrain(x_BxTxD + scaled(attended, 0), 'batch', None, None)
    x_BxTxD = x_BxTxD + scaled(self.ffn(self.ffn_norm(x_BxTxD)), 1)
    return constrain(x_BxTxD, 'batch', None, None), cache, NOTHING


def architecture(config: ModelConfig, *, causal: bool = True) -> Architecture:
  """Return the layers of a model: one block, `config.layers` times."""
  makers = {'layer': functools.partial(Block, config, causal=causal)}
  return Architecture(
    pattern.parse(f'layer*{config.layers}', tuple(makers), 'the pattern of layers'), makers
  )
