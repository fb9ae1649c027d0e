"""Models to look into, and what their weights are by numpy, without the package's own layers."""

import functools

import jax
import numpy as np
from scipy.special import erf
from tiny import normal_params, tiny_model

from tokenformer_jax.config import ModelConfig, pattentions
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params

# The Pattentions of a layer as its forward pass meets them.
KINDS = ('query', 'key', 'value', 'proj', 'ffn')
MODEL = tiny_model(position_embedding='learned', rotary=0)
IDS = np.random.default_rng(0).integers(0, 64, (8, 13), np.int32)


@functools.cache
def params_of(model: ModelConfig = MODEL) -> Params:
  """Normal parameters, large enough that scores differ."""
  return normal_params(define_lm(model), 0.2)


def of_kind(blocks: Params, kind: str) -> Params:
  """The keys and values of one kind, in the parameters of the blocks."""
  return blocks[kind] if kind == 'ffn' else blocks['attention'][kind]


def changed(params: Params, kind: str, **arrays: jax.Array) -> Params:
  """The parameters with other keys or values [L, N, D] of one kind."""
  blocks = params['blocks']
  tokens = {**of_kind(blocks, kind), **arrays}
  if kind == 'ffn':
    return {**params, 'blocks': {**blocks, 'ffn': tokens}}
  attention = {**blocks['attention'], kind: tokens}
  return {**params, 'blocks': {**blocks, 'attention': attention}}


@functools.cache
def reference_maps() -> list[dict[str, np.ndarray]]:
  """The weights [B, T, N] of `MODEL` for `IDS`, by layer and kind, in float64."""
  params = jax.tree.map(lambda p: np.asarray(p, np.float64), params_of())
  length, heads = IDS.shape[1], MODEL.layer.mixer.heads
  head = MODEL.width // heads
  x = params['embedding'][IDS] + params['positions'][:length]
  layers = []
  for layer in range(MODEL.depth):
    found = {}

    def apply(kind, x, layer=layer, found=found):
      tokens = of_kind(params['blocks'], kind)
      scores = x @ tokens['keys'][layer].T
      config_kind = 'qkv' if kind in ('query', 'key', 'value') else kind
      tau = np.sqrt(pattentions(MODEL)[config_kind].reference)
      scores *= tau / np.linalg.norm(scores, axis=-1, keepdims=True)
      found[kind] = scores * (1 + erf(scores / np.sqrt(2))) / 2
      return found[kind] @ tokens['values'][layer]

    normed = _norm(x)
    query, key, value = (
      apply(kind, normed).reshape(*IDS.shape, heads, head) for kind in ('query', 'key', 'value')
    )
    scores = np.einsum('BTHK,BSHK->BHTS', query, key) / np.sqrt(head)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    attended = np.einsum('BHTS,BSHK->BTHK', scores, value)
    x = x + apply('proj', attended.reshape(x.shape))
    x = x + apply('ffn', _norm(x))
    layers.append({kind: found[kind] for kind in KINDS})
  return layers


def _norm(x: np.ndarray) -> np.ndarray:
  x = x - x.mean(axis=-1, keepdims=True)
  return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + MODEL.norm_epsilon)
