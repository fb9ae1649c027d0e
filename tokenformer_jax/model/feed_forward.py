"""Make and apply the feed-forward part of a layer."""

import jax
from flax import nnx

from tokenformer_jax.config import (
  ExpertsConfig,
  MLPConfig,
  ModelConfig,
  NoFeedForwardConfig,
  PattentionConfig,
)
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.experts import Experts
from tokenformer_jax.model.layer import EMPTY_AUX, Aux, Context, LayerInputs
from tokenformer_jax.model.mlp import MLP
from tokenformer_jax.model.pattention import Pattention
from tokenformer_jax.model.projections import pattention

FeedForward = Pattention | MLP | Experts


def feed_forward(
  config: PattentionConfig | MLPConfig | ExpertsConfig | NoFeedForwardConfig,
  model: ModelConfig,
  *,
  execution: Execution,
  rngs: nnx.Rngs,
) -> FeedForward | None:
  """Return the feed-forward part, or None if the config has none.

  One Pattention is a whole feed-forward layer: both matrices and the GELU.
  """
  match config:
    case PattentionConfig():
      return pattention(config, model, adds_to_residual=True, execution=execution, rngs=rngs)
    case MLPConfig():
      return MLP(config, model, execution=execution, rngs=rngs)
    case ExpertsConfig():
      shared = feed_forward(config.shared, model, execution=execution, rngs=rngs)
      return Experts(config, model, shared, rngs=rngs)
    case NoFeedForwardConfig():
      return None
  raise TypeError(f'{config} is not a feed-forward layer')


def apply(
  ffn: FeedForward, x_BxTxD: jax.Array, context: Context, inputs: LayerInputs
) -> tuple[jax.Array, Aux]:
  """Return the output of a feed-forward part [B, T, D] and its `Aux`, which only experts have."""
  if isinstance(ffn, Experts):
    return ffn(x_BxTxD, context, inputs)
  return ffn(x_BxTxD), EMPTY_AUX
