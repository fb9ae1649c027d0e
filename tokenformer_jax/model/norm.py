"""Norms over the width of a hidden state, and learned gains, computed in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.params import Role, param
from tokenformer_jax.model.stack import KEEP_STATISTICS, ROW_STATISTICS

_RMS = ('rms', 'rms_plain', 'rms_offset')
WITH_SCALE = ('affine', 'rms', 'rms_offset')
_WITH_BIAS = ('bias', 'affine')


class Norm(nnx.Module):
  """LayerNorm or RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467) over the last axis, by form.

  plain, bias, affine    (x − mean) / √(variance + ε), alone, with a bias, with a scale and a bias
  rms, rms_plain         x / √(mean x² + ε), with a scale, alone; or x / (√(mean x²) + ε)
  rms_offset             the same with a scale of 1 + w
  """

  def __init__(
    self,
    form: str,
    model: ModelConfig,
    *,
    head_width: int = 0,
    heads: int = 0,
    depth: int | None = None,
    ends_branch: bool = False,
    rngs: nnx.Rngs,
  ):
    """Make a norm over the model's width, or over the width of each head [B, T, H, K].

    With `heads`, their number, it is a norm over all heads together. With `ends_branch` its output
    is added to the residual stream.
    """
    self.is_rms, self.has_offset = form in _RMS, form == 'rms_offset'
    self.epsilon, self.outside = model.norm_epsilon, model.norm_epsilon_outside
    shape, axes = ((head_width,), ('head_width',)) if head_width else ((model.width,), ('norm',))
    if heads:
      shape, axes = (heads * head_width,), ('heads',)
    self.is_over_heads = heads > 0
    how = {'shape': shape, 'axes': axes, 'depth': depth, 'adds_to_residual': ends_branch}
    make = functools.partial(param, rngs, **how)
    first = nnx.initializers.zeros if self.has_offset else nnx.initializers.ones
    zero = -1.0 if self.has_offset else 0.0
    self.scale = make(first, role=Role.GAIN, zero=zero) if form in WITH_SCALE else None
    self.bias = make(nnx.initializers.zeros, role=Role.BIAS) if form in _WITH_BIAS else None

  @jax.named_scope('norm')
  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    """Normalize each position [B, T, D], or each head of it, or its heads together."""
    scale, bias = (None if one is None else one[...] for one in (self.scale, self.bias))
    if self.has_offset and scale is not None:
      scale = 1 + scale
    rows = x_BxTxD.reshape(*x_BxTxD.shape[:2], -1) if self.is_over_heads else x_BxTxD
    if self.is_rms:
      rows = _rms_norm(rows, scale, self.epsilon, self.outside)
    else:
      rows = _layer_norm(rows, scale, bias, self.epsilon)
    return rows.reshape(x_BxTxD.shape)


def make_norm(form: str, model: ModelConfig, *, rngs: nnx.Rngs, **how: Any) -> Norm | None:
  """Return a norm, or None for the form `none`; `how` are arguments of `Norm`."""
  return None if form == 'none' else Norm(form, model, rngs=rngs, **how)


def apply_norm(norm: Norm | None, x_BxTxD: jax.Array) -> jax.Array:
  """Return the normalized array, or the array itself without a norm."""
  return x_BxTxD if norm is None else norm(x_BxTxD)


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


@functools.partial(jax.checkpoint, prevent_cse=False, policy=KEEP_STATISTICS, static_argnums=(2, 3))
def _rms_norm(
  x_BxTxD: jax.Array, scale_D: jax.Array | None, epsilon: float, outside: bool
) -> jax.Array:
  """Divide rows by their root mean square, saving only x and the mean squares."""
  x = x_BxTxD.astype(jnp.float32)
  square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  # The derivative of √ at a row of zeros is infinite; the smallest normal number keeps it finite.
  square = checkpoint_name(
    square + (jnp.finfo(jnp.float32).tiny if outside else epsilon), ROW_STATISTICS
  )
  x = x / (jnp.sqrt(square) + epsilon) if outside else x * jax.lax.rsqrt(square)
  if scale_D is not None:
    x = x * scale_D[(None,) * (x.ndim - 1)]
  return x.astype(x_BxTxD.dtype)


def gain(rngs: nnx.Rngs, value: float = 1.0, heads: int = 0) -> nnx.Param:
  """Make a learned factor, or one for each of several heads [H]; it does not decay."""
  shape, axes = ((heads,), ('head_gains',)) if heads else ((), ())
  return param(rngs, nnx.initializers.constant(value), shape, axes, role=Role.GAIN)


def apply_gain(factor: nnx.Param | None, x: jax.Array) -> jax.Array:
  """Return x times a learned factor, multiplied in float32; without a factor x itself."""
  if factor is None:
    return x
  return (x.astype(jnp.float32) * factor[...]).astype(x.dtype)
