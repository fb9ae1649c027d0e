"""The block, which joins a mixer and a feed-forward part, and the architecture made of blocks."""

import functools
import math
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import LayerConfig, ModelConfig
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.feed_forward import apply, feed_forward
from tokenformer_jax.model.layers import gain, gained
from tokenformer_jax.model.norm import make_norm, normed
from tokenformer_jax.model.trunk import (
  FROM_START,
  NO_INPUTS,
  Architecture,
  Aux,
  Context,
  Inputs,
  add_aux,
)
from tokenformer_jax.parallel.sharding import constrain

# The class of each kind in `config.MIXERS`, imported on first use. A constructor takes its config,
# the model's config and the keywords of `Block`; its methods are those of `trunk.Layer`.
MIXERS = {
  'softmax': 'tokenformer_jax.model.attention:Attention',
  'gated_unit': 'tokenformer_jax.model.gated_unit:GatedUnit',
  'linear': 'tokenformer_jax.model.linear_attention:LinearAttention',
}


class Block(nnx.Module):
  """A mixer and a feed-forward part, joined by a wiring.

    pre_norm    y = x + mixer(norm(x)), then y + ffn(norm(y))         TokenFormer, eq. 6-7
    post_norm   y = norm(x + mixer(x)), then norm(y + ffn(y))
    skipless    y = β mixer(norm(x)), then α y + β' ffn(norm(y))      SAS
    parallel    β mixer(norm(x)) + β' ffn(norm(x)), with one norm     SAS-P; with `skip` added to x;
                                                            with `two_norms` one for each

  SAS and SAS-P are the Simplified Transformer Blocks (He & Hofmann 2023, arXiv 2311.01906). Their
  gains are learned; without gains α = β = β' = 1. Without a feed-forward part the block is the
  first half of its line.
  """

  def __init__(
    self,
    config: LayerConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    compute: Compute,
    rngs: nnx.Rngs,
  ):
    self.wiring, self.causal = config.wiring, causal
    has_ffn = config.ffn.kind != 'none'
    norm = functools.partial(make_norm, model=model, rngs=rngs)
    self.attention_norm = norm(config.norm)
    has_ffn_norm = has_ffn and getattr(config.wiring, 'two_norms', True)
    self.ffn_norm = norm(config.norm_of_ffn) if has_ffn_norm else None
    mixer = pkgutil.resolve_name(MIXERS[config.mixer.kind])
    self.attention = mixer(config.mixer, model, causal=causal, compute=compute, rngs=rngs)
    self.ffn = feed_forward(config.ffn, model, compute=compute, rngs=rngs)
    gains = getattr(config.wiring, 'gains', False)
    ffn_gain = model.init.ffn_gain or 0.1 * math.sqrt(18 / model.depth)
    has_skip_gain = gains and has_ffn and config.wiring.kind == 'skipless'
    self.mixer_gain = gain(rngs) if gains else None
    self.skip_gain = gain(rngs) if has_skip_gain else None
    self.ffn_gain = gain(rngs, ffn_gain) if gains and has_ffn else None

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
    """Return the block's output [B, T, D], the cache of the mixer, and the `Aux` of both parts.

    Raises:
      ValueError: rows end with padding or hold several documents, and the mixer is not causal, so
        that tokens would see padding or other documents.
    """
    if context.starts_BxT is not None and not self.causal:
      raise ValueError('Context.starts_BxT hides earlier documents, and needs a causal mask')
    if context.ends_B is not None and not self.causal:
      raise ValueError(
        'Context.ends_B puts padding at the end of rows, which tokens see without a causal mask; '
        'pad the rows at their beginning, with Context.padding_B'
      )
    post_norm, parallel = (self.wiring.kind == name for name in ('post_norm', 'parallel'))
    normed_BxTxD = x_BxTxD if post_norm else normed(self.attention_norm, x_BxTxD)
    mixed, cache, aux = self.attention(normed_BxTxD, context, cache, inputs)
    y_BxTxD = gained(self.mixer_gain, _scaled(mixed, inputs, 0))
    if self.wiring.kind in ('pre_norm', 'post_norm') or (parallel and self.wiring.skip):
      y_BxTxD = x_BxTxD + y_BxTxD
    if post_norm:
      y_BxTxD = normed(self.attention_norm, y_BxTxD)
    y_BxTxD = constrain(y_BxTxD, 'batch', 'slots', None)
    if self.ffn is None:
      return y_BxTxD, cache, aux
    if parallel and self.wiring.two_norms:
      normed_BxTxD = normed(self.ffn_norm, x_BxTxD)
    elif not parallel:
      normed_BxTxD = y_BxTxD if post_norm else normed(self.ffn_norm, y_BxTxD)
    added, ffn_aux = apply(self.ffn, normed_BxTxD, context, inputs)
    added, aux = gained(self.ffn_gain, _scaled(added, inputs, 1)), add_aux(aux, ffn_aux)
    y_BxTxD = gained(self.skip_gain, y_BxTxD) + added
    if post_norm:
      y_BxTxD = normed(self.ffn_norm, y_BxTxD)
    return constrain(y_BxTxD, 'batch', 'slots', None), cache, aux


def _scaled(added_BxTxD: jax.Array, inputs: Inputs, branch: int) -> jax.Array:
  """Return the output of a branch times each row's factor for that branch."""
  if inputs.branch_scales_Bx2 is None:
    return added_BxTxD
  scales_B = inputs.branch_scales_Bx2[:, branch, None, None]
  return added_BxTxD * scales_B.astype(added_BxTxD.dtype)


def architecture(config: ModelConfig, *, causal: bool = True) -> Architecture:
  """Return the architecture that the model's config describes."""
  makers = {
    name: functools.partial(Block, layer, config, causal=causal)
    for name, layer in config.layers.items()
  }
  return Architecture(config.repeats, makers)
