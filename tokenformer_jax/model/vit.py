"""The vision transformer: patches, a trunk without a causal mask, a pooled head.

With Pattentions the blocks are a TokenFormer's; with dense projections they are the usual ViT's
(Dosovitskiy et al. 2021, arXiv 2010.11929). Patch embedding and head are matrices in both. With the
TokenFormer paper's numbers of parameter tokens, the blocks of its smallest ViT have 84.9 million
parameters of the 86 million that it reports. The rest fits a convolution (0.6) and a linear head
(0.8), but not two more Pattentions (1.9).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model import trunk
from tokenformer_jax.model.blocks import architecture
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import FROM_START, NO_INPUTS, Aux, Context, LayerInputs
from tokenformer_jax.model.norm import apply_norm, make_norm
from tokenformer_jax.model.params import Role, param
from tokenformer_jax.model.products import repeat
from tokenformer_jax.model.projections import Dense
from tokenformer_jax.parallel.sharding import constrain

_BASE = 10000.0  # of the sin-cos positions


def patches(images_BxHxWxC: jax.Array, size: int) -> jax.Array:
  """Return the non-overlapping patches [B, T, size · size · C] of images, row by row."""
  batch, height, width, channels = images_BxHxWxC.shape
  rows, columns = height // size, width // size
  grid = images_BxHxWxC.reshape(batch, rows, size, columns, size, channels).swapaxes(2, 3)
  return grid.reshape(batch, rows * columns, size * size * channels)


@functools.cache
def sincos_positions(rows: int, columns: int, width: int) -> np.ndarray:
  """Return fixed 2-D positions [rows · columns, D] (Chen et al. 2021, arXiv 2104.02057).

  Sine and cosine of the column, then sine and cosine of the row, each take a quarter of the width.
  """
  frequencies = _BASE ** -(np.arange(width // 4) / (width // 4))
  at_row, at_column = np.meshgrid(np.arange(rows), np.arange(columns), indexing='ij')
  angles = [np.outer(at.ravel(), frequencies) for at in (at_column, at_row)]
  return np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)], axis=1, dtype=np.float32)


def resample_positions(table_TxD: jax.Array, length: int) -> jax.Array:
  """Resize learned positions of a square grid to a square grid of `length` patches (bicubic)."""
  old, new = (round(n**0.5) for n in (table_TxD.shape[0], length))
  grid = table_TxD.reshape(old, old, -1)
  return jax.image.resize(grid, (new, new, grid.shape[-1]), 'bicubic').reshape(length, -1)


def branch_scales(key: jax.Array, layers: int, batch: int, rate: float) -> jax.Array:
  """Draw stochastic depth (Huang et al. 2016, arXiv 1603.09382) as factors [L, B, 2] of branches.

  A factor is 0 with a probability that rises from 0 in the first block to `rate` in the last block.
  Otherwise it is the factor that keeps the expectation. Draws are independent for each image and
  for its attention and feed-forward branches.
  """
  kept_L = 1 - jnp.linspace(0, rate, layers)
  kept_Lx1x1 = kept_L[:, None, None]
  return jax.random.bernoulli(key, kept_Lx1x1, (layers, batch, 2)) / kept_Lx1x1


class ViT(nnx.Module):
  """A classifier of images [B, H, W, C] with pixel values around 0."""

  def __init__(self, config: ModelConfig, execution: Execution, *, rngs: nnx.Rngs):
    self.execution, self.patch = execution, config.patch
    self.position_embedding, self.pool = config.position_embedding, config.pool

    # The kernel of a convolution of stride and size `patch`, with its first three axes merged.
    inputs = config.patch**2 * config.channels
    self.patch_embedding = Dense(
      inputs, config.width, ('patch', 'width'), std=inputs**-0.5, bias=True, depth=0, rngs=rngs
    )
    make = functools.partial(param, rngs, nnx.initializers.normal(config.init.std), depth=0)
    self.positions = (
      make((config.max_length, config.width), ('position', 'width'), role=Role.POSITION)
      if config.position_embedding == 'learned'
      else None
    )
    # A single vector is not split and does not decay, like a norm.
    self.class_token = (
      make((config.width,), ('norm',), role=Role.VECTOR) if config.pool == 'token' else None
    )
    layers = architecture(config, causal=False)
    self.repeats = layers.repeats
    self.blocks = trunk.make(layers, execution=execution, rngs=rngs)
    self.final_norm = make_norm(config.final_norm, config, rngs=rngs)
    self.head = Dense(
      config.width,
      config.classes,
      ('width', 'classes'),
      std=config.init.std,
      bias=True,
      rngs=rngs,
    )

  def __call__(
    self,
    images_BxHxWxC: jax.Array,
    context: Context = FROM_START,
    inputs: LayerInputs = NO_INPUTS,
  ) -> tuple[jax.Array, Aux]:
    """Return float32 logits [B, classes], and the layers' `Aux`.

    `context` says whether this is a pass of training; images have neither slots nor padding.
    `inputs.branch_scales_Bx2` is stochastic depth: see `branch_scales`.
    """
    x_BxTxD = self._embed(images_BxHxWxC.astype(self.execution.dtype))
    x_BxTxD, _, aux = trunk.run(
      self.blocks,
      self.repeats,
      constrain(x_BxTxD, 'batch', None, None),
      context,
      inputs=inputs,
      execution=self.execution,
    )
    x_BxTxD = apply_norm(self.final_norm, x_BxTxD)
    if self.pool == 'mean':
      pooled_Bx1xD = jnp.mean(x_BxTxD.astype(jnp.float32), axis=1, keepdims=True)
    else:
      pooled_Bx1xD = x_BxTxD[:, :1]
    return self.head(pooled_Bx1xD.astype(jnp.float32))[:, 0], aux

  def _embed(self, images_BxHxWxC: jax.Array) -> jax.Array:
    """Embed the patches with their positions, after the class token if the model has one."""
    x_BxTxD = self.patch_embedding(patches(images_BxHxWxC, self.patch))
    batch, _, width = x_BxTxD.shape
    if self.positions is not None:
      x_BxTxD = x_BxTxD + repeat(self.positions[...], x_BxTxD.shape, x_BxTxD.dtype)
    elif self.position_embedding == 'sincos':
      rows, columns = (size // self.patch for size in images_BxHxWxC.shape[1:3])
      x_BxTxD = x_BxTxD + sincos_positions(rows, columns, width).astype(x_BxTxD.dtype)[None]
    if self.class_token is not None:
      token_Bx1xD = repeat(self.class_token[...], (batch, 1, width), x_BxTxD.dtype)
      x_BxTxD = jnp.concatenate([token_Bx1xD, x_BxTxD], axis=1)
    return x_BxTxD
