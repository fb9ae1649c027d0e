"""A mixer that the package does not have, and an architecture of two kinds of layers with it.

`recurrent` is linear attention without feature maps or a normaliser: it decodes with a recurrent
state, draws noise, and says how large its output is. Everything that the package knows of it is its
name, in `config.MIXERS` and `blocks.MIXERS`. The architecture has it in turn with softmax attention
in a window.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny import tiny_model

from tokenformer_jax import config
from tokenformer_jax.config import ModelConfig, PattentionConfig
from tokenformer_jax.config.model import Layers
from tokenformer_jax.config.pattention import Projection
from tokenformer_jax.config.section import Float, Int, key, section
from tokenformer_jax.model import blocks
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import FROM_START, NO_INPUTS, Aux, Context, LayerInputs
from tokenformer_jax.model.projections import projection
from tokenformer_jax.parallel.sharding import constrain


@section
class RecurrentConfig:
  """Linear attention, the sum of its heads' mean squares in the loss."""

  kind: ClassVar[str] = 'recurrent'

  heads: Int = key(4, 'H, heads of the attention', above=0)
  size_weight: Float = key(0.1, 'of the mean square of the output, in the loss', least=0)
  qkv: Projection = key(PattentionConfig(), 'query, key and value, each')
  proj: Projection = key(PattentionConfig(), "the attention's output")


class State(NamedTuple):
  """Σ key ⊗ value over all slots so far, float32 [B, H, K, K]."""

  products: jax.Array


class Recurrent(nnx.Module):
  """Causal linear attention, with a factor 1 + noise if it is given a key."""

  def __init__(
    self,
    config: RecurrentConfig,
    model: ModelConfig,
    *,
    causal: bool,
    execution: Execution,
    rngs: nnx.Rngs,
  ):
    assert causal, 'this mixer has no other mask'
    make = functools.partial(projection, model=model, execution=execution, rngs=rngs)
    self.query, self.key, self.value = (make(config.qkv, axes=('width', 'heads')) for _ in 'qkv')
    self.proj = make(config.proj, axes=('heads', 'width'))
    self.heads, self.weight = (config.heads, model.width // config.heads), config.size_weight

  def init_cache(self, batch: int, length: int, dtype: jnp.dtype) -> State:
    del length, dtype
    heads, width = self.heads
    return State(jnp.zeros((batch, heads, width, width)))

  def cache_axes(self) -> State:
    return State(('batch', 'heads', None, None))

  def length_flops(self, length: int) -> float:
    heads, width = self.heads
    return 4 * heads * width * (length + 1) / 2

  def __call__(
    self,
    x_BxTxD: jax.Array,
    context: Context = FROM_START,
    cache: State | None = None,
    inputs: LayerInputs = NO_INPUTS,
  ) -> tuple[jax.Array, State | None, Aux]:
    length = x_BxTxD.shape[1]
    query, key, value = (p(x_BxTxD, self.heads) for p in (self.query, self.key, self.value))
    is_token_BxT = context.positions(length) >= 0
    key = key * is_token_BxT[..., None, None]
    scores_BxHxTxS = jnp.einsum('BTHK,BSHK->BHTS', query, key) * jnp.tri(length)[None, None]
    added = jnp.einsum('BHTS,BSHK->BTHK', scores_BxHxTxS.astype(value.dtype), value)
    if cache is not None:
      added = added + jnp.einsum('BTHK,BHKL->BTHL', query, cache.products)
      cache = State(cache.products + jnp.einsum('BTHK,BTHL->BHKL', key, value))
    added_BxTxD = self.proj(constrain(added, 'batch', None, 'heads', None))
    if inputs.key is not None:
      added_BxTxD = added_BxTxD * (1 + jax.random.normal(inputs.key))
    size = jnp.sum(jnp.mean(jnp.square(added_BxTxD.astype(jnp.float32)), axis=-1))
    return added_BxTxD, cache, Aux({'tokens': self.weight * size}, {'recurrent/size': size})


PATTERN = '(local recurrent)*2 recurrent'
WINDOW = 5


def model() -> ModelConfig:
  """Return the architecture; every size is filled in."""
  base = tiny_model(tied_head=False)
  layer = base.layer
  local = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=WINDOW))
  mixer = RecurrentConfig(qkv=layer.mixer.qkv, proj=layer.mixer.proj)
  recurrent = dataclasses.replace(layer, mixer=mixer, ffn=config.NoFeedForwardConfig())
  variants = Layers({'local': local, 'recurrent': recurrent})
  return dataclasses.replace(base, pattern=PATTERN, variants=variants)


# The same as changes of a config.
CHANGES = {
  'model.pattern': PATTERN,
  'model.variants.local': {'mixer': {'window': WINDOW}},
  'model.variants.recurrent': {'mixer': {'kind': 'recurrent'}, 'ffn': {'kind': 'none'}},
  'model.tied_head': False,
}


@contextlib.contextmanager
def named() -> Iterator[None]:
  """Name the mixer, all that a config needs to have it."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(config.MIXERS, 'recurrent', RecurrentConfig)
    patch.setitem(blocks.MIXERS, 'recurrent', Recurrent)
    yield


with named():
  MODEL = model()
