"""Layers in the form for decoding on one accelerator, where the number of kernels decides the time.

Projections of one input are one product, and every group of parameter tokens has arrays of its own,
so that no token cuts or joins arrays of parameters.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model.attention import Attention
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.mixers.linear import LinearAttention
from tokenformer_jax.model.norm import Norm
from tokenformer_jax.model.pattention import Pattention, weights_of_rows
from tokenformer_jax.model.projections import Dense, NoProjection, split_output

# Of the smallest product: for 2 to 7 rows XLA fills each product by kernels of its own.
_LEAST_ROWS = 8


class JoinedTokens(nnx.Module):
  """J Pattentions of one input and of equal sizes."""

  def __init__(self, pattentions: Sequence[Pattention]):
    self.groups = pattentions[0].groups
    ends = itertools.accumulate(group.tokens for group in self.groups)
    cuts = [slice(end - group.tokens, end) for end, group in zip(ends, self.groups, strict=True)]

    def stacked(name: str) -> nnx.List:
      matrices = [getattr(one, name) for one in pattentions]
      return nnx.List([_combined(functools.partial(_stack, cut=cut), matrices) for cut in cuts])

    self.keys, self.values = stacked('keys'), stacked('values')  # of groups, [J, N, …]

  def outputs(self, x: jax.Array) -> jax.Array:
    """Return the outputs [J, B, T, O] of x [B, T, I], or of heads [B, T, H, K]."""
    batch, length, *_ = x.shape
    x_MxI = x.reshape(batch * length, -1)
    rows = len(x_MxI)
    x_MxI = jnp.pad(x_MxI, ((0, max(0, _LEAST_ROWS - rows)), (0, 0)))
    parts = []
    for group, keys, values in zip(self.groups, self.keys, self.values, strict=True):
      scores_MxJxN = jnp.einsum('MI,JNI->MJN', x_MxI, keys[...].astype(x.dtype))
      weights_MxJxN = weights_of_rows(scores_MxJxN, group)
      parts.append(jnp.einsum('MJN,JNO->JMO', weights_MxJxN, values[...].astype(x.dtype)))
    out_JxMxO = functools.reduce(jnp.add, parts)[:, :rows]
    return out_JxMxO.reshape(len(out_JxMxO), batch, length, -1)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Return the output [B, T, O] of a single Pattention."""
    (out_BxTxO,) = self.outputs(x)
    return out_BxTxO


class CenteredNorm(nnx.Module):
  """A LayerNorm as a chain of functions of a row and its sum, which is one kernel on a GPU."""

  def __init__(self, norm: Norm):
    self.norm = norm

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    """Normalize each position."""
    if x_BxTxD.shape[0] * x_BxTxD.shape[1] == 1:
      return self.norm(x_BxTxD)  # For one row XLA makes three kernels of the chain.
    x = x_BxTxD.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.norm.epsilon)
    if self.norm.scale is not None:
      x = x * self.norm.scale[...][None, None]
    if self.norm.bias is not None:
      x = x + self.norm.bias[...][None, None]
    return x.astype(x_BxTxD.dtype)


class JoinedProjections(nnx.Module):
  """Projections of one input into heads; those of equal sizes are one product."""

  def __init__(self, projections: Sequence[Any]):
    sets: dict[Hashable, list[int]] = {}
    for number, projection in enumerate(projections):
      sets.setdefault(_sizes(projection) or number, []).append(number)
    self.sets = tuple(map(tuple, sets.values()))  # of the numbers of projections
    self.products = nnx.List([_join([projections[i] for i in own]) for own in self.sets])

  def __call__(self, x_BxTxI: jax.Array, heads: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Return the output [B, T, H, K] of each projection, given its heads (H, K)."""
    outputs: dict[int, jax.Array] = {}
    for own, product in zip(self.sets, self.products, strict=True):
      if isinstance(product, JoinedTokens):
        outputs |= zip(own, product.outputs(x_BxTxI), strict=True)
      elif isinstance(product, NoProjection):
        outputs[own[0]] = x_BxTxI
      else:
        widths = [heads[i][0] * heads[i][1] for i in own]
        outputs |= zip(own, split_output(product, x_BxTxI, widths), strict=True)
    return [outputs[i].reshape(*x_BxTxI.shape[:2], *size) for i, size in enumerate(heads)]


def joined_lm(config: ModelConfig, execution: Execution, *, rngs: nnx.Rngs) -> LM:
  """Make a language model in the form for decoding; `execution.layers` is `list`."""
  return join(LM(config, execution, rngs=rngs))


def join(model: LM) -> LM:
  """Bring a model, whose layers are in a list, into the form for decoding; return it."""
  _replace(model)
  for block in model.blocks:
    mixer = block.attention
    if isinstance(mixer, Attention | LinearAttention):
      mixer.joined = JoinedProjections((mixer.query, mixer.key, mixer.value))
      del mixer.query, mixer.key, mixer.value
    _replace(block)
    _replace(mixer)
  return model


def _replace(module: nnx.Module) -> None:
  """Replace the children of a module that have another form for decoding."""
  for name, child in list(vars(module).items()):
    if isinstance(child, Pattention):
      setattr(module, name, JoinedTokens([child]))
    elif isinstance(child, Norm) and not child.is_rms:
      setattr(module, name, CenteredNorm(child))


def _sizes(projection: Any) -> Hashable:
  """Return a key that is equal for projections that can be joined; None: with no other."""
  if isinstance(projection, Pattention):
    return projection.groups, projection.keys.shape, projection.values.shape
  if isinstance(projection, Dense) and projection.beside is None:
    return 'matrix', projection.bias is None
  return None


def _join(projections: Sequence[Any]) -> Any:
  """Return one module for projections of equal `_sizes`."""
  first = projections[0]
  if isinstance(first, Pattention):
    return JoinedTokens(projections)
  if len(projections) > 1:  # One matrix [I, ΣO], whose columns are the outputs.
    first.kernel = _combined(_concatenate, [one.kernel for one in projections])
    if first.bias is not None:
      first.bias = _combined(_concatenate, [one.bias for one in projections])
  return first


def _combined(combine: Callable[..., jax.Array], params: Sequence[nnx.Param]) -> nnx.Param:
  """Return one parameter for several, of arrays or of their shapes."""
  arrays = [param.get_value() for param in params]
  is_shape = isinstance(arrays[0], jax.ShapeDtypeStruct)
  array: Any = jax.eval_shape(combine, *arrays) if is_shape else combine(*arrays)
  info = params[0].get_metadata('info')
  axes = (None,) * (array.ndim - len(info.axes)) + info.axes
  return nnx.Param(array, info=dataclasses.replace(info, axes=axes, groups=(), frozen=()))


def _stack(*arrays: jax.Array, cut: slice) -> jax.Array:
  return jnp.stack([array[cut] for array in arrays])


def _concatenate(*arrays: jax.Array) -> jax.Array:
  return jnp.concatenate(arrays, axis=-1)
