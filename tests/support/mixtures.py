"""Routed experts and models with them, small enough to be compiled in a second or two.

As a script: print for each dtype whether growth by experts keeps all bits of the logits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from growing import grow_params, logits, params_of
from tiny import normal_params, tiny_model

from tokenformer_jax.config import (
  BiasBalanceConfig,
  CapacityConfig,
  ExpertsConfig,
  GrowConfig,
  LMConfig,
  LossBalanceConfig,
  MLPConfig,
  ModelConfig,
  NoBalanceConfig,
  PattentionConfig,
  RouterConfig,
)
from tokenformer_jax.grow.steps import experts
from tokenformer_jax.model.execution import DEFAULT
from tokenformer_jax.model.feed_forward import feed_forward
from tokenformer_jax.model.layer import Counts
from tokenformer_jax.model.params import Definition, Params, define

SWIGLU = {'activation': 'silu', 'gated': True}
PLAIN = GrowConfig()
TOKENS = PattentionConfig(tokens=8, reference=8)
KINDS = {
  'switch': ExpertsConfig(
    count=8, expert=MLPConfig(16, activation='relu'), dispatch=CapacityConfig(1.0, 1.0, least=1)
  ),
  'fine-grained': ExpertsConfig(
    count=8,
    expert=MLPConfig(16, **SWIGLU),
    shared=MLPConfig(16, **SWIGLU),
    router=RouterConfig(top_k=3),
    balance=LossBalanceConfig(0.01, devices=4, device_weight=0.05),
  ),
  'sparse': ExpertsConfig(
    count=8,
    expert=TOKENS,
    shared=PattentionConfig(tokens=16, reference=16),
    router=RouterConfig('sigmoid', top_k=2),
  ),
}


def layer(config: ExpertsConfig, width: int = 16) -> Definition:
  """Return routed experts alone, as a feed-forward part."""
  model = LMConfig(width=width)
  return define(lambda rngs: feed_forward(config, model, execution=DEFAULT, rngs=rngs))


def unbalanced(**changes: Any) -> ExpertsConfig:
  """Return four MLPs as experts without a loss of the router's own."""
  values = {'count': 4, 'expert': MLPConfig(8), 'balance': NoBalanceConfig(), **changes}
  return ExpertsConfig(**values)


def large(definition: Definition, seed: int = 0) -> Params:
  """Return parameters so large that every choice of an expert matters."""
  return normal_params(definition, seed=seed)


def of_rows(rows: int, length: int) -> Counts:
  """Return the counts of a batch without padding."""
  return Counts(*map(jnp.int32, (rows * length, rows * length, rows)))


def inputs(*shape: int, seed: int = 1) -> jax.Array:
  """Return random numbers of a shape, float32."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mixture(kind: str | ExpertsConfig = 'fine-grained', **changes: Any) -> ModelConfig:
  """Return `tiny_model` with routed experts in every layer."""
  model = tiny_model(**changes)
  ffn = KINDS[kind] if isinstance(kind, str) else kind
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))


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
