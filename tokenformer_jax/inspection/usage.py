"""Measure how much each parameter token is used on a text.

At a position, a parameter token with the weight w adds w v to the output. Its **contribution** is
|w| ‖v‖₂, averaged over the positions of a text. Compared with the mean contribution of the
parameter tokens of its Pattention, a token is

  dead    if its key and its value are zero and the score function gives a score of 0 the weight 0:
          it adds nothing, and has no gradient, so it never will
  unused  if its contribution is less than 1/100 of the mean

New tokens, with a zero value, are unused but not dead: they learn.

Usage is not the importance that `grow shrink` uses (grow/importance.py). |⟨v, ∂loss/∂v⟩| is the
change of the loss without the token, to first order; it needs targets and a backward pass. Usage
is the size of what a token adds to the output. Other tokens may cancel this, or the loss may not
depend on it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tokenformer_jax.inspection.weights import TokenArrays, compiled, pattentions, sums
from tokenformer_jax.model.params import Definition, Params, lookup
from tokenformer_jax.parallel import rules, sharding

UNUSED = 1e-2  # of the mean contribution

_WEIGHTS_AT_ONCE = 2**24  # on a device: 64 MiB in float32


@dataclasses.dataclass(frozen=True, eq=False)
class Usage:
  """The usage of the parameter tokens of one Pattention; arrays are [N]."""

  positions: int  # of the text
  mean: np.ndarray  # of |w|
  value_norms: np.ndarray  # ‖v‖₂
  dead: np.ndarray  # whether a token is dead: see this module

  @property
  def contribution(self) -> np.ndarray:
    """Return the mean of |w| ‖v‖₂."""
    return self.mean * self.value_norms

  @property
  def share(self) -> np.ndarray:
    """Return each token's share of the total contribution; the shares add up to 1, or to 0."""
    return self.contribution / (self.contribution.sum() or 1)

  @property
  def unused(self) -> np.ndarray:
    """Return which tokens are unused: see this module."""
    return self.contribution <= UNUSED * self.contribution.mean()

  def tokens_for(self, fraction: float) -> int:
    """Return the least number of tokens that make this fraction of the contribution."""
    reached = np.cumsum(np.sort(self.share)[::-1])
    return min(int(np.sum(reached < fraction * reached[-1])) + 1, len(reached))


def measure(
  definition: Definition, params: Params, rows: np.ndarray, mesh: Mesh
) -> dict[int, dict[str, Usage]]:
  """Measure usage on a text, a few rows at a time.

  The definition comes from `define_lm` and sets the dtype, the parameters may be anywhere on the
  mesh, and `rows` are token ids [R, T]; −1 is padding at the end of a row. The result is by layer
  number, from 0 on, and by name of the Pattention.
  """
  layers = pattentions(definition)
  most = max(tokens.tokens for layer in layers for tokens in layer.values())
  at_once = max(1, _WEIGHTS_AT_ONCE // (rows.shape[1] * most))
  run = compiled(sums, definition, mesh)
  stacked = {
    (tokens.layer.stack, name): tokens for layer in layers for name, tokens in layer.items()
  }
  compute = jax.jit(
    lambda params: {key: _norms_and_zeros(params, tokens) for key, tokens in stacked.items()},
    out_shardings=sharding.replicated(mesh),
  )
  with jax.set_mesh(mesh):
    measured = [
      jax.tree.map(lambda sums: np.asarray(sums, np.float64), run(params, batch))
      for batch in batches(rows, at_once, mesh)
    ]
    total = jax.tree.map(lambda *sums: sum(sums), *measured)
    norms_and_zeros = jax.device_get(compute(params))
  positions = int(np.sum(rows >= 0))

  def usage(name: str, tokens: TokenArrays) -> Usage:
    stack, row, run = tokens.layer
    norms, zeros = (array[row] for array in norms_and_zeros[stack, name])
    return Usage(
      positions=positions,
      mean=total[stack][name][run] / positions,
      value_norms=np.asarray(norms, np.float64),
      dead=zeros & np.repeat(tokens.zero_at_zero, tokens.groups),
    )

  return {
    number: {name: usage(name, tokens) for name, tokens in layer.items()}
    for number, layer in enumerate(layers)
  }


def _norms_and_zeros(params: Params, tokens: TokenArrays) -> tuple[jax.Array, jax.Array]:
  """Return ‖v‖₂ of every token of a stack, and whether its key and its value are zero, [L, N].

  The keys of hidden units of an MLP are columns.
  """
  keys, values = lookup(params, tokens.keys), lookup(params, tokens.values)
  has_key = jnp.any(keys, axis=-2 if tokens.is_mlp else -1)
  return jnp.linalg.norm(values, axis=-1), ~has_key & ~jnp.any(values, axis=-1)


def batches(rows: np.ndarray, at_once: int, mesh: Mesh) -> list[jax.Array]:
  """Split token ids [R, T] into batches of equal size on the mesh; padding fills the last one.

  A device gets at most `at_once` rows of a batch.
  """
  shards = rules.shard_count('batch', mesh)
  size = min(at_once, -(-len(rows) // shards)) * shards
  padded = np.full((-(-len(rows) // size) * size, rows.shape[1]), -1, np.int32)
  padded[: len(rows)] = rows
  placed = sharding.batch_sharding(mesh)
  return [jax.device_put(batch, placed) for batch in np.split(padded, len(padded) // size)]


def as_rows(ids: np.ndarray, length: int) -> np.ndarray:
  """Cut token ids [P] into rows [R, T ≤ length]; padding fills the last one."""
  length = min(length, len(ids))
  rows = np.full((-(-len(ids) // length), length), -1, np.int32)
  rows.ravel()[: len(ids)] = ids
  return rows
