"""The weights Θ(x Kᵀ) of a model's Pattentions, taken from its own forward pass.

Each is an attention map: of the tokens of the text over the parameter tokens. `sums` and `maps` run
inside a jit, on any mesh and in any dtype, and neither keeps the weights of more than one layer.

The Pattentions of a layer have the names of their modules: `query` is `attention/query`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tokenformer_jax.grow.tokens import Path
from tokenformer_jax.model.blocks import Block
from tokenformer_jax.model.lm import LM
from tokenformer_jax.model.params import Definition, Params, Role
from tokenformer_jax.model.pattention import Pattention
from tokenformer_jax.model.stack import scan
from tokenformer_jax.parallel import sharding


class Sums(NamedTuple):
  """Of the absolute weight |Θ| of every parameter token over positions, float32 [L, N]."""

  total: jax.Array
  squares: jax.Array
  largest: jax.Array


def names(definition: Definition) -> tuple[str, ...]:
  """Return the names of the Pattentions of a layer, in the order in which it applies them."""
  applied: list[str] = []

  def layer(block: Block, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    x, weights = _watched(block, x)
    applied.extend(weights)
    return x, None

  def run(params: Params, ids_BxT: jax.Array) -> jax.Array:
    model = definition.bind(params)
    return scan(model.blocks, layer, model.embed(ids_BxT))[0]

  jax.eval_shape(run, definition.abstract, jax.ShapeDtypeStruct((1, 1), jnp.int32))
  return tuple(dict.fromkeys(applied))


def paths(definition: Definition, role: Role) -> dict[str, Path]:
  """Return where the layers' parameters of a role are, `KEY` or `VALUE`, by Pattention."""
  found = [
    path
    for path, one in jax.tree_util.tree_leaves_with_path(definition.info)
    if one.role is role and one.in_layers
  ]
  modules = [tuple(key.key for key in path[:-1]) for path in found]
  return dict(zip(_short(modules), found, strict=True))


def sums(model: LM, ids_BxT: jax.Array) -> dict[str, Sums]:
  """Sums over all positions of a batch, reduced layer by layer as the model runs.

  Args:
    model: bound (`Definition.bind`), with projection='pattention'.
    ids_BxT: token ids; an id of −1 is padding at the end of a row, and is not counted.

  Returns:
    By name: sums of every layer and parameter token.
  """
  counted_BxTx1 = (ids_BxT >= 0)[..., None]

  def layer(block: Block, x: jax.Array, _: None) -> tuple[jax.Array, dict[str, Sums]]:
    x, weights = _watched(block, x)
    sizes = jax.tree.map(lambda w: jnp.abs(jnp.where(counted_BxTx1, w, 0)), weights)
    return x, {
      kind: Sums(
        total=jnp.sum(size, axis=(0, 1)),
        squares=jnp.sum(jnp.square(size), axis=(0, 1)),
        largest=jnp.max(size, axis=(0, 1)),
      )
      for kind, size in sizes.items()
    }

  return scan(model.blocks, layer, model.embed(jnp.maximum(ids_BxT, 0)))[1]


def maps(model: LM, ids_BxT: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
  """The weights of one layer, by name: float32 [B, T, N].

  Args:
    model: bound (`Definition.bind`), with projection='pattention'.
    ids_BxT: token ids; −1 is padding at the end of a row, whose weights mean nothing.
    layer: its index, which may be traced: all layers are one program.
  """

  def one(block: Block, carry: tuple[jax.Array, Any], index: jax.Array) -> tuple[Any, None]:
    x, kept = carry
    x, weights = _watched(block, x)
    return (
      x,
      jax.tree.map(lambda new, old: jnp.where(index == layer, new, old), weights, kept),
    ), None

  x = model.embed(jnp.maximum(ids_BxT, 0))
  found = _pattentions(model.blocks)
  sizes = {name: getattr(*place).keys[...].shape for name, place in found.items()}
  nothing = {name: jnp.zeros((*ids_BxT.shape, count)) for name, (_, count, _) in sizes.items()}
  ((layers, *_), *_) = sizes.values()
  (_, kept), _ = scan(model.blocks, one, (x, nothing), jnp.arange(layers))
  return kept


@functools.lru_cache(maxsize=4)  # A notebook asks again and again.
def compiled_sums(
  definition: Definition, mesh: Mesh
) -> Callable[[Params, jax.Array], dict[str, Sums]]:
  """`sums` from parameters and ids, for `jax.set_mesh(mesh)`; every host gets all of the result."""
  return jax.jit(
    lambda params, ids: sums(definition.bind(params), ids),
    out_shardings=sharding.replicated(mesh),
  )


@functools.lru_cache(maxsize=4)
def compiled_maps(
  definition: Definition, mesh: Mesh
) -> Callable[[Params, jax.Array, int], dict[str, jax.Array]]:
  """`maps` of the first row [T, N] from parameters, ids and layer, for `jax.set_mesh(mesh)`."""
  return jax.jit(
    lambda params, ids, layer: jax.tree.map(
      lambda map_BxTxN: map_BxTxN[0], maps(definition.bind(params), ids, layer)
    ),
    out_shardings=sharding.replicated(mesh),
  )


class _Watched:
  """A Pattention that shows its weights before it answers."""

  def __init__(self, pattention: Pattention, see: Callable[[jax.Array], None]):
    self._pattention, self._see = pattention, see

  def __call__(self, x: jax.Array, *out_heads: tuple[int, int]) -> jax.Array:
    self._see(self._pattention.weights(x).astype(jnp.float32))
    return self._pattention(x, *out_heads)  # XLA computes what both have in common once.


def _watched(block: Block, x_BxTxD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Run a block that nobody else has, as `scan` makes it.

  Returns:
    Its output, and the weights [B, T, N] of its Pattentions in the order in which it applies them.
  """
  weights: dict[str, jax.Array] = {}
  for name, (owner, attribute) in _pattentions(block).items():
    see = functools.partial(weights.__setitem__, name)
    setattr(owner, attribute, _Watched(getattr(owner, attribute), see))
  x_BxTxD, _, _ = block(x_BxTxD)
  return x_BxTxD, weights


def _pattentions(block: nnx.Module) -> dict[str, tuple[nnx.Module, str]]:
  """Return the owner and the attribute of each Pattention of a layer, or of stacked layers."""
  modules = dict(nnx.iter_modules(block))
  found = [path for path, module in modules.items() if isinstance(module, Pattention)]
  return {
    name: (modules[path[:-1]], path[-1]) for name, path in zip(_short(found), found, strict=True)
  }


def _short(modules: list[tuple[Any, ...]]) -> list[str]:
  """Return the last name of each module's path, or the whole path where another ends like it."""
  last = [path[-1] for path in modules]
  return [
    name if last.count(name) == 1 else '/'.join(path)
    for name, path in zip(last, modules, strict=True)
  ]
