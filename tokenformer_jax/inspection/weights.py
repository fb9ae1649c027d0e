"""Read the weights Θ(x Kᵀ) of a model's Pattentions from its own forward pass.

They are an attention map from the tokens of a text to the parameter tokens. An MLP is a Pattention
here: its hidden units are parameter tokens, whose weights are the activations and whose values are
the rows of the second matrix. `sums` and `maps` run inside a jit, on any mesh and in any dtype.

The Pattentions of a layer have the names of their modules: `query` is `attention/query`. Names and
sizes may differ from layer to layer. Equal layers at one position of a pattern form a stack (see
`model/trunk.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tokenformer_jax.model import trunk
from tokenformer_jax.model.layer import FROM_START, Context
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.mlp import MLP
from tokenformer_jax.model.params import Definition, Params, Path, Role
from tokenformer_jax.model.pattention import Pattention
from tokenformer_jax.model.stack import scan_rows
from tokenformer_jax.model.trunk import LayerPath
from tokenformer_jax.parallel import sharding

Names = tuple[str, ...]  # the attribute names that lead from a layer to one of its modules


class TokenArrays(NamedTuple):
  """The parameter tokens of a Pattention or an MLP of a layer."""

  layer: LayerPath  # of the layer's parameters
  keys: Path  # of the stack's keys, [L, N, D], or an MLP's first matrices, [L, D, N]
  values: Path  # of the stack's values, [L, N, D]
  groups: tuple[int, ...]  # the number of tokens of each group
  zero_at_zero: tuple[bool, ...]  # of each group, whether a score of 0 gets the weight 0
  is_mlp: bool

  @property
  def tokens(self) -> int:
    """The number of parameter tokens, N."""
    return sum(self.groups)


@functools.lru_cache(maxsize=4)
def pattentions(definition: Definition) -> tuple[dict[str, TokenArrays], ...]:
  """Return the Pattentions of each layer by name, in the order in which the layer applies them."""
  arrays: dict[Names, dict[Role, Path]] = {}
  for path, info in jax.tree_util.tree_leaves_with_path(definition.info):
    arrays.setdefault(tuple(key.key for key in path[:-1]), {})[info.role] = path

  def describe(stack: str, path: Names, module: Pattention | MLP) -> TokenArrays:
    path = ('blocks', *filter(None, [stack]), *path)
    layer = LayerPath(stack, row=0, run=0)
    if isinstance(module, MLP):
      up, down = (arrays[*path, name][Role.KERNEL] for name in ('up', 'down'))
      zero_at_zero = module.up.bias is None  # as all activations are
      units = module.up.kernel[...].shape[-1]
      return TokenArrays(layer, up, down, (units,), (zero_at_zero,), is_mlp=True)
    own = arrays[path]
    groups = tuple(group.tokens for group in module.groups)
    zero_at_zero = tuple(group.score.zero_at_zero for group in module.groups)
    return TokenArrays(layer, own[Role.KEY], own[Role.VALUE], groups, zero_at_zero, is_mlp=False)

  stacked: dict[str, dict[str, TokenArrays]] = {}

  def run(params: Params, ids_BxT: jax.Array) -> jax.Array:
    model, context = definition.bind(params), FROM_START
    x_BxTxD = model.embed(ids_BxT)
    for stacks in trunk.named_stacks(model.blocks, model.repeats):
      for stack, layers in stacks.items():
        graphdef, state = nnx.split(layers)
        block = nnx.merge(graphdef, jax.tree.map(lambda array: array[0], state))
        modules = _pattentions(block)
        x_BxTxD, context = trunk.enter(block, x_BxTxD, context)
        x_BxTxD, weights = _run_watched(block, x_BxTxD, context, jnp.sum)
        stacked[stack] = {name: describe(stack, *modules[name]) for name in weights}
    return x_BxTxD

  jax.eval_shape(run, definition.abstract, jax.ShapeDtypeStruct((1, 1), jnp.int32))
  paths = trunk.layer_paths(definition.bind(definition.abstract).repeats)
  return tuple(
    {name: tokens._replace(layer=path) for name, tokens in stacked[path.stack].items()}
    for path in paths
  )


def sums(model: LM, ids_BxT: jax.Array) -> dict[str, dict[str, jax.Array]]:
  """Sum absolute weights |Θ| over all positions of a batch, layer by layer as the model runs.

  The model is bound (`Definition.bind`). An id of −1 is padding at the end of a row, and is not
  counted. Return float32 [L, N] for every layer and parameter token of a stack, by stack and name;
  the weights of one layer are in memory.
  """
  counted_BxTx1 = (ids_BxT >= 0)[..., None]

  def reduce(weights_BxTxN: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(jnp.where(counted_BxTx1, weights_BxTxN, 0)), axis=(0, 1))

  return run_layers(model, ids_BxT, functools.partial(_run_watched, reduce=reduce))


def maps(model: LM, ids_BxT: jax.Array) -> dict[str, dict[str, jax.Array]]:
  """Return the weights of all layers for the first row, float32 [L, T, N], by stack and name.

  The model is bound (`Definition.bind`). An id of −1 is padding at the end of a row, whose weights
  mean nothing.
  """
  first_row = functools.partial(_run_watched, reduce=lambda weights_BxTxN: weights_BxTxN[0])
  return run_layers(model, ids_BxT, first_row)


def run_layers(
  model: LM, ids_BxT: jax.Array, apply: Callable[[Any, jax.Array, Context], tuple[jax.Array, Any]]
) -> dict[str, Any]:
  """Apply a function to all layers, one after the other.

  `apply` maps a layer, its input [B, T, D] and the context of the ids to the layer's output and a
  result. Return the results of each stack, stacked by runs of its layers.
  """
  context, results = Context.from_ids(ids_BxT), {}
  x_BxTxD = model.embed(jnp.maximum(ids_BxT, 0))
  named = trunk.named_stacks(model.blocks, model.repeats)
  for repeat, stacks in zip(model.repeats, named, strict=True):
    x_BxTxD, context = trunk.enter(next(iter(stacks.values())), x_BxTxD, context)
    x_BxTxD, outputs = scan_rows(
      list(stacks.values()),
      lambda block, x, _, context=context: apply(block, x, context),
      x_BxTxD,
      [None] * len(stacks),
      remat='everything',  # nothing is differentiated
      unrolled=False,
      tied_runs=repeat.count if repeat.tied else 0,
    )
    results |= zip(stacks, outputs, strict=True)
  return results


@functools.lru_cache(maxsize=8)  # A notebook asks again and again.
def compiled(
  function: Callable[[LM, jax.Array], Any], definition: Definition, mesh: Mesh
) -> Callable[[Params, jax.Array], Any]:
  """Return a jitted function of parameters and ids, for calls in `jax.set_mesh(mesh)`.

  `function` is of a bound model and ids, as `sums` is. Every host gets the whole result.
  """
  return jax.jit(
    lambda params, ids: function(definition.bind(params), ids),
    out_shardings=sharding.replicated(mesh),
  )


class _Watched(nnx.Module):
  """A module that passes its input and its output to `see`."""

  def __init__(self, module: Any, see: Callable[[Any, Any], None]):
    self.module, self.see = module, see

  def __getattr__(self, name: str) -> Any:
    return getattr(vars(self).get('module'), name)

  def __call__(self, x: jax.Array, *arguments: Any) -> Any:
    output = self.module(x, *arguments)
    self.see(x, output)
    return output


def watch(block: nnx.Module, path: Names, see: Callable[[Any, Any], None]) -> None:
  """Have a module of a layer pass its input and its output to `see`; this changes the layer."""
  modules = dict(nnx.iter_modules(block))
  setattr(modules[path[:-1]], path[-1], _Watched(modules[path], see))


def _run_watched(
  block: Any,
  x_BxTxD: jax.Array,
  context: Context,
  reduce: Callable[[jax.Array], Any],
) -> tuple[jax.Array, dict[str, Any]]:
  """Run a layer; return its output, and `reduce` of the weights [B, T, N] of its Pattentions.

  They are in the order in which the layer applies them. This changes the layer, so it must be a new
  one, as in `scan_rows`.
  """
  weights: dict[str, Any] = {}

  def see(name: str, module: Pattention | MLP, x: jax.Array, output: jax.Array) -> None:
    del output
    own = x if isinstance(module, MLP) else module.weights(x)  # XLA computes the common part once.
    weights[name] = reduce(own.astype(jnp.float32))

  for name, (path, module) in _pattentions(block).items():
    # The input of an MLP's second matrix is its activations.
    watched = (*path, 'down') if isinstance(module, MLP) else path
    watch(block, watched, functools.partial(see, name, module))
  return block(x_BxTxD, context)[0], weights


def _pattentions(block: nnx.Module) -> dict[str, tuple[Names, Pattention | MLP]]:
  """Return the path and the module of each Pattention of a layer, or of stacked layers, by name."""
  modules = {
    tuple(map(str, path)): module
    for path, module in nnx.iter_modules(block)
    if isinstance(module, Pattention | MLP)
  }
  last = [path[-1] for path in modules]
  return {
    path[-1] if last.count(path[-1]) == 1 else '/'.join(path): (path, module)
    for path, module in modules.items()
  }
