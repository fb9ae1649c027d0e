"""Llama and its variants: Mistral, Qwen, SmolLM3, Phi-3, OLMo 2, Gemma and mixtures."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tokenformer_jax.config import (
  DenseConfig,
  ExpertsConfig,
  LayerConfig,
  LMConfig,
  MLPConfig,
  NoPositionsConfig,
  RotaryConfig,
  RouterConfig,
  SandwichConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.layer import Norm
from tokenformer_jax.config.mixers import width_of_heads
from tokenformer_jax.config.model import BASE
from tokenformer_jax.convert.family import (
  ACTIVATIONS,
  Family,
  check_heads,
  check_rotated,
  linear,
  norm,
  rotary,
  rotary_by_kind,
  with_kinds,
)
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.tensor_layout import Rule

_COUNTS = ('num_experts', 'num_local_experts')  # transformers has both for some families
_WINDOWED = 'local'  # the variant with a window, in models that have layers without
_UNROTATED = 'unrotated'  # the variant without positions, in models that have layers with them


def _decoder(
  keys: Keys,
  ffn: MLPConfig | ExpertsConfig,
  *,
  norm: Norm = 'rms',
  positions: RotaryConfig | None = None,
  qkv_bias: bool = False,
  proj_bias: bool = False,
  tied: bool = False,
  **mixer: Any,
) -> LMConfig:
  """Return a model of equal layers, whose sizes all families of the Llama kind name alike.

  `tied` is for files that do not say it, and `mixer` has other keys of the attention.
  """
  heads, width = keys.whole('num_attention_heads'), keys.whole('hidden_size')
  kv_heads = keys.whole('num_key_value_heads', heads)
  if heads % kv_heads:
    raise keys.refusal('num_key_value_heads', f'a divisor of the {heads} heads')
  if not keys.get('head_dim'):
    check_heads(keys, 'num_attention_heads', width, heads)
  head_width = keys.whole('head_dim', width // heads)
  attention = SoftmaxConfig(
    heads=heads,
    kv_heads=0 if kv_heads == heads else kv_heads,
    head_width=0 if head_width * heads == width else head_width,
    positions=positions or rotary(keys),
    qkv=DenseConfig(bias=qkv_bias),
    proj=DenseConfig(bias=proj_bias),
    **mixer,
  )
  return LMConfig(
    pattern=f'layer*{keys.whole("num_hidden_layers")}',
    width=width,
    layer=LayerConfig(mixer=attention, ffn=ffn, norm=norm),
    vocab_size=keys.whole('vocab_size'),
    norm_epsilon=keys.number('rms_norm_eps', 1e-6),
    final_norm=norm,
    max_length=keys.whole('max_position_embeddings', 2048),
    tied_head=keys.flag('tie_word_embeddings', tied),
  )


def _gated(keys: Keys, width: str = 'intermediate_size', *, bias: bool = False) -> MLPConfig:
  activation = keys.choice('hidden_act', ACTIVATIONS, 'silu')
  return MLPConfig(width=keys.whole(width), bias=bias, activation=activation, gated=True)


def _window(keys: Keys) -> int:
  return keys.whole('sliding_window') if keys.get('sliding_window') else 0


def _llama(keys: Keys) -> LMConfig:
  bias, mlp_bias = keys.flag('attention_bias', False), keys.flag('mlp_bias', False)
  return _decoder(keys, _gated(keys, bias=mlp_bias), qkv_bias=bias, proj_bias=bias)


def _mistral(keys: Keys) -> LMConfig:
  return _decoder(keys, _gated(keys), window=_window(keys))


def _qwen2(keys: Keys) -> LMConfig:
  return _with_windows(keys, _decoder(keys, _gated(keys), qkv_bias=True))


def _qwen3(keys: Keys) -> LMConfig:
  bias = keys.flag('attention_bias', False)
  model = _decoder(keys, _gated(keys), qkv_bias=bias, proj_bias=bias, qk_norm='rms')
  return _with_windows(keys, model)


def _smollm3(keys: Keys) -> LMConfig:
  model = _llama(keys)
  depth, rotated = model.depth, keys.get('no_rope_layers')
  if rotated is None:
    interval = keys.whole('no_rope_layer_interval', 4)
    rotated = [int((layer + 1) % interval != 0) for layer in range(depth)]
  if not isinstance(rotated, list) or len(rotated) < depth or not set(rotated) <= {0, 1}:
    raise keys.refusal('no_rope_layers', f'{depth} of 0 or 1, 1 for a layer with rotation')
  window = _window(keys) if keys.flag('use_sliding_window', False) else 0
  windowed = [bool(window) and not is_rotated for is_rotated in rotated]
  if keys.get('layer_types') is not None:
    windowed = _windowed_layers(keys, depth)
  variants = {
    _WINDOWED: _with(model.layer, window=window),
    _UNROTATED: _with(model.layer, positions=NoPositionsConfig()),
    f'{_UNROTATED}_{_WINDOWED}': _with(model.layer, positions=NoPositionsConfig(), window=window),
  }
  names = [
    '_'.join([_UNROTATED] * (not is_rotated) + [_WINDOWED] * has_window) or BASE
    for is_rotated, has_window in zip(rotated, windowed, strict=False)
  ]
  return with_kinds(model, names, variants)


def _phi3(keys: Keys) -> LMConfig:
  # Which of the two tables of a `longrope` is used depends on the length of each text.
  positions = rotary(keys, fraction=keys.number('partial_rotary_factor', 1.0), scalings=())
  model = _decoder(keys, _gated(keys), positions=positions, window=_window(keys))
  head_width = width_of_heads(model.layer.mixer, model.width)
  check_rotated(keys, 'partial_rotary_factor', head_width, positions.fraction)
  keys.get('original_max_position_embeddings')  # of `longrope`
  keys.only('attention_bias', False)
  return model


def _olmo2(keys: Keys) -> LMConfig:
  bias, wiring = keys.flag('attention_bias', False), SandwichConfig(before=False)
  model = _decoder(keys, _gated(keys), qkv_bias=bias, proj_bias=bias, qk_norm='rms_joint')
  return dataclasses.replace(model, layer=dataclasses.replace(model.layer, wiring=wiring))


def _gemma(keys: Keys) -> LMConfig:
  activation = keys.choice('hidden_act', ACTIVATIONS, 'gelu_pytorch_tanh')
  if activation == 'gelu':
    activation = 'gelu_tanh'  # that Gemma was trained with, and transformers computes
  return _gemma_decoder(keys, activation)


def _gemma2(keys: Keys) -> LMConfig:
  return _sandwich(keys, 2, score_cap=_cap(keys, 'attn_logit_softcapping'))


def _gemma3(keys: Keys) -> LMConfig:
  keys.only('attn_logit_softcapping')  # which transformers does not apply
  every = keys.whole('sliding_window_pattern', 6)
  keys.get('_sliding_window_pattern')  # a copy that transformers saves
  full, local = rotary_by_kind(keys)
  return _sandwich(keys, every, {'positions': local}, positions=full, qk_norm='rms_offset')


def _gemma_decoder(keys: Keys, activation: Any, **mixer: Any) -> LMConfig:
  """Return what all Gemmas have; `mixer` has other keys of the attention."""
  keys.only('use_bidirectional_attention', False)
  keys.get('hidden_act')
  mlp = MLPConfig(keys.whole('intermediate_size'), activation=activation, gated=True)
  bias = keys.flag('attention_bias', False)
  how = {'norm': 'rms_offset', 'qkv_bias': bias, 'proj_bias': bias, 'tied': True}
  return dataclasses.replace(_decoder(keys, mlp, **how, **mixer), embedding_scale=True)


def _sandwich(keys: Keys, every: int, local: Mapping[str, Any] = {}, **mixer: Any) -> LMConfig:
  """Return Gemma 2 or 3, where every so many layers one has no window.

  `local` has the keys of the attention of layers with a window, besides `mixer`.
  """
  activation = keys.choice('hidden_activation', ACTIVATIONS, 'gelu_pytorch_tanh')
  model = _gemma_decoder(keys, activation, **mixer)
  depth = model.depth
  check_heads(keys, 'num_attention_heads', model.width, keys.whole('num_attention_heads'))
  width = keys.whole('query_pre_attn_scalar', 256)
  same = width == width_of_heads(model.layer.mixer, model.width)
  full = _with(model.layer, score_width=0.0 if same else float(width))
  full = dataclasses.replace(full, wiring=SandwichConfig())
  windowed = _layers_with_windows(keys, depth)
  if windowed is None:
    windowed = [(layer + 1) % every != 0 for layer in range(depth)]
  window = keys.whole('sliding_window') if any(windowed) else 0
  keys.get('sliding_window')
  model = dataclasses.replace(model, layer=full, logit_cap=_cap(keys, 'final_logit_softcapping'))
  names = [_WINDOWED if is_windowed else BASE for is_windowed in windowed]
  return with_kinds(model, names, {_WINDOWED: _with(full, window=window, **local)})


def _cap(keys: Keys, name: str) -> float:
  return 0.0 if keys.get(name) is None else keys.number(name)


def _mixtral(keys: Keys) -> LMConfig:
  experts = _experts(keys, _COUNTS[::-1], _gated(keys), renormalize=True)
  return _decoder(keys, experts, window=_window(keys))


def _qwen_experts(keys: Keys) -> ExpertsConfig:
  """Return the experts of the mixtures of Qwen."""
  keys.only('decoder_sparse_step', 1)
  keys.only('mlp_only_layers', [])
  mlp = _gated(keys, 'moe_intermediate_size')
  return _experts(keys, _COUNTS, mlp, renormalize=keys.flag('norm_topk_prob', False))


def _qwen2_moe(keys: Keys) -> LMConfig:
  shared = _gated(keys, 'shared_expert_intermediate_size')
  experts = dataclasses.replace(_qwen_experts(keys), shared=shared, shared_gate=True)
  # Versions of transformers differ in the layers that have a window then.
  if keys.get('layer_types') is None and keys.flag('use_sliding_window', False):
    raise keys.refusal('use_sliding_window', 'False in a file without layer_types')
  model = _decoder(keys, experts, qkv_bias=keys.flag('qkv_bias', True))
  return _with_windows(keys, model)


def _qwen3_moe(keys: Keys) -> LMConfig:
  keys.only('use_sliding_window', False)
  bias = keys.flag('attention_bias', False)
  return _decoder(keys, _qwen_experts(keys), qkv_bias=bias, proj_bias=bias, qk_norm='rms')


def _experts(
  keys: Keys, counts: Sequence[str], expert: MLPConfig, *, renormalize: bool
) -> ExpertsConfig:
  """Return experts in every layer; `counts` are keys of their number, the family's own first."""
  count = next((name for name in counts if keys.get(name)), counts[0])
  top_k = keys.whole('num_experts_per_tok', 2)
  if top_k < 2 and renormalize:
    raise keys.refusal('num_experts_per_tok', 'at least 2')
  router = RouterConfig(top_k=top_k, renormalize=renormalize)
  return ExpertsConfig(count=keys.whole(count), expert=expert, router=router)


def _with_windows(keys: Keys, model: LMConfig) -> LMConfig:
  """Return the model with a window in the layers that its keys say."""
  windowed = _windowed_layers(keys, model.depth)
  if not any(windowed):
    return model
  local = _with(model.layer, window=keys.whole('sliding_window'))
  names = [_WINDOWED if is_windowed else BASE for is_windowed in windowed]
  return with_kinds(model, names, {_WINDOWED: local})


def _with(layer: LayerConfig, **mixer: Any) -> LayerConfig:
  """Return the layer with other keys of its attention."""
  return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **mixer))


def _windowed_layers(keys: Keys, depth: int) -> list[bool]:
  """Return whether each layer has a window, by `layer_types` or by the older keys."""
  first = keys.get('max_window_layers', depth)
  windows = keys.flag('use_sliding_window', False) and bool(keys.get('sliding_window'))
  windowed = _layers_with_windows(keys, depth)
  if windowed is None:
    if type(first) is not int:
      raise keys.refusal('max_window_layers', 'an integer')
    return [windows and layer >= first for layer in range(depth)]
  if not windows and any(windowed):
    raise keys.refusal('layer_types', 'full_attention alone without use_sliding_window')
  return windowed


def _layers_with_windows(keys: Keys, depth: int) -> list[bool] | None:
  """Return whether each layer has a window by `layer_types`; None: the file has no such key."""
  kinds, names = keys.get('layer_types'), ('full_attention', 'sliding_attention')
  if kinds is None:
    return None
  if not isinstance(kinds, list) or len(kinds) != depth or any(k not in names for k in kinds):
    raise keys.refusal('layer_types', f'{depth} of {" or ".join(names)}')
  return [kind == names[1] for kind in kinds]


def _mlp_rules(theirs: str, ours: str) -> Iterator[Rule]:
  """Yield the rules of a gated MLP."""
  for name in ('gate', 'up', 'down'):
    yield from linear(f'{theirs}.{name}_proj', f'{ours}/{name}')


def _experts_rules(theirs: str, **names: str) -> Iterator[Rule]:
  """Yield the rules of a router's experts, given the names of their matrices."""
  yield Rule(f'{theirs}.gate.weight', ('ffn/router/kernel',), 'transposed')
  for ours, name in names.items():
    tensor = f'{theirs}.experts.{{expert}}.{name}.weight'
    yield Rule(tensor, (f'ffn/experts/{ours}',), 'transposed')


_L = 'model.layers.{layer}'
_ATTENTION = (
  Rule('model.embed_tokens.weight', ('embedding',)),
  *norm(f'{_L}.input_layernorm', 'attention_norm'),
  *linear(f'{_L}.self_attn.q_proj', 'attention/query'),
  *linear(f'{_L}.self_attn.k_proj', 'attention/key'),
  *linear(f'{_L}.self_attn.v_proj', 'attention/value'),
  *linear(f'{_L}.self_attn.o_proj', 'attention/proj'),
  *norm(f'{_L}.self_attn.q_norm', 'attention/query_norm'),
  *norm(f'{_L}.self_attn.k_norm', 'attention/key_norm'),
  *norm(f'{_L}.post_attention_layernorm', 'ffn_norm'),
)
_END = (*norm('model.norm', 'final_norm'), Rule('lm_head.weight', ('head',)))
_LLAMA_RULES = (*_ATTENTION, *_mlp_rules(f'{_L}.mlp', 'ffn'), *_END)
_FUSED = {  # by the name of a matrix that holds others side by side
  'self_attn.qkv_proj': [f'attention/{name}/kernel' for name in ('query', 'key', 'value')],
  'mlp.gate_up_proj': ['ffn/gate/kernel', 'ffn/up/kernel'],
}
_PHI3_RULES = (
  *(rule for rule in _LLAMA_RULES if rule.paths[0] not in chain(*_FUSED.values())),
  *(Rule(f'{_L}.{name}.weight', tuple(ours), 'transposed') for name, ours in _FUSED.items()),
)
_SANDWICH_RULES = (
  *(rule for rule in _LLAMA_RULES if rule.paths != ('ffn_norm/scale',)),
  *norm(f'{_L}.post_attention_layernorm', 'attention_after_norm'),
  *norm(f'{_L}.pre_feedforward_layernorm', 'ffn_norm'),
  *norm(f'{_L}.post_feedforward_layernorm', 'ffn_after_norm'),
)
_MIXTRAL_RULES = (
  *_ATTENTION,
  *_experts_rules(f'{_L}.block_sparse_moe', gate='w1', down='w2', up='w3'),
  *_END,
)
_QWEN_MOE_RULES = (
  *_ATTENTION,
  *_experts_rules(f'{_L}.mlp', gate='gate_proj', down='down_proj', up='up_proj'),
  *_mlp_rules(f'{_L}.mlp.shared_expert', 'ffn/shared'),
  Rule(f'{_L}.mlp.shared_expert_gate.weight', ('ffn/shared_gate',), 'row'),
  *_END,
)

_QWEN = {'max_position_embeddings': 32768, 'sliding_window': 4096, 'max_window_layers': 28}
_GEMMA = {'head_dim': 256, 'query_pre_attn_scalar': 256, 'sliding_window': 4096}
_MISTRAL = {'max_position_embeddings': 131072, 'num_key_value_heads': 8}
LLAMA_FAMILIES = (
  Family('llama', 'LlamaForCausalLM', _llama, _LLAMA_RULES),
  Family(
    'mistral', 'MistralForCausalLM', _mistral, _LLAMA_RULES, {**_MISTRAL, 'sliding_window': 4096}
  ),
  Family('qwen2', 'Qwen2ForCausalLM', _qwen2, _LLAMA_RULES, {**_QWEN, 'num_key_value_heads': 32}),
  Family(
    'qwen3',
    'Qwen3ForCausalLM',
    _qwen3,
    _LLAMA_RULES,
    {**_QWEN, 'num_key_value_heads': 32, 'head_dim': 128},
  ),
  Family(
    'smollm3',
    'SmolLM3ForCausalLM',
    _smollm3,
    _LLAMA_RULES,
    {
      'max_position_embeddings': 32768,
      'num_key_value_heads': 4,
      'rope_theta': 2e6,
      'tie_word_embeddings': True,
    },
  ),
  Family(
    'phi3',
    'Phi3ForCausalLM',
    _phi3,
    _PHI3_RULES,
    {'max_position_embeddings': 4096, 'rms_norm_eps': 1e-5},
  ),
  Family('olmo2', 'Olmo2ForCausalLM', _olmo2, _SANDWICH_RULES, {'rms_norm_eps': 1e-5}),
  Family(
    'gemma',
    'GemmaForCausalLM',
    _gemma,
    _LLAMA_RULES,
    {'max_position_embeddings': 8192, 'num_key_value_heads': 16, 'head_dim': 256},
  ),
  Family(
    'gemma2',
    'Gemma2ForCausalLM',
    _gemma2,
    _SANDWICH_RULES,
    {
      **_GEMMA,
      'max_position_embeddings': 8192,
      'num_key_value_heads': 4,
      'attn_logit_softcapping': 50.0,
      'final_logit_softcapping': 30.0,
    },
  ),
  Family(
    'gemma3_text',
    'Gemma3ForCausalLM',
    _gemma3,
    _SANDWICH_RULES,
    {
      **_GEMMA,
      'vocab_size': 262208,
      'max_position_embeddings': 131072,
      'num_attention_heads': 8,
      'num_key_value_heads': 4,
    },
  ),
  Family(
    'mixtral',
    'MixtralForCausalLM',
    _mixtral,
    _MIXTRAL_RULES,
    {**_MISTRAL, 'rms_norm_eps': 1e-5, 'rope_theta': 1e6},
  ),
  Family(
    'qwen2_moe',
    'Qwen2MoeForCausalLM',
    _qwen2_moe,
    _QWEN_MOE_RULES,
    {**_QWEN, 'num_key_value_heads': 16, 'num_experts_per_tok': 4},
  ),
  Family(
    'qwen3_moe',
    'Qwen3MoeForCausalLM',
    _qwen3_moe,
    _QWEN_MOE_RULES,
    {**_QWEN, 'num_key_value_heads': 4, 'num_experts_per_tok': 8},
  ),
)
