"""The gated attention unit: one head of attention with a gated output, and no feed-forward part.

It is the layer of FLASH (Hua et al. 2022, arXiv 2202.10447) as in GAU-alpha (Su 2022,
kexue.fm/archives/9052).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from tokenformer_jax.config import GatedUnitConfig, ModelConfig, width_of_heads
from tokenformer_jax.model import cache as caches
from tokenformer_jax.model import kernels
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import EMPTY_AUX, FROM_START, NO_INPUTS, Aux, Context, LayerInputs
from tokenformer_jax.model.params import Role, param
from tokenformer_jax.model.projections import projection, split_output
from tokenformer_jax.model.token_attention import Cache, TokenAttention, make_positions
from tokenformer_jax.parallel.rules import shard_count
from tokenformer_jax.parallel.sharding import constrain


class ScaleOffset(nnx.Module):
  """γ ⊙ x + β for the last axis of x, or γ ⊙ x; computed in float32."""

  def __init__(self, width: int, *, offset: bool, rngs: nnx.Rngs):
    make = functools.partial(param, rngs, shape=(width,), axes=('head_width',))
    self.scale = make(nnx.initializers.ones, role=Role.GAIN)
    self.bias = make(nnx.initializers.zeros, role=Role.BIAS) if offset else None

  def __call__(self, x_BxTxS: jax.Array) -> jax.Array:
    """Apply the scale and the offset: [B, T, S] → [B, T, S]."""
    x = x_BxTxS.astype(jnp.float32) * self.scale[...][None, None]
    if self.bias is not None:
      x = x + self.bias[...][None, None]
    return x.astype(x_BxTxS.dtype)


def squared_relu(scores: jax.Array, seen: jax.Array | None) -> jax.Array:
  """Return relu(a)² / l, with l the number of keys that the query sees: a `kernels.Weigh`."""
  squares = jnp.square(jax.nn.relu(scores))
  if seen is None:
    return squares / scores.shape[-1]
  return jnp.where(seen, squares, 0) / jnp.maximum(jnp.sum(seen, axis=-1, keepdims=True), 1)


WEIGHTS = {'softmax': kernels.softmax, 'squared_relu': squared_relu}


class GatedUnit(nnx.Module):
  """(U ⊙ A V) W with U, V, Z = SiLU(x P) and attention A of queries and keys scaled from Z.

  U and V are e wide; Z, the queries γ_q ⊙ Z and the keys γ_k ⊙ Z are s wide.
  """

  def __init__(
    self,
    config: GatedUnitConfig,
    model: ModelConfig,
    *,
    causal: bool = True,
    execution: Execution,
    rngs: nnx.Rngs,
  ):
    self.width = config.width or 2 * model.width
    self.head_width = width_of_heads(config, model.width)
    make = functools.partial(projection, model=model, execution=execution, rngs=rngs)
    into = (model.width, 2 * self.width + self.head_width)
    self.uvq = make(config.uvq, axes=('width', 'hidden'), widths=into)
    self.out = make(config.out, axes=('hidden', 'width'), widths=(self.width, model.width))
    scale = functools.partial(ScaleOffset, self.head_width, offset=config.offset, rngs=rngs)
    self.query, self.key = scale(), scale()
    positions = make_positions(config, self.head_width, causal)
    self.attend = TokenAttention(positions, causal, config.window, WEIGHTS[config.normalise])

  def length_flops(self, length: int) -> float:
    """Count the FLOPs of scores and weighted sums for one of `length` positions.

    Each visible position costs 2 s for its score and 2 e for its value.
    """
    return 2 * (self.head_width + self.width) * self.attend.mean_seen(length)

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> Cache:
    """Return an empty cache for texts of up to `length` slots, or for the slots of the window."""
    return self.attend.init_cache(batch, 1, length, (self.head_width, self.width), dtype)

  def cache_axes(self) -> Cache:
    """Return the logical axes of the arrays of the cache."""
    return self.attend.cache(*self._pair_axes)

  @property
  def _pair_axes(self) -> caches.PairAxes:
    return ('batch', None, None, None), ('batch', None, None, self._row_split)

  @property
  def _split(self) -> str | None:
    """The logical axis of U and V, or None if the devices cannot split it evenly."""
    return 'hidden' if self.width % shard_count('hidden') == 0 else None

  @property
  def _row_split(self) -> str | None:
    """The logical axis of the values of whole rows."""
    return 'row_hidden' if self.width % shard_count('row_hidden') == 0 else self._split

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: Cache | None = None,
    inputs: LayerInputs = NO_INPUTS,
  ) -> tuple[jax.Array, Cache | None, Aux]:
    """Attend from the next T slots to all visible slots: see `Attention.__call__`."""
    del inputs
    widths = (self.width, self.width, self.head_width)
    gate, value, shared = map(jax.nn.silu, split_output(self.uvq, x_BxTxD, widths))
    gate = constrain(gate, 'batch', 'slots', self._split)
    value = constrain(value, 'batch', None, self._row_split)[:, :, None]
    # Every device computes all scores, which are narrow, and its shard of the wide values.
    shared = constrain(shared, 'batch', 'slots', None)
    query, key = (
      constrain(scale(shared)[:, :, None], 'batch', None, None, None)
      for scale in (self.query, self.key)
    )
    mixed, cache = self.attend(query, key, value, context, cache, self._pair_axes)
    gated = gate * constrain(mixed[:, :, 0], 'batch', 'slots', self._split)
    return self.out(gated), cache, EMPTY_AUX
