"""An architecture that no config can say yet: layers of two kinds with different caches.

`local` is the block of every model, with a window; `linear` is linear attention without a
feed-forward layer, which decodes with a recurrent state, draws noise, and says how large its output
is.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from tiny import tiny_model

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model import pattern
from tokenformer_jax.model.blocks import Block
from tokenformer_jax.model.compute import Compute
from tokenformer_jax.model.layers import LayerNorm, projection
from tokenformer_jax.model.trunk import FROM_START, NO_INPUTS, Architecture, Aux, Context, Inputs
from tokenformer_jax.parallel.sharding import constrain

PATTERN = '(local linear)*2 linear'
WINDOW = 5
AUX_WEIGHT = 0.1
# No other test has a model with this ε, so none finds this architecture under its config.
MODEL = tiny_model(layers=5, tied_head=False, norm_epsilon=3e-5)


class State(NamedTuple):
  """Σ key ⊗ value over all slots so far, float32 [B, H, K, K]."""

  products: jax.Array


class Linear(nnx.Module):
  """x + LinearAttention(Norm(x)), with a factor 1 + noise if it is given a key."""

  def __init__(self, config: ModelConfig, *, compute: Compute, rngs: nnx.Rngs):
    make = functools.partial(projection, config, compute=compute, rngs=rngs)
    self.norm = LayerNorm(config.width, 'plain', epsilon=config.norm_epsilon, rngs=rngs)
    self.query, self.key, self.value = make('qkv'), make('qkv'), make('qkv')
    self.proj = make('proj')
    self.heads = (config.heads, config.width // config.heads)

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> State:
    del length, dtype
    heads, width = self.heads
    return State(jnp.zeros((batch, heads, width, width)))

  def cache_axes(self) -> State:
    return State(('batch', 'heads', None, None))

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: State | None = None,
    inputs: Inputs = NO_INPUTS,
  ) -> tuple[jax.Array, State | None, Aux]:
    normed_BxTxD, length = self.norm(x_BxTxD), x_BxTxD.shape[1]
    query, key, value = (p(normed_BxTxD, self.heads) for p in (self.query, self.key, self.value))
    is_token_BxT = context.positions(length) >= 0
    key = key * is_token_BxT[..., None, None]
    scores_BxHxTxS = jnp.einsum('BTHK,BSHK->BHTS', query, key) * jnp.tri(length)[None, None]
    added = jnp.einsum('BHTS,BSHK->BTHK', scores_BxHxTxS, value)
    if cache is not None:
      added = added + jnp.einsum('BTHK,BHKL->BTHL', query, cache.products)
      cache = State(cache.products + jnp.einsum('BTHK,BTHL->BHKL', key, value))
    added_BxTxD = self.proj(constrain(added, 'batch', None, 'heads', None))
    if inputs.key is not None:
      added_BxTxD = added_BxTxD * (1 + jax.random.normal(inputs.key))
    size = jnp.mean(jnp.square(added_BxTxD.astype(jnp.float32)))
    return x_BxTxD + added_BxTxD, cache, Aux(AUX_WEIGHT * size, {'linear/size': size})


def architecture(config: ModelConfig, *, causal: bool = True) -> Architecture:
  """Takes the place of `blocks.architecture`."""
  local = dataclasses.replace(config, window=WINDOW)
  makers = {
    'local': functools.partial(Block, local, causal=causal),
    'linear': functools.partial(Linear, config),
  }
  return Architecture(pattern.parse(PATTERN, tuple(makers), 'the pattern'), makers)
