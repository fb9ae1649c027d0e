"""The weights Θ(x Kᵀ) of a model's Pattentions, taken from its own forward pass.

Each is an attention map: of the tokens of the text over the parameter tokens. Both functions run
inside a jit, on any mesh and in any dtype, and neither keeps the weights of more than one layer.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from tokenformer_jax import sharding
from tokenformer_jax.blocks import Block
from tokenformer_jax.lm import LM
from tokenformer_jax.params import Definition, Params
from tokenformer_jax.pattention import Pattention
from tokenformer_jax.stack import scan

# The Pattentions of a block; the first three have the config's kind `qkv`.
KINDS = ('query', 'key', 'value', 'proj', 'ffn')


class Sums(NamedTuple):
  """Of the absolute weight |Θ| of every parameter token over positions, float32 [L, N]."""

  total: jax.Array
  squares: jax.Array
  largest: jax.Array


def of_kind(blocks: Any, kind: str) -> Any:
  """The Pattention of a kind in a block, or in the nested dict of its parameters."""
  pick = dict.__getitem__ if isinstance(blocks, dict) else getattr
  return pick(blocks if kind == 'ffn' else pick(blocks, 'attention'), kind)


def sums(model: LM, ids_BxT: jax.Array) -> dict[str, Sums]:
  """Sums over all positions of a batch, reduced layer by layer as the model runs.

  Args:
    model: bound (`Definition.bind`), with projection='pattention'.
    ids_BxT: token ids; an id of −1 is padding at the end of a row, and is not counted.

  Returns:
    By kind: sums of every layer and parameter token.
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
  """The weights of one layer, by kind: float32 [B, T, N].

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
  counts = {kind: of_kind(model.blocks, kind).keys[...].shape[1] for kind in KINDS}
  nothing = {kind: jnp.zeros((*ids_BxT.shape, count)) for kind, count in counts.items()}
  layers = model.blocks.ffn.keys[...].shape[0]
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
  """Runs a block that nobody else has, as `scan` makes it, and returns its weights [B, T, N]."""
  weights: dict[str, jax.Array] = {}
  for kind in KINDS:
    owner: nnx.Module = block if kind == 'ffn' else block.attention
    see = functools.partial(weights.__setitem__, kind)
    setattr(owner, kind, _Watched(getattr(owner, kind), see))
  x_BxTxD, _ = block(x_BxTxD)
  return x_BxTxD, weights
