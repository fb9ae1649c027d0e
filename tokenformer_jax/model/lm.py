"""The language model: embedding, its norm, trunk, final norm, head.

With Pattentions it is a TokenFormer. With dense projections, biases and affine norms it is the
baseline, the Transformer of GPT-2 and Pythia.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model import trunk
from tokenformer_jax.model.blocks import architecture
from tokenformer_jax.model.execution import DEFAULT, Execution
from tokenformer_jax.model.layer import FROM_START, NO_INPUTS, Aux, Context, LayerInputs
from tokenformer_jax.model.loss import logits
from tokenformer_jax.model.norm import apply_norm, make_norm
from tokenformer_jax.model.params import Definition, Params, Role, define_model, param
from tokenformer_jax.model.products import look_up, repeat
from tokenformer_jax.parallel.sharding import constrain


class LM(nnx.Module):
  """A causal language model over token ids [B, T]."""

  def __init__(self, config: ModelConfig, execution: Execution, *, rngs: nnx.Rngs):
    self.execution = execution
    self.embedding_scale = config.width**0.5 if config.embedding_scale else None
    self.head_scale = config.width**-0.5 if config.scaled_logits else None
    self.logit_cap = config.logit_cap

    def table(rows: int, axis: str, role: Role) -> nnx.Param:
      normal = nnx.initializers.normal(config.init.embedding_std or config.init.std)
      depth = None if role is Role.HEAD else 0
      return param(rngs, normal, (rows, config.width), (axis, 'width'), role=role, depth=depth)

    learned = config.position_embedding == 'learned'
    role = Role.TIED_EMBEDDING if config.tied_head else Role.EMBEDDING
    self.embedding = table(config.vocab_size, 'vocab', role)
    self.positions = table(config.max_length, 'position', Role.POSITION) if learned else None
    self.embedding_norm = make_norm(config.embedding_norm, config, depth=0, rngs=rngs)
    layers = architecture(config)
    self.repeats = layers.repeats
    self.blocks = trunk.make(layers, execution=execution, rngs=rngs)
    self.final_norm = make_norm(config.final_norm, config, rngs=rngs)
    self.head = None if config.tied_head else table(config.vocab_size, 'vocab', Role.HEAD)

  def embed(self, ids_BxT: jax.Array, context: Context = FROM_START) -> jax.Array:
    """Return the input of the first layer, [B, T, D]."""
    x_BxTxD = look_up(self.embedding[...], ids_BxT, ('vocab', 'width'), self.execution.dtype)
    if self.embedding_scale is not None:
      x_BxTxD = x_BxTxD * self.embedding_scale
    if self.positions is not None:
      positions_BxT = context.positions(ids_BxT.shape[1])
      rows_BxTxD = jnp.take(self.positions[...], positions_BxT, axis=0, mode='clip')
      x_BxTxD = x_BxTxD + repeat(rows_BxTxD, x_BxTxD.shape, x_BxTxD.dtype)
    return constrain(apply_norm(self.embedding_norm, x_BxTxD), 'batch', 'slots', None)

  def hidden(
    self,
    ids_BxT: jax.Array,
    context: Context = FROM_START,
    caches: Sequence[Any] | None = None,
    inputs: LayerInputs = NO_INPUTS,
  ) -> tuple[jax.Array, tuple[Any, ...] | None, Aux]:
    """Return the input of the head [B, T, D], the caches and the `Aux`: see `trunk.run`."""
    x_BxTxD, caches, aux = trunk.run(
      self.blocks,
      self.repeats,
      self.embed(ids_BxT, context),
      context,
      caches,
      inputs,
      execution=self.execution,
    )
    x_BxTxD = apply_norm(self.final_norm, x_BxTxD)
    return x_BxTxD if self.head_scale is None else x_BxTxD * self.head_scale, caches, aux

  def __call__(
    self,
    ids_BxT: jax.Array,
    context: Context = FROM_START,
    caches: Sequence[Any] | None = None,
  ) -> tuple[jax.Array, tuple[Any, ...] | None]:
    """Return float32 logits [B, T, V] of the next token at every position, and the caches."""
    hidden_BxTxD, caches, _ = self.hidden(ids_BxT, context, caches)
    return logits(hidden_BxTxD, self.output_embedding, self.logit_cap), caches

  def init_caches(self, batch: int, length: int) -> tuple[Any, ...]:
    """Return empty caches for texts of up to `length` slots; needs `Execution.layers='list'`."""
    return trunk.init_caches(self.blocks, batch, length, self.execution.dtype)

  def shard_caches(self, caches: Sequence[Any]) -> tuple[Any, ...]:
    """Return the caches, partitioned on the mesh."""
    return trunk.shard_caches(self.blocks, caches)

  @property
  def output_embedding(self) -> jax.Array:
    """The head's matrix [V, D]."""
    return (self.embedding if self.head is None else self.head)[...]


def define_lm(config: ModelConfig, execution: Execution = DEFAULT) -> Definition:
  """Return the model's parameters and functions; `config` has every size filled in (no zeros)."""
  return define_model(LM, config, execution)


def unstack(params: Params, config: ModelConfig) -> Params:
  """Return a model's parameters in the layout of `Execution.layers='list'`."""
  return {**params, 'blocks': trunk.unstack(params['blocks'], architecture(config).repeats)}
