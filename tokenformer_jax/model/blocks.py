"""The pre-norm block, and the architecture of a model made of such blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import LayerConfig, ModelConfig
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.layers import LayerNorm, feed_forward
from tokenformer_jax.model.trunk import FROM_START, NO_INPUTS, Architecture, Aux, Context, Inputs
from tokenformer_jax.parallel.sharding import constrain

# The module for each mixer name in `config.MIXERS`. Its constructor takes the mixer's config, the
# model's config and the keywords of `Block`. It has the methods of `trunk.Layer`.
MIXERS: dict[str, Callable[..., Any]] = {'softmax': Attention}


class Block(nnx.Module):
  """x + Mixer(Norm(x)), then x + FeedForward(Norm(x)) (TokenFormer, eq. 6-7)."""

  def __init__(
    self,
    config: LayerConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    compute: Compute,
    rngs: nnx.Rngs,
  ):
    def norm():
      return LayerNorm(model.width, config.norm, epsilon=model.norm_epsilon, rngs=rngs)

    self.attention_norm = norm()
    self.ffn_norm = None if config.ffn.kind == 'none' else norm()
    mixer = MIXERS[config.mixer.kind]
    self.attention = mixer(config.mixer, model, causal=causal, compute=compute, rngs=rngs)
    self.ffn = feed_forward(config.ffn, model, compute=compute, rngs=rngs)

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Any:
    """Return the mixer's empty cache."""
    return self.attention.init_cache(batch, length, dtype)

  def cache_axes(self) -> Any:
    """Return the logical axes of the mixer's cache."""
    return self.attention.cache_axes()

  def length_flops(self, length: int) -> float:
    """Count the mixer's length-dependent FLOPs of one of `length` positions."""
    return self.attention.length_flops(length)

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: Any = None,
    inputs: Inputs = NO_INPUTS,
  ) -> tuple[jax.Array, Any, Aux]:
    """Return the block's output [B, T, D], and the mixer's cache and `Aux`."""

    def scaled(added_BxTxD: jax.Array, branch: int) -> jax.Array:
      if inputs.branch_scales_Bx2 is None:
        return added_BxTxD
      scales_B = inputs.branch_scales_Bx2[:, branch, None, None]
      return added_BxTxD * scales_B.astype(added_BxTxD.dtype)

    mixed, cache, aux = self.attention(self.attention_norm(x_BxTxD), context, cache, inputs)
    x_BxTxD = constrain(x_BxTxD + scaled(mixed, 0), 'batch', None, None)
    if self.ffn is None:
      return x_BxTxD, cache, aux
    x_BxTxD = x_BxTxD + scaled(self.ffn(self.ffn_norm(x_BxTxD)), 1)
    return constrain(x_BxTxD, 'batch', None, None), cache, aux


def architecture(config: ModelConfig, *, causal: bool = True) -> Architecture:
  """Return the architecture that the model's config describes."""
  makers = {
    name: functools.partial(Block, layer, config, causal=causal)
    for name, layer in config.layers.items()
  }
  return Architecture(config.groups, makers)
