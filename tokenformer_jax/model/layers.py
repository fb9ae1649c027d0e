"""The parts of blocks: LayerNorm, projections and the feed-forward layer.

A projection is a Pattention or, in a Transformer, a matrix.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.config import (
  DenseConfig,
  MLPConfig,
  ModelConfig,
  NoFeedForwardConfig,
  PattentionConfig,
)
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.params import Role, param
from tokenformer_jax.model.pattention import Pattention, activate
from tokenformer_jax.model.products import project, split_heads
from tokenformer_jax.model.stack import KEEP_STATISTICS, PROJECTED, ROW_STATISTICS
from tokenformer_jax.parallel.sharding import Axes, constrain


def repeat(parameter: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
  """Return a parameter broadcast to `shape`, in `dtype`.

  The cast comes after the broadcast, so that the gradient sums over all rows in float32.
  """
  return jnp.broadcast_to(parameter, shape).astype(dtype)


class LayerNorm(nnx.Module):
  """LayerNorm over the last axis in float32.

  `form` is 'plain' (no parameters), 'bias' (a bias) or 'affine' (a bias and a scale).
  """

  def __init__(self, width: int, form: str, *, epsilon: float, rngs: nnx.Rngs):
    self.form, self.epsilon = form, epsilon
    if form == 'affine':
      self.scale = param(rngs, nnx.initializers.ones, (width,), ('norm',), role=Role.GAIN)
    if form != 'plain':
      self.bias = param(rngs, nnx.initializers.zeros, (width,), ('norm',), role=Role.BIAS)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    """Normalize each position: [B, T, D] → [B, T, D]."""
    scale = self.scale[...] if self.form == 'affine' else None
    bias = self.bias[...] if self.form != 'plain' else None
    return _layer_norm(x_BxTxD, scale, bias, self.epsilon)


@functools.partial(jax.checkpoint, prevent_cse=False, policy=KEEP_STATISTICS, static_argnums=3)
def _layer_norm(
  x_BxTxD: jax.Array, scale_D: jax.Array | None, bias_D: jax.Array | None, epsilon: float
) -> jax.Array:
  """Normalize rows, saving only x and the rows' moments for the backward pass.

  No float32 array as large as x is saved.
  """
  x = x_BxTxD.astype(jnp.float32)
  mean = checkpoint_name(jnp.mean(x, axis=-1, keepdims=True), ROW_STATISTICS)
  # E[x²] − mean² instead of E[(x − mean)²]: both sums then take one pass over x.
  square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  variance = checkpoint_name(jnp.maximum(square - jnp.square(mean), 0) + epsilon, ROW_STATISTICS)
  x = (x - mean) * jax.lax.rsqrt(variance)
  if scale_D is not None:
    x = x * scale_D[None, None]
  if bias_D is not None:
    x = x + bias_D[None, None]
  return x.astype(x_BxTxD.dtype)


class Dense(nnx.Module):
  """x W, with an optional bias."""

  def __init__(
    self,
    d_in: int,
    d_out: int,
    axes: Axes,
    *,
    std: float,
    bias: bool,
    depth: int | None = None,
    rngs: nnx.Rngs,
  ):
    self.axes = axes
    make = functools.partial(param, rngs, depth=depth)
    normal = nnx.initializers.normal(std)
    self.kernel = make(normal, (d_in, d_out), axes, role=Role.KERNEL)
    # The bias is split and widened like the kernel's columns, or like a norm if those are unsplit.
    out_axis = 'norm' if axes[-1] == 'width' else axes[-1]
    zeros = nnx.initializers.zeros
    self.bias = make(zeros, (d_out,), (out_axis,), role=Role.BIAS) if bias else None

  def __call__(self, x: jax.Array, out_heads: tuple[int, int] | None = None) -> jax.Array:
    """Return x W + b; heads as input or output are as in `pattention`."""
    out = project(x, self.kernel[...], self.axes, contract=0, out_heads=out_heads)
    if self.bias is not None:
      bias = self.bias[...]
      bias = split_heads(bias, 0, out_heads, ('heads',)) if out_heads else bias
      out += repeat(bias, out.shape, out.dtype)
    return checkpoint_name(out, PROJECTED)


class MLP(nnx.Module):
  """The Transformer's feed-forward layer: GELU(x W₁) W₂."""

  def __init__(self, config: MLPConfig, model: ModelConfig, *, rngs: nnx.Rngs):
    hidden = hidden_width(config, model)
    make = functools.partial(Dense, bias=config.bias, rngs=rngs)
    self.up = make(model.width, hidden, ('width', 'hidden'), std=model.init.std)
    self.down = make(hidden, model.width, ('hidden', 'width'), std=_output_std(model))
    self.gelu = config.gelu

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    """Apply the layer: [B, T, D] → [B, T, D]."""
    hidden_BxTxF = constrain(self.up(x_BxTxD), 'batch', None, 'hidden')
    return self.down(activate(hidden_BxTxF, self.gelu))


def hidden_width(config: MLPConfig, model: ModelConfig) -> int:
  """Return the width between the two matrices of an MLP."""
  return config.width or 4 * model.width


def _output_std(model: ModelConfig) -> float:
  """Return the std 2 / (L √D) of matrices that add to the residual (released initialization)."""
  return 2 / (model.depth * math.sqrt(model.width))


def pattention(
  config: PattentionConfig, model: ModelConfig, *, compute: Compute, rngs: nnx.Rngs
) -> Pattention:
  """Return a Pattention [B, T, D] → [B, T, D]."""
  return Pattention(
    model.width,
    model.width,
    config,
    key_std=model.init.std,
    value_std=_output_std(model),
    keep_scores=compute.remat == 'everything',
    prevent_cse=compute.layers != 'scan',
    rngs=rngs,
  )


def projection(
  config: PattentionConfig | DenseConfig,
  model: ModelConfig,
  axes: Axes,
  *,
  compute: Compute,
  rngs: nnx.Rngs,
) -> Pattention | Dense:
  """Return a projection [B, T, D] → [B, T, D].

  Args:
    config: the projection's config.
    model: the config of the whole model.
    axes: the axes of a matrix, ('width', 'heads') or ('heads', 'width').
    compute: how to compute the projection.
    rngs: the source of the parameters, by its stream `params`.
  """
  if isinstance(config, PattentionConfig):
    return pattention(config, model, compute=compute, rngs=rngs)
  std = _output_std(model) if axes[-1] == 'width' else model.init.std
  return Dense(model.width, model.width, axes, std=std, bias=config.bias, rngs=rngs)


def feed_forward(
  config: PattentionConfig | MLPConfig | NoFeedForwardConfig,
  model: ModelConfig,
  *,
  compute: Compute,
  rngs: nnx.Rngs,
) -> Pattention | MLP | None:
  """Return the feed-forward layer, or None if the config has none.

  One Pattention is a whole feed-forward layer: both matrices and the GELU.
  """
  match config:
    case PattentionConfig():
      return pattention(config, model, compute=compute, rngs=rngs)
    case MLPConfig():
      return MLP(config, model, rngs=rngs)
    case NoFeedForwardConfig():
      return None
  raise TypeError(f'{config} is not a feed-forward layer')
