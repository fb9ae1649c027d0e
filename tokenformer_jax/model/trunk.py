"""The trunk of a model: layers in the order of a pattern.

A pattern (`config/pattern.py`) gives repeats of rows of layers. The layers at one position of a row
have their parameters stacked along a leading axis, `layers`, and a repeat is one loop over those
stacks. Tied layers, `layer^2`, have one row of arrays for all their runs. In a trunk with one stack
the parameters have paths such as `blocks/attention/query/keys`. With several stacks the path
includes the stack's name, which is the layer's name and the number of the stack:
`blocks/local_0/…`, `blocks/full_1/…`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config.pattern import Repeat
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import (
  FROM_START,
  NO_INPUTS,
  Aux,
  Context,
  Layer,
  LayerInputs,
  add_aux,
)
from tokenformer_jax.model.params import Params, stack
from tokenformer_jax.model.stack import scan_rows
from tokenformer_jax.parallel.sharding import constrain


class Architecture(NamedTuple):
  """The layers of a trunk."""

  repeats: tuple[Repeat, ...]  # from `pattern.parse`
  # For each layer name in the repeats, the function of `execution` and `rngs` that makes a layer.
  makers: Mapping[str, Callable[..., nnx.Module]]


class Stacks(nnx.Module):
  """Several stacks of layers, each an attribute with the stack's name."""

  def __init__(self, stacks: Mapping[str, nnx.Module]):
    for name, layers in stacks.items():
      setattr(self, name, layers)


class LayerPath(NamedTuple):
  """The path of a layer's parameters."""

  stack: str  # the name of its stack, '' for the only one
  row: int  # of the arrays of the stack
  run: int  # the number of the layer's run; runs of tied layers share a row


def make(architecture: Architecture, *, execution: Execution, rngs: nnx.Rngs) -> Any:
  """Make the layers as one module: a stack, several stacks, or a list in execution order."""
  repeats, makers = architecture
  if execution.layers == 'list':
    names = [name for repeat in repeats for name in repeat.layers * repeat.count]
    return nnx.List([makers[name](execution=execution, rngs=rngs) for name in names])

  depths: dict[str, list[int]] = {}
  for number, path in enumerate(layer_paths(repeats), start=1):
    depths.setdefault(path.stack, []).append(number)

  def stacked(own: str, name: str, repeat: Repeat) -> nnx.Module:
    layers = 'unrolled' if _is_unrolled(execution, repeat) else 'scan'
    how = dataclasses.replace(execution, layers=layers)
    make_layer = functools.partial(makers[name], execution=how)
    return stack(
      lambda rngs: make_layer(rngs=rngs),
      repeat.rows,
      rngs=rngs,
      depths=depths[own][: repeat.rows],
      runs=repeat.count // repeat.rows,
    )

  stacks = {
    own: stacked(own, name, repeat)
    for repeat, names in zip(repeats, _stack_names(repeats), strict=True)
    for own, name in zip(names, repeat.layers, strict=True)
  }
  return stacks[''] if '' in stacks else Stacks(stacks)


def _stack_names(repeats: Sequence[Repeat]) -> list[list[str]]:
  """Return the names of each repeat's stacks; a single stack has the name ''."""
  if sum(len(repeat.layers) for repeat in repeats) == 1:
    return [['']]
  names, number = [], 0
  for repeat in repeats:
    names.append([f'{name}_{number + i}' for i, name in enumerate(repeat.layers)])
    number += len(repeat.layers)
  return names


def layer_paths(repeats: Sequence[Repeat]) -> Iterator[LayerPath]:
  """Yield the path of each layer's parameters, in execution order."""
  for repeat, names in zip(repeats, _stack_names(repeats), strict=True):
    for run in range(repeat.count):
      for name in names:
        yield LayerPath(name, 0 if repeat.tied else run, run)


def named_stacks(blocks: nnx.Module, repeats: Sequence[Repeat]) -> list[dict[str, Any]]:
  """Return the stacks from `make` of each repeat by name, in the execution order of a row."""
  return [
    {name: getattr(blocks, name) if name else blocks for name in names}
    for names in _stack_names(repeats)
  ]


def length_flops(blocks: nnx.Module, repeats: Sequence[Repeat], length: int) -> float:
  """Count the length-dependent FLOPs of one of `length` positions in stacks from `make`."""
  return sum(
    repeat.count * layers.length_flops(length)
    for repeat, stacks in zip(repeats, named_stacks(blocks, repeats), strict=True)
    for layers in stacks.values()
  )


def unstack(blocks: Params, repeats: Sequence[Repeat]) -> dict[int, Params]:
  """Return the parameters of stacks as those of a list of layers, in execution order."""

  def layer(path: LayerPath) -> Params:
    stacked = blocks[path.stack] if path.stack else blocks
    return jax.tree.map(lambda array: array[path.row], stacked)

  return {i: layer(path) for i, path in enumerate(layer_paths(repeats))}


def run(
  blocks: Any,
  repeats: Sequence[Repeat],
  x_BxTxD: jax.Array,
  context: Context = FROM_START,
  caches: Sequence[Any] | None = None,
  inputs: LayerInputs = NO_INPUTS,
  *,
  execution: Execution,
) -> tuple[jax.Array, tuple[Any, ...] | None, Aux]:
  """Run layers from `make`, which had the same repeats and the same `execution.layers`.

  `caches` has one for each layer in execution order, and needs `execution.layers='list'`; None: no
  later call continues from here. `inputs` has a leading axis `layers`.

  Returns:
    The output of the last layer, the caches with the new slots, and the layers' combined `Aux`.
  """
  if caches is not None and (context.starts_BxT is not None or context.ends_B is not None):
    raise ValueError('a cache holds one document a row, padded at its beginning: see `Context`')
  if execution.layers == 'list':
    return _run_list(blocks, x_BxTxD, context, caches, inputs)
  if caches is not None:
    raise ValueError("caches need Execution.layers='list'")

  def apply(layer: Layer, x_BxTxD: jax.Array, own: LayerInputs) -> tuple[jax.Array, Aux]:
    x_BxTxD, _, aux = layer(x_BxTxD, context, None, own)
    return x_BxTxD, aux

  auxes: list[Aux] = []
  rows = zip(
    repeats, named_stacks(blocks, repeats), _inputs_of_stacks(inputs, repeats), strict=True
  )
  for repeat, stacks, own in rows:
    x_BxTxD, context = enter(next(iter(stacks.values())), x_BxTxD, context)
    x_BxTxD, stacked = scan_rows(
      list(stacks.values()),
      apply,
      x_BxTxD,
      own,
      remat=execution.remat,
      unrolled=_is_unrolled(execution, repeat),
      tied_runs=repeat.count if repeat.tied else 0,
    )
    auxes.extend(stacked)
  return x_BxTxD, None, _combine(auxes)


def _run_list(
  blocks: Sequence[Layer],
  x_BxTxD: jax.Array,
  context: Context,
  caches: Sequence[Any] | None,
  inputs: LayerInputs,
) -> tuple[jax.Array, tuple[Any, ...] | None, Aux]:
  auxes, written = [], []
  for i, layer in enumerate(blocks):
    own = jax.tree.map(lambda array, i=i: array[i], inputs)
    cache = None if caches is None else caches[i]
    x_BxTxD, context = enter(layer, x_BxTxD, context)
    x_BxTxD, cache, aux = layer(x_BxTxD, context, cache, own)
    auxes.append(jax.tree.map(lambda value: jnp.asarray(value)[None], aux))
    written.append(cache)
  return x_BxTxD, None if caches is None else tuple(written), _combine(auxes)


def enter(layer: Any, x_BxTxD: jax.Array, context: Context) -> tuple[jax.Array, Context]:
  """Return the input and the context of a layer; the first one with a boundary starts from 0."""
  if context.embedding_BxTxD is not None or getattr(layer, 'boundary', None) is None:
    return x_BxTxD, context
  return jnp.zeros_like(x_BxTxD), context._replace(embedding_BxTxD=x_BxTxD)


def _is_unrolled(execution: Execution, repeat: Repeat) -> bool:
  """Return whether the rows of a repeat run without a loop."""
  return execution.layers == 'unrolled' or repeat.count == 1


def _inputs_of_stacks(
  inputs: LayerInputs, repeats: Sequence[Repeat]
) -> Iterator[list[LayerInputs]]:
  """Yield the inputs of each stack of each repeat, with a leading axis `layers`."""

  def take(layers: slice, inputs: LayerInputs) -> LayerInputs:
    return jax.tree.map(lambda array: array[layers], inputs)

  first = 0
  for repeat in repeats:
    row, last = len(repeat.layers), first + repeat.size
    own = inputs if len(repeats) == 1 else take(slice(first, last), inputs)
    yield [own] if row == 1 else [take(slice(i, None, row), own) for i in range(row)]
    first = last


def _combine(auxes: Sequence[Aux]) -> Aux:
  """Combine the `Aux` of stacks, whose arrays have a leading axis, into that of the trunk."""
  figures: dict[str, list[jax.Array]] = {}
  for aux in auxes:
    for name, values in aux.figures.items():
      figures.setdefault(name, []).append(values)
  losses = add_aux(*(Aux(jax.tree.map(jnp.sum, aux.losses), {}) for aux in auxes)).losses
  return Aux(losses, figures)


def init_caches(
  blocks: Sequence[Layer], batch: int, length: int, dtype: jnp.dtype
) -> tuple[Any, ...]:
  """Return an empty cache for each layer of a list, partitioned on the mesh.

  `length` is the number of slots for a text, including its padding.
  """
  return shard_caches(blocks, tuple(layer.init_cache(batch, length, dtype) for layer in blocks))


def shard_caches(blocks: Sequence[Layer], caches: Sequence[Any]) -> tuple[Any, ...]:
  """Return the caches, each array partitioned by its layer's `cache_axes`."""
  axes = tuple(layer.cache_axes() for layer in blocks)
  return jax.tree.map(lambda array, names: constrain(array, *names), tuple(caches), axes)
