"""The language model: embedding, stacked blocks, final norm, head.

TokenFormer with `projection='pattention'`; with `dense`, `bias` and affine norms the same code is
the Transformer of GPT-2 and Pythia, the baseline.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.attention import Cache, positions
from tokenformer_jax.blocks import Block
from tokenformer_jax.compute import DEFAULT, Compute
from tokenformer_jax.config import InitConfig, ModelConfig
from tokenformer_jax.layers import LayerNorm, repeat
from tokenformer_jax.loss import logits
from tokenformer_jax.params import Definition, Role, define, param, stack
from tokenformer_jax.products import look_up
from tokenformer_jax.sharding import constrain
from tokenformer_jax.stack import scan, unroll


class LM(nnx.Module):
  """A causal language model over token ids [B, T]."""

  def __init__(self, config: ModelConfig, compute: Compute, *, rngs: nnx.Rngs):
    self.compute = compute
    self.head_scale = config.width**-0.5 if config.scaled_logits else None

    def table(rows: int, axis: str, role: Role) -> nnx.Param:
      normal = nnx.initializers.normal(config.init.embedding_std or config.init.std)
      depth = None if role is Role.HEAD else 0
      return param(rngs, normal, (rows, config.width), (axis, 'width'), role=role, depth=depth)

    def block(rngs: nnx.Rngs) -> Block:
      return Block(config, compute=compute, rngs=rngs)

    learned = config.positions == 'learned'
    role = Role.TIED_EMBEDDING if config.tied_head else Role.EMBEDDING
    self.embedding = table(config.vocab_size, 'vocab', role)
    self.positions = table(config.max_length, 'position', Role.POSITION) if learned else None
    self.blocks = (
      nnx.List([block(rngs) for _ in range(config.layers)])
      if compute.unroll
      else stack(block, config.layers, rngs=rngs)
    )
    self.final_norm = (
      LayerNorm(config.width, config.final_norm, epsilon=config.norm_epsilon, rngs=rngs)
      if config.final_norm != 'none'
      else None
    )
    self.head = None if config.tied_head else table(config.vocab_size, 'vocab', Role.HEAD)

  def embed(
    self, ids_BxT: jax.Array, start: jax.Array | int = 0, padding_B: jax.Array | None = None
  ) -> jax.Array:
    """What the first block reads [B, T, D]; for the arguments see `Attention`."""
    x_BxTxD = look_up(self.embedding[...], ids_BxT, ('vocab', 'width'), self.compute.dtype)
    if self.positions is not None:
      positions_BxT = positions(start, ids_BxT.shape[1], padding_B)
      rows_BxTxD = jnp.take(self.positions[...], positions_BxT, axis=0, mode='clip')
      x_BxTxD = x_BxTxD + repeat(rows_BxTxD, x_BxTxD.shape, x_BxTxD.dtype)
    return constrain(x_BxTxD, 'batch', None, None)

  def hidden(
    self,
    ids_BxT: jax.Array,
    start: jax.Array | int = 0,
    cache: tuple[Cache, ...] | None = None,
    padding_B: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[Cache, ...] | None]:
    """What the head reads [B, T, D], and the cache; for the arguments see `Attention`.

    A cache, which has an entry for each layer, needs `Compute.unroll`.
    """

    def apply(block: Block, x: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
      return block(x, start, cache, padding_B)

    x_BxTxD = self.embed(ids_BxT, start, padding_B)
    if self.compute.unroll:
      x_BxTxD, cache = unroll(self.blocks, apply, x_BxTxD, cache)
    else:
      x_BxTxD, cache = scan(
        self.blocks,
        apply,
        x_BxTxD,
        cache,
        remat=self.compute.remat,
        loop=self.compute.scan_layers,
      )
    if self.final_norm is not None:
      x_BxTxD = self.final_norm(x_BxTxD)
    return x_BxTxD if self.head_scale is None else x_BxTxD * self.head_scale, cache

  def __call__(
    self,
    ids_BxT: jax.Array,
    start: jax.Array | int = 0,
    cache: tuple[Cache, ...] | None = None,
    padding_B: jax.Array | None = None,
  ) -> tuple[jax.Array, tuple[Cache, ...] | None]:
    """Float32 logits [B, T, V] of the next token at every position, and the cache."""
    hidden_BxTxD, cache = self.hidden(ids_BxT, start, cache, padding_B)
    return logits(hidden_BxTxD, self.output_embedding), cache

  @property
  def output_embedding(self) -> jax.Array:
    """The head's matrix [V, D]."""
    return (self.embedding if self.head is None else self.head)[...]


def define_lm(config: ModelConfig, compute: Compute = DEFAULT) -> Definition:
  """The model's parameters and functions; `config` has every size filled in (no zeros left)."""
  return _define(config, config.init, compute)


@functools.cache
def _define(config: ModelConfig, init: InitConfig, compute: Compute) -> Definition:
  del init  # Models are equal whatever they are drawn from, so it is a part of the cache's key.
  return define(lambda rngs: LM(config, compute, rngs=rngs))
