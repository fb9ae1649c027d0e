"""Read the weights Θ(x Kᵀ) of a model's Pattentions from its own forward pass.

They are an attention map from the tokens of a text to the parameter tokens. An MLP is a Pattention
here: its hidden units are parameter tokens, whose weights are the activations and whose values are
the rows of the second matrix. `sums` and `maps` run
inside a jit, on any mesh and in any dtype, and neither keeps the weights of all layers.

The Pattentions of a layer have the names of their modules: `query` is `attention/query`. Names and
sizes may differ from layer to layer. Equal layers at one place of a pattern form a stack (see
`model/trunk.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from tokenformer_jax.model import trunk
from tokenformer_jax.model.layer import FROM_START, Context, Layer
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.mlp import MLP
from tokenformer_jax.model.params import Definition, Params, Path, Role
from tokenformer_jax.model.pattention import Pattention
from tokenformer_jax.model.projections import Dense
from tokenformer_jax.model.stack import scan_rows
from tokenformer_jax.model.trunk import LayerPath
from tokenformer_jax.parallel import sharding


class Sums(NamedTuple):
  """Sums of the absolute weight |Θ| of every parameter token over positions, float32 [L, N]."""

  total: jax.Array
  squares: jax.Array
  largest: jax.Array


class Found(NamedTuple):
  """A Pattention or an MLP of a layer."""

  layer: LayerPath  # of the layer's parameters
  keys: Path  # of the stack's keys, [L, N, D], or an MLP's first matrices, [L, D, N]
  values: Path  # of the stack's values, [L, N, D]
  groups: tuple[int, ...]  # the number of tokens of each group
  zero_at_zero: tuple[bool, ...]  # of each group, whether a score of 0 gets the weight 0
  is_mlp: bool = False

  @property
  def tokens(self) -> int:
    """The number of parameter tokens, N."""
    return sum(self.groups)


@functools.lru_cache(maxsize=4)
def pattentions(definition: Definition) -> tuple[dict[str, Found], ...]:
  """Return the Pattentions of each layer by name, in the order in which the layer applies them."""
  arrays: dict[tuple[str, ...], dict[Role, Path]] = {}
  for path, info in jax.tree_util.tree_leaves_with_path(definition.info):
    arrays.setdefault(tuple(key.key for key in path[:-1]), {})[info.role] = path

  def describe_mlp(place: LayerPath, path: tuple[str, ...], module: MLP) -> Found:
    up, down = (arrays[*path, name][Role.KERNEL] for name in ('up', 'down'))
    zero_at_zero = module.up.bias is None  # as all activations are
    return Found(place, up, down, (_count(module),), (zero_at_zero,), is_mlp=True)

  places: list[LayerPath] = []
  stacked: dict[str, dict[str, Found]] = {}

  def describe(place: LayerPath, path: tuple[str, ...], module: Pattention | MLP) -> Found:
    path = ('blocks', *filter(None, [place.stack]), *path)
    if isinstance(module, MLP):
      return describe_mlp(place, path, module)
    own = arrays[path]
    zero_at_zero = tuple(group.score.zero_at_zero for group in module.groups)
    groups = tuple(group.tokens for group in module.groups)
    return Found(place, own[Role.KEY], own[Role.VALUE], groups, zero_at_zero)

  def run(params: Params, ids_BxT: jax.Array) -> jax.Array:
    model = definition.bind(params)
    places.extend(trunk.layer_paths(model.repeats))
    x_BxTxD = model.embed(ids_BxT)
    for stacks in trunk.named_stacks(model.blocks, model.repeats):
      for stack, layers in stacks.items():
        graphdef, state = nnx.split(layers)
        block = nnx.merge(graphdef, jax.tree.map(lambda array: array[0], state))
        modules = _pattentions(block)
        x_BxTxD, weights = _watched(block, x_BxTxD, FROM_START)
        stacked[stack] = {name: describe(LayerPath(stack, 0), *modules[name]) for name in weights}
    return x_BxTxD

  jax.eval_shape(run, definition.abstract, jax.ShapeDtypeStruct((1, 1), jnp.int32))
  return tuple(
    {name: found._replace(layer=place) for name, found in stacked[place.stack].items()}
    for place in places
  )


def names(definition: Definition) -> tuple[str, ...]:
  """Return the names of the Pattentions of all layers, each once, in the order of the layers."""
  return tuple(dict.fromkeys(name for layer in pattentions(definition) for name in layer))


def sums(model: LM, ids_BxT: jax.Array) -> dict[str, dict[str, Sums]]:
  """Sum over all positions of a batch, layer by layer as the model runs.

  The model is bound (`Definition.bind`). An id of −1 is padding at the end of a row, and is not
  counted. Return the sums for every layer and parameter token of a stack, by stack and name.
  """
  counted_BxTx1, context = (ids_BxT >= 0)[..., None], Context.from_ids(ids_BxT)

  def layer(block: Layer, x: jax.Array, _: jax.Array) -> tuple[jax.Array, dict[str, Sums]]:
    x, weights = _watched(block, x, context)
    sizes = jax.tree.map(lambda w: jnp.abs(jnp.where(counted_BxTx1, w, 0)), weights)
    return x, {
      name: Sums(
        total=jnp.sum(size, axis=(0, 1)),
        squares=jnp.sum(jnp.square(size), axis=(0, 1)),
        largest=jnp.max(size, axis=(0, 1)),
      )
      for name, size in sizes.items()
    }

  return run_layers(model, layer, model.embed(jnp.maximum(ids_BxT, 0)))[1]


def maps(model: LM, ids_BxT: jax.Array, layer: jax.Array | int) -> dict[tuple[str, int], jax.Array]:
  """Return the weights of one layer by name and number N of parameter tokens, float32 [B, T, N].

  Weights of Pattentions that the layer does not have are zero. The model is bound
  (`Definition.bind`). An id of −1 is padding at the end of a row, whose weights mean nothing. The
  number of the layer, from 0 on, may be traced: all layers share one program.
  """
  context = Context.from_ids(ids_BxT)

  def apply(block: Layer, carry: tuple[jax.Array, Any], number: jax.Array) -> tuple[Any, None]:
    x, kept = carry
    x, weights = _watched(block, x, context)
    new = {(name, array.shape[-1]): array for name, array in weights.items()}
    chosen = {key: jnp.where(number == layer, array, kept[key]) for key, array in new.items()}
    return (x, kept | chosen), None

  sizes = {
    (name, _count(module))
    for stacks in trunk.named_stacks(model.blocks, model.repeats)
    for layers in stacks.values()
    for name, (_, module) in _pattentions(layers).items()
  }
  zeros = {(name, count): jnp.zeros((*ids_BxT.shape, count)) for name, count in sizes}
  (_, kept), _ = run_layers(model, apply, (model.embed(jnp.maximum(ids_BxT, 0)), zeros))
  return kept


def run_layers(
  model: LM, apply: Callable[[Layer, Any, jax.Array], tuple[Any, Any]], carry: Any
) -> tuple[Any, dict[str, Any]]:
  """Apply a function to all layers, one after the other.

  `apply` maps a layer, the carry and the number of the layer, from 0 on, to the next carry and an
  output. Return the carry of the last layer, and the outputs of each stack, stacked.
  """
  outputs, first = {}, 0
  for repeat, stacks in zip(
    model.repeats, trunk.named_stacks(model.blocks, model.repeats), strict=True
  ):
    numbers = first + np.arange(repeat.size).reshape(repeat.count, len(stacks))
    carry, found = scan_rows(
      list(stacks.values()),
      apply,
      carry,
      list(numbers.T),
      remat='everything',  # nothing is differentiated
      unrolled=False,
    )
    outputs |= zip(stacks, found, strict=True)
    first += repeat.size
  return carry, outputs


@functools.lru_cache(maxsize=4)  # A notebook asks again and again.
def compiled_sums(
  definition: Definition, mesh: Mesh
) -> Callable[[Params, jax.Array], dict[str, dict[str, Sums]]]:
  """Return jitted `sums` for calls in `jax.set_mesh(mesh)`; every host gets the whole result."""
  return jax.jit(
    lambda params, ids: sums(definition.bind(params), ids),
    out_shardings=sharding.replicated(mesh),
  )


@functools.lru_cache(maxsize=4)
def compiled_maps(
  definition: Definition, mesh: Mesh
) -> Callable[[Params, jax.Array, int], dict[tuple[str, int], jax.Array]]:
  """Return jitted `maps` of the first row [T, N] for calls in `jax.set_mesh(mesh)`."""
  return jax.jit(
    lambda params, ids, layer: jax.tree.map(
      lambda map_BxTxN: map_BxTxN[0], maps(definition.bind(params), ids, layer)
    ),
    out_shardings=sharding.replicated(mesh),
  )


class _Watched(Pattention):
  """A Pattention that passes its weights to `see` before it computes its output.

  It is a subclass because a layer passes a context to feed-forward parts of other classes.
  """

  def __init__(self, pattention: Pattention, see: Callable[[jax.Array], None]):
    self._pattention, self._see = pattention, see

  def __call__(self, x: jax.Array, *out_heads: tuple[int, int]) -> jax.Array:
    self._see(self._pattention.weights(x).astype(jnp.float32))
    return self._pattention(x, *out_heads)  # XLA computes the common part once.


class _WatchedInput:
  """A matrix that passes its input to `see`."""

  def __init__(self, matrix: Dense, see: Callable[[jax.Array], None]):
    self._matrix, self._see = matrix, see

  def __call__(self, x: jax.Array) -> jax.Array:
    self._see(x.astype(jnp.float32))
    return self._matrix(x)


def _watched(
  block: Layer, x_BxTxD: jax.Array, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Run a layer; return its output and the weights [B, T, N] of its Pattentions in their order.

  This changes the layer, so it must be a new one, as in `scan_rows`.
  """
  weights: dict[str, jax.Array] = {}
  modules = dict(nnx.iter_modules(block))
  for name, (path, module) in _pattentions(block).items():
    see = functools.partial(weights.__setitem__, name)
    if isinstance(module, MLP):
      module.down = _WatchedInput(module.down, see)
    else:
      setattr(modules[path[:-1]], path[-1], _Watched(module, see))
  x_BxTxD, _, _ = block(x_BxTxD, context)
  return x_BxTxD, weights


def _count(module: Pattention | MLP) -> int:
  """Return the number of parameter tokens or hidden units of a layer, or of each stacked layer."""
  return module.up.kernel[...].shape[-1] if isinstance(module, MLP) else module.keys[...].shape[-2]


def _pattentions(block: nnx.Module) -> dict[str, tuple[tuple[str, ...], Pattention | MLP]]:
  """Return the path and the module of each Pattention of a layer, or of stacked layers, by name."""
  modules = dict(nnx.iter_modules(block))
  found = {path: module for path, module in modules.items() if isinstance(module, Pattention | MLP)}
  last = [path[-1] for path in found]
  return {
    path[-1] if last.count(path[-1]) == 1 else '/'.join(path): (path, module)
    for path, module in found.items()
  }
