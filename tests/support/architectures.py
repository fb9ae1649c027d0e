"""One tiny model of each architecture that a config can say, for tests that hold for all."""

import dataclasses
from typing import Any

from mixtures import mixture
from tiny import gated_model, linear, tiny_model, with_mixer

from tokenformer_jax.config import (
  DenseConfig,
  LayerConfig,
  Layers,
  Llama3ScalingConfig,
  MLPConfig,
  ModelConfig,
  NoPositionsConfig,
  NoProjectionConfig,
  ParallelConfig,
  PattentionConfig,
  PositionScaleConfig,
  PostNormConfig,
  RotaryConfig,
  SandwichConfig,
  SkiplessConfig,
)


def _with_layer(model: ModelConfig, **changes: Any) -> ModelConfig:
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, **changes))


def simplified(wiring: Any, *, dense: bool, norm: str = 'rms', window: int = 0) -> ModelConfig:
  """Return Simplified Transformer Blocks: the first of three layers has values."""
  model = tiny_model(dense=dense, bias=dense, norm=norm, tied_head=False, window=window)
  nothing = NoProjectionConfig()
  model = with_mixer(model, shaped=True, value=nothing, proj=nothing)
  model = _with_layer(model, wiring=wiring)
  value = DenseConfig() if dense else PattentionConfig(56, 56)
  mixer = dataclasses.replace(model.layer.mixer, value=value, value_skip=True)
  first: LayerConfig = dataclasses.replace(model.layer, mixer=mixer)
  if dense:
    mlp = MLPConfig(width=48, activation='relu')
    model, first = _with_layer(model, ffn=mlp), dataclasses.replace(first, ffn=mlp)
  return dataclasses.replace(model, pattern='first layer*2', variants=Layers({'first': first}))


def hybrid(pattern: str = 'local*3 layer', *, window: int = 5) -> ModelConfig:
  """Return windows with rotary positions, and full attention without positions."""
  model = tiny_model(tied_head=False)
  local = dataclasses.replace(model.layer.mixer, window=window, positions=RotaryConfig(1.0))
  variants = Layers({'local': dataclasses.replace(model.layer, mixer=local)})
  scale = PositionScaleConfig(length=8)
  model = with_mixer(model, positions=NoPositionsConfig(), length_scale=scale)
  return dataclasses.replace(model, pattern=pattern, variants=variants)


def post_norm() -> ModelConfig:
  """Return a Transformer with norms after its parts."""
  model = tiny_model(dense=True, norm='rms_plain', tied_head=False, final_norm='none')
  return _with_layer(model, wiring=PostNormConfig())


def few_key_heads() -> ModelConfig:
  """Return what OLMo 2, Llama 3.1, Gemma and Qwen2-MoE have together, in wide heads."""
  model = mixture('fine-grained', dense=True, tied_head=False, norm='rms_offset')
  model = _with_layer(model, ffn=dataclasses.replace(model.layer.ffn, shared_gate=True))
  slowed = Llama3ScalingConfig(8.0, length=12)
  model = with_mixer(
    model,
    kv_heads=2,
    head_width=12,
    qk_norm='rms_joint',
    positions=RotaryConfig(1.0, scaling=slowed),
  )
  return dataclasses.replace(model, embedding_scale=True)


MODELS = {
  'skipless': simplified(SkiplessConfig(), dense=True),
  'parallel': simplified(ParallelConfig(), dense=True),
  'parallel, window': simplified(ParallelConfig(), dense=True, window=7),
  'skipless, tokens': simplified(SkiplessConfig(), dense=False),
  'parallel, tokens, no norm': simplified(ParallelConfig(), dense=False, norm='none'),
  'parallel with skip': _with_layer(
    tiny_model(tied_head=False), wiring=ParallelConfig(gains=False, skip=True, two_norms=True)
  ),
  'skips and norms': _with_layer(
    with_mixer(tiny_model(tied_head=False), shaped=True, value_skip=True),
    ffn_norm='rms',
  ),
  'hybrid': hybrid(),
  'local and full': hybrid('(local layer)*2'),
  'clipped': with_mixer(tiny_model(tied_head=False), positions=RotaryConfig(1.0, clip=6)),
  'interleaved': with_mixer(
    tiny_model(tied_head=False), positions=RotaryConfig(1.0, layout='interleaved')
  ),
  'post norm': post_norm(),
  'gated units': gated_model(tied_head=False),
  'linear': linear(tiny_model(tied_head=False)),
  'experts': mixture('fine-grained', dense=True, tied_head=False),
  'experts of tokens': mixture('sparse', tied_head=False),
  'few key heads': few_key_heads(),
  'sandwich': _with_layer(
    with_mixer(
      tiny_model(tied_head=False, norm='rms_offset', window=5, logit_cap=2.0),
      qk_norm='rms_offset',
      score_cap=1.5,
      score_width=3.0,
    ),
    wiring=SandwichConfig(),
  ),
}
