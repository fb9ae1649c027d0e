"""Projections: a Pattention, a matrix as in a Transformer, or the input itself."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tokenformer_jax.config import (
  DenseConfig,
  ModelConfig,
  NoProjectionConfig,
  PattentionConfig,
)
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.params import Initializer, Role, param
from tokenformer_jax.model.pattention import Pattention
from tokenformer_jax.model.products import project, repeat, split_heads
from tokenformer_jax.model.stack import PROJECTED
from tokenformer_jax.parallel.rules import Axes, shard_count
from tokenformer_jax.parallel.sharding import constrain

_ZEROS = nnx.initializers.zeros


class Dense(nnx.Module):
  """x W, with an optional bias, plus the output of parameter tokens."""

  def __init__(
    self,
    d_in: int,
    d_out: int,
    axes: Axes,
    *,
    std: float,
    bias: bool,
    depth: int | None = None,
    adds_to_residual: bool = False,
    first: Initializer | None = None,
    beside: Pattention | None = None,
    rngs: nnx.Rngs,
  ):
    """Make a matrix [d_in, d_out] with this standard deviation and these logical axes.

    For `depth`, `adds_to_residual` and `first` see `ParamInfo`. The output of `beside` is added.
    """
    self.axes = axes
    make = functools.partial(param, rngs, depth=depth, adds_to_residual=adds_to_residual)
    normal = nnx.initializers.normal(std)
    self.kernel = make(normal, (d_in, d_out), axes, role=Role.KERNEL, first=first)
    # The bias is split and widened like the kernel's columns, or like a norm if those are unsplit.
    out_axis = 'norm' if axes[-1] == 'width' else axes[-1]
    self.bias = make(_ZEROS, (d_out,), (out_axis,), role=Role.BIAS) if bias else None
    self.beside = beside

  def __call__(self, x: jax.Array, out_heads: tuple[int, int] | None = None) -> jax.Array:
    """Return x W + b and the tokens' output; for heads in or out see `products.project`."""
    bias = None if self.bias is None else self.bias[...]
    out = self._apply(x, self.kernel[...], bias, out_heads)
    return out if self.beside is None else out + self.beside(x, out_heads)

  def split_output(self, x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Return the output, split into these widths: see `split_output`.

    On several devices each width has a product of its own with its columns of the matrix. Moving
    columns between devices costs far less than moving the output.
    """
    if shard_count(self.axes[-1]) == 1:
      return _cut(self(x), widths)
    biases = [None for _ in widths] if self.bias is None else _cut(self.bias[...], widths)
    kernels = _cut(self.kernel[...], widths)
    outputs = [self._apply(x, *columns) for columns in zip(kernels, biases, strict=True)]
    if self.beside is None:
      return outputs
    added = split_output(self.beside, x, widths)
    return [output + more for output, more in zip(outputs, added, strict=True)]

  def _apply(
    self,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    out_heads: tuple[int, int] | None = None,
  ) -> jax.Array:
    """Return the product with a matrix or some of its columns, plus the bias."""
    out = project(x, kernel, self.axes, contract=0, out_heads=out_heads)
    if bias is not None:
      bias = split_heads(bias, 0, out_heads, ('heads',)) if out_heads else bias
      out += repeat(bias, out.shape, out.dtype)
    return checkpoint_name(out, PROJECTED)


def split_output(
  projection: 'Projection', x_BxTxI: jax.Array, widths: Sequence[int]
) -> list[jax.Array]:
  """Split the output of a projection into arrays [B, T, W] of these widths W.

  Devices may then split each array: to cut an output that is already split, they would exchange
  most of it.
  """
  if isinstance(projection, Dense):
    return projection.split_output(x_BxTxI, widths)
  return [constrain(x, 'batch', 'slots', None) for x in _cut(projection(x_BxTxI), widths)]


def _cut(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
  """Split the last axis."""
  return jnp.split(x, list(itertools.accumulate(widths))[:-1], axis=-1)


class NoProjection(nnx.Module):
  """The input itself instead of a projection into heads or out of heads."""

  def __init__(self, width: int):
    self.width = width  # of all heads

  def __call__(self, x: jax.Array, out_heads: tuple[int, int] | None = None) -> jax.Array:
    """Return [B, T, D] as heads [B, T, H, K] filled with zeros, or such heads as [B, T, D]."""
    if out_heads:
      heads, width = out_heads
      heads_BxTxHxK = x.reshape(*x.shape[:2], heads, self.width // heads)
      return jnp.pad(heads_BxTxHxK, ((0, 0),) * 3 + ((0, width - self.width // heads),))
    kept = x[..., : self.width // x.shape[2]]
    return constrain(kept.reshape(*kept.shape[:2], -1), 'batch', 'slots', None)


Projection = Pattention | Dense | NoProjection


def into_heads(
  mixer: Any, x_BxTxD: jax.Array, heads: Sequence[tuple[int, int]]
) -> Iterator[jax.Array]:
  """Yield queries, keys and values [B, T, H, K] of a mixer, given the heads (H, K) of each."""
  if mixer.joined is not None:
    yield from mixer.joined(x_BxTxD, heads)
    return
  for project_one, own in zip((mixer.query, mixer.key, mixer.value), heads, strict=True):
    yield project_one(x_BxTxD, own)


def output_std(model: ModelConfig) -> float:
  """Return the std of matrices that add to the residual: by default the released 2 / (L √D)."""
  return model.init.output_std or 2 / (model.depth * math.sqrt(model.width))


def pattention(
  config: PattentionConfig,
  model: ModelConfig,
  widths: tuple[int, int] | None = None,
  *,
  adds_to_residual: bool,
  starts_at_zero: bool = False,
  execution: Execution,
  rngs: nnx.Rngs,
) -> Pattention:
  """Return a Pattention [B, T, I] → [B, T, O]; for `widths` see `projection`."""
  return Pattention(
    *(widths or (model.width, model.width)),
    config,
    key_std=model.init.std,
    value_std=output_std(model),
    first_values=_ZEROS if starts_at_zero else None,
    adds_to_residual=adds_to_residual,
    keep_scores=execution.remat == 'everything',
    prevent_cse=execution.layers in ('unrolled', 'list'),  # not in a loop: see `scan_rows`
    rngs=rngs,
  )


def tokens_beside(
  config: PattentionConfig | NoProjectionConfig, model: ModelConfig, *args: Any, **how: Any
) -> Pattention | None:
  """Return the parameter tokens that add to a matrix, or None; for arguments see `pattention`."""
  if isinstance(config, NoProjectionConfig):
    return None
  return pattention(config, model, *args, **how)


def projection(
  config: PattentionConfig | DenseConfig | NoProjectionConfig,
  model: ModelConfig,
  axes: Axes,
  widths: tuple[int, int] | None = None,
  *,
  starts_at_zero: bool = False,
  orthogonal: bool = False,
  execution: Execution,
  rngs: nnx.Rngs,
) -> Projection:
  """Return a projection [B, T, I] → [B, T, O], into heads, or out of heads.

  `axes` are those of a matrix, such as ('width', 'heads') or ('heads', 'width'). An output of the
  axis 'width' is added to the residual stream. `widths` are I and O, by default the model's width.
  At the start the output is zero with `starts_at_zero`; with `orthogonal` a matrix is orthogonal.
  """
  if isinstance(config, NoProjectionConfig):
    return NoProjection((widths or (model.width,))[0])
  adds = axes[-1] == 'width'
  if isinstance(config, PattentionConfig):
    how = {'adds_to_residual': adds, 'starts_at_zero': starts_at_zero}
    return pattention(config, model, widths, **how, execution=execution, rngs=rngs)
  std = output_std(model) if adds else model.init.std
  first = nnx.initializers.orthogonal() if orthogonal else None
  first = _ZEROS if starts_at_zero else first
  widths = widths or (model.width, model.width)
  how = {'adds_to_residual': adds, 'rngs': rngs}
  more = tokens_beside(
    config.beside, model, widths, starts_at_zero=starts_at_zero, execution=execution, **how
  )
  return Dense(*widths, axes, std=std, first=first, bias=config.bias, beside=more, **how)
