"""Tiny models with experts, and growth by experts.

As a script: print for each score function and dtype whether growth keeps all bits of the logits.
"""

import dataclasses
from typing import Any

import numpy as np
from growing import grow_params, logits, params_of
from tiny import tiny_model

from tokenformer_jax.config import BiasBalanceConfig, GrowConfig, ModelConfig, RouterConfig
from tokenformer_jax.grow.steps import experts

PLAIN = GrowConfig()


def with_experts(
  model: ModelConfig, count: int, tokens: int | None = None, top_k: int | None = None
) -> ModelConfig:
  """The model that `grow --experts=count` makes."""
  counts = experts.named_counts(model, count, 'here')
  return experts.wanted(model, experts.Wanted(counts, tokens, top_k))


def with_ffn(model: ModelConfig, **changes: Any) -> ModelConfig:
  """The model with other keys of `model.layer.ffn`."""
  ffn = dataclasses.replace(model.layer.ffn, **changes)
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))


def by_bias(model: ModelConfig, top_k: int = 1) -> ModelConfig:
  """The model with sigmoid gates and a bias for the choice."""
  return with_ffn(model, router=RouterConfig('sigmoid', top_k), balance=BiasBalanceConfig())


def sparse(score: str = 'l2_norm_gelu', **changes: Any) -> ModelConfig:
  """A Pattention of 48 tokens for all, with four experts of 16 tokens each."""
  return with_experts(tiny_model(score=score, **changes), 4, 16)


def upcycled(**changes: Any) -> ModelConfig:
  """Four experts that were one MLP, of which a token has two."""
  return with_experts(tiny_model(dense=True, **changes), 4)


if __name__ == '__main__':
  small, large = tiny_model(), sparse()
  old = params_of(small)
  new = grow_params(old, small, large, PLAIN)
  for dtype in ('float32', 'bfloat16'):
    print(np.array_equal(logits(small, old, dtype), logits(large, new, dtype)))
