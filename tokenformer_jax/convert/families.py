"""All families of models in the hub's layout, and the family of a model."""

import dataclasses
from typing import Any

from tokenformer_jax.config import (
  DenseConfig,
  ExpertsConfig,
  LayerConfig,
  LMConfig,
  MLPConfig,
  ModelConfig,
  ParallelConfig,
  RotaryConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.feed_forward import (
  BiasBalanceConfig,
  CapacityConfig,
  GroupedConfig,
  LossBalanceConfig,
)
from tokenformer_jax.config.mixers import width_of_heads
from tokenformer_jax.config.model import BASE, Layers
from tokenformer_jax.convert.family import SCALINGS, Family
from tokenformer_jax.convert.gpt_families import GPT_FAMILIES
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.llama_families import LLAMA_FAMILIES
from tokenformer_jax.errors import UserError

FAMILIES = {family.kind: family for family in (*LLAMA_FAMILIES, *GPT_FAMILIES)}
_KINDS = ('full_attention', 'sliding_attention')  # of layers without and with a window
# vLLM's Gemmas know the tanh form by this name alone.
_ACTIVATIONS = {'gelu': 'gelu', 'gelu_tanh': 'gelu_pytorch_tanh', 'relu': 'relu', 'silu': 'silu'}


def match(model: ModelConfig, first: str = '') -> tuple[Family, dict[str, Any]] | None:
  """Return the first family that a model is exactly of and the keys of its config.json, or None.

  It is exactly of a family if the keys that the family reads make the same model. Several families
  may have it; the one of the kind `first` is tried before the others.
  """
  values = _all_keys(model)
  for family in sorted(FAMILIES.values(), key=lambda family: family.kind != first):
    keys = Keys(values, 'the model', family.defaults)
    try:
      same = family.to_model(keys)
    except UserError:  # It has sizes that the family cannot have.
      continue
    if is_same(same, model):
      kind = {'architectures': [family.architecture], 'model_type': family.kind}
      return family, {**kind, **{k: v for k, v in values.items() if k in keys.read}}
  return None


def is_same(one: ModelConfig, other: ModelConfig) -> bool:
  """Return whether two models compute the same, whatever the names of their layers."""
  return _computed(one) == _computed(other)


def _computed(model: ModelConfig) -> tuple[ModelConfig, list[LayerConfig]]:
  """Return what decides whether models are equal, whatever the names of their layers."""
  plain = without_training(model)
  unnamed = dataclasses.replace(plain, pattern=BASE, layer=LayerConfig(), variants=Layers())
  return unnamed, plain.in_order


def without_training(model: ModelConfig) -> ModelConfig:
  """Clear the keys that act in training or on several devices only; the hub has no use for them."""

  def plain(name: str, layer: LayerConfig) -> LayerConfig:
    del name
    if not isinstance(ffn := layer.ffn, ExpertsConfig):
      return layer
    router = dataclasses.replace(ffn.router, jitter=0.0, z_loss=0.0)
    balance = BiasBalanceConfig() if ffn.balance.kind == 'bias' else LossBalanceConfig()
    how = ffn.dispatch
    dispatch = GroupedConfig()
    if isinstance(how, CapacityConfig):
      dispatch = CapacityConfig(eval_factor=how.eval_factor, least=how.least)
    ffn = dataclasses.replace(ffn, router=router, balance=balance, dispatch=dispatch)
    return dataclasses.replace(layer, ffn=ffn)

  return model.map_layers(plain)


def _all_keys(model: ModelConfig) -> dict[str, Any]:
  """Return the keys of all families for a model; empty if it is of none."""
  layers = model.in_order
  mixer, ffn = layers[0].mixer, layers[0].ffn
  mlp = ffn.expert if isinstance(ffn, ExpertsConfig) else ffn
  if not (
    isinstance(model, LMConfig)
    and isinstance(mixer, SoftmaxConfig)
    and isinstance(mixer.qkv, DenseConfig)
    and isinstance(mlp, MLPConfig)
  ):
    return {}
  windows = [getattr(layer.mixer, 'window', 0) for layer in layers]
  kinds = [_KINDS[bool(window)] for window in windows]
  values = {
    'vocab_size': model.vocab_size,
    'hidden_size': model.width,
    'intermediate_size': mlp.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': mixer.heads,
    'num_key_value_heads': mixer.key_heads,
    'head_dim': width_of_heads(mixer, model.width),
    'max_position_embeddings': model.max_length,
    'hidden_act': _ACTIVATIONS[mlp.activation],
    'hidden_activation': _ACTIVATIONS[mlp.activation],
    'rms_norm_eps': model.norm_epsilon,
    'layer_norm_eps': model.norm_epsilon,
    'tie_word_embeddings': model.tied_head,
    'attention_bias': mixer.qkv.bias,
    'qkv_bias': mixer.qkv.bias,
    'mlp_bias': mlp.bias,
    'sliding_window': max(windows) or None,
    'use_sliding_window': any(windows),
    'layer_types': kinds,
    'query_pre_attn_scalar': int(mixer.score_width) or width_of_heads(mixer, model.width),
    'attn_logit_softcapping': mixer.score_cap or None,
    'final_logit_softcapping': model.logit_cap or None,
    'use_parallel_residual': isinstance(layers[0].wiring, ParallelConfig),
    # GPT-2 has names of its own.
    'n_embd': model.width,
    'n_inner': mlp.width,
    'n_layer': model.depth,
    'n_head': mixer.heads,
    'n_positions': model.max_length,
    'activation_function': _ACTIVATIONS[mlp.activation].replace('gelu_pytorch_tanh', 'gelu_new'),
    'layer_norm_epsilon': model.norm_epsilon,
  }
  positions = [getattr(layer.mixer, 'positions', None) for layer in layers]
  rotations = [own for own in positions if isinstance(own, RotaryConfig)]
  values['no_rope_layers'] = [int(own in rotations) for own in positions]
  if rotations:
    values |= _rotary_keys(rotations[0])
  if mixer.qk_norm == 'rms_offset' and len(rotations) == len(layers):  # a table each, in Gemma 3
    by_kind = dict(zip(kinds, rotations, strict=True))
    full, local = (by_kind.get(kind, rotations[0]) for kind in _KINDS)
    tables = {kind: _rotary_keys(own)['rope_parameters'] for kind, own in by_kind.items()}
    values |= {**_rotary_keys(full), 'rope_local_base_freq': local.base, 'rope_parameters': tables}
  if isinstance(ffn, ExpertsConfig):
    values |= {
      'moe_intermediate_size': mlp.width,
      'shared_expert_intermediate_size': getattr(ffn.shared, 'width', None),
      'num_experts': ffn.count,
      'num_local_experts': ffn.count,
      'num_experts_per_tok': ffn.router.top_k,
      'norm_topk_prob': ffn.router.renormalize,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
    }
  return values


def _rotary_keys(rotary: RotaryConfig) -> dict[str, Any]:
  """Return the keys of a rotation, in the newer and the older form."""
  kind = rotary.scaling.kind
  _, names = SCALINGS.get(kind, (None, {}))
  given = {name: getattr(rotary.scaling, field) for field, name in names.items()}
  table = {'rope_type': kind if given else 'default', **{k: v for k, v in given.items() if v}}
  return {
    'rotary_pct': rotary.fraction,
    'rotary_emb_base': rotary.base,
    'rope_theta': rotary.base,
    'rope_scaling': table if given else None,
    'rope_parameters': {'rope_theta': rotary.base, **table},
    **({'partial_rotary_factor': rotary.fraction} if rotary.fraction != 1 else {}),
  }
