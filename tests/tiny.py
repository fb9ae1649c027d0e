"""Models small enough to be compiled in a second."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.config import ModelConfig, TokenCounts
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params


def tiny_model(**changes: Any) -> ModelConfig:
  """Two layers of width 32 over 64 tokens; every size is filled in and divides by 4.

  The numbers of parameter tokens differ from each other and from every other size, so that no axis
  passes for another. The reference counts are the numbers of parameter tokens unless given.
  """
  counts = changes.get('param_tokens', TokenCounts(qkv=24, proj=40, ffn=48))
  sizes = {
    'layers': 2,
    'width': 32,
    'heads': 4,
    'vocab_size': 64,
    'param_tokens': counts,
    'reference_tokens': counts,
    'rotary_fraction': 0.5,
    'max_length': 128,
  }
  return ModelConfig(**{**sizes, **changes})


def tiny_vit(**changes: Any) -> ModelConfig:
  """Two layers of width 32 for grey images of 8 × 8 pixels, four patches, and ten classes."""
  sizes = {
    'kind': 'vit',
    'positions': 'sincos',
    'patch': 4,
    'channels': 1,
    'classes': 10,
    'tied_head': False,
    'vocab_size': 0,
    'rotary_fraction': 0.25,
    'max_length': 4 if changes.get('positions') == 'learned' else 0,
  }
  return tiny_model(**{**sizes, **changes})


@functools.cache
def large_params(model: ModelConfig) -> Params:
  """Return parameters of a language model, so large that every part and earlier token matters."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape) * p.shape[-1] ** -0.5, p.dtype),
    define_lm(model).abstract,
  )
