"""The block, which joins a mixer and a feed-forward part, and the architecture made of blocks."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import (
  LayerConfig,
  ModelConfig,
  ParallelConfig,
  SandwichConfig,
  SkiplessConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.layer import BoundaryConfig
from tokenformer_jax.config.model import layer_path
from tokenformer_jax.errors import UserError
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.feed_forward import apply, feed_forward
from tokenformer_jax.model.layer import (
  EMPTY_AUX,
  FROM_START,
  NO_INPUTS,
  Aux,
  Context,
  LayerInputs,
  add_aux,
)
from tokenformer_jax.model.mixers.gated_unit import GatedUnit
from tokenformer_jax.model.mixers.linear import LinearAttention
from tokenformer_jax.model.mixers.shaped import ShapedAttention
from tokenformer_jax.model.mixers.skips import SkipAttention
from tokenformer_jax.model.norm import apply_gain, apply_norm, gain, make_norm
from tokenformer_jax.model.trunk import Architecture
from tokenformer_jax.parallel.sharding import constrain


def softmax_attention(config: SoftmaxConfig, *args: Any, **how: Any) -> Attention:
  """Make the class of softmax attention that computes what the config asks for."""
  if config.shaped:
    return ShapedAttention(config, *args, **how)
  if config.value_skip:
    return SkipAttention(config, *args, **how)
  return Attention(config, *args, **how)


# By kind in `config.MIXERS`: the class or function that makes the mixer. Its arguments are the
# mixer's config, the model's config and the keywords of `Block`; the methods are those of
# `layer.Layer`.
MIXERS: dict[str, Callable[..., Any]] = {
  'softmax': softmax_attention,
  'gated_unit': GatedUnit,
  'linear': LinearAttention,
}


Branch = Callable[[jax.Array], jax.Array]  # a part of a layer, from its input to what it adds


def pre_norm(block: 'Block', x_BxTxD: jax.Array, mix: Branch, feed: Branch | None) -> jax.Array:
  """Return y = x + mix(norm(x)), then y + feed(norm(y)): TokenFormer, eq. 6-7.

  In a `sandwich` the branches end with a norm, and may begin with none.
  """
  y_BxTxD = _sharded(x_BxTxD + mix(apply_norm(block.attention_norm, x_BxTxD)))
  if feed is None:
    return y_BxTxD
  return _sharded(y_BxTxD + feed(apply_norm(block.ffn_norm, y_BxTxD)))


def post_norm(block: 'Block', x_BxTxD: jax.Array, mix: Branch, feed: Branch | None) -> jax.Array:
  """Return y = norm(x + mix(x)), then norm(y + feed(y))."""
  y_BxTxD = _sharded(apply_norm(block.attention_norm, x_BxTxD + mix(x_BxTxD)))
  if feed is None:
    return y_BxTxD
  return _sharded(apply_norm(block.ffn_norm, y_BxTxD + feed(y_BxTxD)))


def skipless(block: 'Block', x_BxTxD: jax.Array, mix: Branch, feed: Branch | None) -> jax.Array:
  """Return y = mix(norm(x)), then α y + feed(norm(y)): SAS."""
  y_BxTxD = _sharded(mix(apply_norm(block.attention_norm, x_BxTxD)))
  if feed is None:
    return y_BxTxD
  added_BxTxD = feed(apply_norm(block.ffn_norm, y_BxTxD))
  return _sharded(apply_gain(block.skip_gain, y_BxTxD) + added_BxTxD)


def parallel(block: 'Block', x_BxTxD: jax.Array, mix: Branch, feed: Branch | None) -> jax.Array:
  """Return mix(norm(x)) + feed(norm(x)): SAS-P; or the same added to x, or with two norms."""
  normed_BxTxD = apply_norm(block.attention_norm, x_BxTxD)
  mixed_BxTxD = mix(normed_BxTxD)
  y_BxTxD = _sharded(x_BxTxD + mixed_BxTxD if block.has_skip else mixed_BxTxD)
  if feed is None:
    return y_BxTxD
  fed_BxTxD = normed_BxTxD if block.ffn_norm is None else apply_norm(block.ffn_norm, x_BxTxD)
  return _sharded(y_BxTxD + feed(fed_BxTxD))


# By kind of `config.layer.Wirings`: how a block joins norms, mixer and feed-forward part.
WIRINGS = {
  'pre_norm': pre_norm, 'post_norm': post_norm, 'skipless': skipless, 'parallel': parallel,
  'sandwich': pre_norm, 'boundary': pre_norm,
}  # fmt: skip


class Block(nnx.Module):
  """A mixer and a feed-forward part, joined by a wiring.

  SAS and SAS-P are the Simplified Transformer Blocks (He & Hofmann 2023, arXiv 2311.01906). A
  learned gain can multiply what a branch adds; without gains all are 1.
  """

  def __init__(
    self,
    config: LayerConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    execution: Execution,
    rngs: nnx.Rngs,
  ):
    wiring = config.wiring
    self.wire, self.causal = WIRINGS[wiring.kind], causal
    self.has_skip = isinstance(wiring, ParallelConfig) and wiring.skip
    self.boundary = wiring.scale if isinstance(wiring, BoundaryConfig) else None
    self.boundary_norm = make_norm(
      'none' if self.boundary is None else 'rms_plain', model, rngs=rngs
    )
    has_ffn = config.ffn.kind != 'none'
    norm = functools.partial(make_norm, model=model, rngs=rngs)
    of_mixer, of_ffn = config.norm, config.norm_of_ffn if has_ffn else 'none'
    is_sandwich = isinstance(wiring, SandwichConfig)
    has_before = not is_sandwich or wiring.before
    shares_norm = isinstance(wiring, ParallelConfig) and not wiring.two_norms
    self.attention_norm = norm(of_mixer if has_before else 'none')
    self.ffn_norm = norm(of_ffn if has_before and not shares_norm else 'none')
    self.attention_after_norm, self.ffn_after_norm = (
      norm(form if is_sandwich else 'none', ends_branch=True) for form in (of_mixer, of_ffn)
    )
    make_mixer = MIXERS[config.mixer.kind]
    self.attention = make_mixer(config.mixer, model, causal=causal, execution=execution, rngs=rngs)
    self.ffn = feed_forward(config.ffn, model, execution=execution, rngs=rngs)
    gains = isinstance(wiring, SkiplessConfig | ParallelConfig) and wiring.gains
    has_skip_gain = gains and has_ffn and isinstance(wiring, SkiplessConfig)
    ffn_gain = 0.1 * math.sqrt(18 / model.depth)
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
    inputs: LayerInputs = NO_INPUTS,
  ) -> tuple[jax.Array, Any, Aux]:
    """Return the block's output [B, T, D], the cache of the mixer, and the `Aux` of both parts."""
    if context.starts_BxT is not None and not self.causal:
      raise ValueError('Context.starts_BxT hides earlier documents, and needs a causal mask')
    if context.ends_B is not None and not self.causal:
      raise ValueError(
        'Context.ends_B puts padding at the end of rows, which tokens see without a causal mask; '
        'pad the rows at their beginning, with Context.padding_B'
      )

    def mix(x_BxTxD: jax.Array) -> jax.Array:
      nonlocal cache, aux
      mixed_BxTxD, cache, aux = self.attention(x_BxTxD, context, cache, inputs)
      mixed_BxTxD = apply_norm(self.attention_after_norm, mixed_BxTxD)
      return apply_gain(self.mixer_gain, _scaled(mixed_BxTxD, inputs, 0))

    def feed(x_BxTxD: jax.Array) -> jax.Array:
      nonlocal aux
      assert self.ffn is not None
      fed_BxTxD, ffn_aux = apply(self.ffn, x_BxTxD, context, inputs)
      aux = add_aux(aux, ffn_aux)
      fed_BxTxD = apply_norm(self.ffn_after_norm, fed_BxTxD)
      return apply_gain(self.ffn_gain, _scaled(fed_BxTxD, inputs, 1))

    aux = EMPTY_AUX
    if self.boundary is not None:
      assert context.embedding_BxTxD is not None  # see `trunk.enter`
      added_BxTxD = self.boundary * context.embedding_BxTxD
      x_BxTxD = _sharded(apply_norm(self.boundary_norm, x_BxTxD) + added_BxTxD)
    y_BxTxD = self.wire(self, x_BxTxD, mix, None if self.ffn is None else feed)
    return y_BxTxD, cache, aux


def _sharded(x_BxTxD: jax.Array) -> jax.Array:
  """Return the residual stream with its sharding."""
  return constrain(x_BxTxD, 'batch', 'slots', None)


def _scaled(added_BxTxD: jax.Array, inputs: LayerInputs, branch: int) -> jax.Array:
  """Return the output of a branch times each row's factor for that branch."""
  if inputs.branch_scales_Bx2 is None:
    return added_BxTxD
  scales_B = inputs.branch_scales_Bx2[:, branch, None, None]
  return added_BxTxD * scales_B.astype(added_BxTxD.dtype)


def architecture(config: ModelConfig, *, causal: bool = True) -> Architecture:
  """Return the architecture that the model's config describes."""
  for name in itertools.chain.from_iterable(repeat.layers[1:] for repeat in config.repeats):
    if isinstance(config.layers[name].wiring, BoundaryConfig):
      raise UserError(
        f'config.{layer_path(name)}.wiring.kind is boundary, and model.pattern={config.pattern!r} '
        'has it behind another layer of a parenthesis; such a layer stands first in one'
      )
  makers = {
    name: functools.partial(Block, layer, config, causal=causal)
    for name, layer in config.layers.items()
  }
  return Architecture(config.repeats, makers)
