"""Llama and the families that vary it: Mistral, Qwen, Gemma and their mixtures of experts."""

import dataclasses
from typing import Any

from tokenformer_jax.config import (
  DenseConfig,
  ExpertsConfig,
  LayerConfig,
  LMConfig,
  MLPConfig,
  ModelConfig,
  PreNormConfig,
  RouterConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.mixers import width_of_heads
from tokenformer_jax.config.model import Layers
from tokenformer_jax.convert.family import (
  ACTIVATION_NAMES,
  ACTIVATIONS,
  Family,
  Rule,
  check_heads,
  linear,
  norm,
  rotary,
  rotary_keys,
)
from tokenformer_jax.convert.hub_keys import Keys

_WINDOWED = 'local'  # the variant with a window, in models that have layers without


def _layer(
  keys: Keys, ffn: Any, *, qkv_bias: bool = False, proj_bias: bool = False, **changes: Any
) -> LayerConfig:
  """Return a layer; `changes` are of its mixer."""
  heads, width = keys.whole('num_attention_heads'), keys.whole('hidden_size')
  kv_heads = keys.whole('num_key_value_heads', heads)
  if heads % kv_heads:
    raise keys.refusal('num_key_value_heads', f'a divisor of the {heads} heads')
  if not keys.get('head_dim'):
    check_heads(keys, 'num_attention_heads', width, heads)
  head_width = keys.whole('head_dim', width // heads)
  if head_width * heads != width:
    changes['head_width'] = head_width
  mixer = SoftmaxConfig(
    heads=heads,
    kv_heads=0 if kv_heads == heads else kv_heads,
    positions=rotary(keys),
    qkv=DenseConfig(bias=qkv_bias),
    proj=DenseConfig(bias=proj_bias),
    **changes,
  )
  return LayerConfig(mixer=mixer, ffn=ffn, norm='rms', wiring=PreNormConfig())


def _model(keys: Keys, layer: LayerConfig, *, tied: bool = False) -> ModelConfig:
  """Return a model of equal layers with the sizes that all of the Llama kind name alike."""
  return LMConfig(
    pattern=f'layer*{keys.whole("num_hidden_layers")}',
    width=keys.whole('hidden_size'),
    layer=layer,
    vocab_size=keys.whole('vocab_size'),
    norm_epsilon=keys.number('rms_norm_eps', 1e-6),
    final_norm='rms',
    max_length=keys.whole('max_position_embeddings', 2048),
    tied_head=keys.flag('tie_word_embeddings', tied),
  )


def _gated(keys: Keys, width: str = 'intermediate_size', *, bias: bool = False) -> MLPConfig:
  activation = keys.choice('hidden_act', ACTIVATIONS, 'silu')
  return MLPConfig(width=keys.whole(width), bias=bias, activation=activation, gated=True)


def _window(keys: Keys) -> int:
  return keys.whole('sliding_window') if keys.get('sliding_window') else 0


def _llama(keys: Keys) -> ModelConfig:
  bias = keys.flag('attention_bias', False)
  mlp = _gated(keys, bias=keys.flag('mlp_bias', False))
  return _model(keys, _layer(keys, mlp, qkv_bias=bias, proj_bias=bias))


def _mistral(keys: Keys) -> ModelConfig:
  return _model(keys, _layer(keys, _gated(keys), window=_window(keys)))


def _qwen2(keys: Keys) -> ModelConfig:
  return _with_windows(keys, _model(keys, _layer(keys, _gated(keys), qkv_bias=True)))


def _qwen3(keys: Keys) -> ModelConfig:
  bias = keys.flag('attention_bias', False)
  layer = _layer(keys, _gated(keys), qkv_bias=bias, proj_bias=bias, qk_norm='rms')
  return _with_windows(keys, _model(keys, layer))


def _mixtral(keys: Keys) -> ModelConfig:
  experts = _experts(keys, _gated(keys), renormalize=True)
  return _model(keys, _layer(keys, experts, window=_window(keys)))


def _qwen3_moe(keys: Keys) -> ModelConfig:
  keys.only('use_sliding_window', False)
  bias = keys.flag('attention_bias', False)
  mlp = _gated(keys, 'moe_intermediate_size')
  experts = _experts(keys, mlp, renormalize=keys.flag('norm_topk_prob', False))
  return _model(keys, _layer(keys, experts, qkv_bias=bias, proj_bias=bias, qk_norm='rms'))


def _qwen2_moe(keys: Keys) -> ModelConfig:
  mlp = _gated(keys, 'moe_intermediate_size')
  experts = dataclasses.replace(
    _experts(keys, mlp, renormalize=keys.flag('norm_topk_prob', False)),
    shared=_gated(keys, 'shared_expert_intermediate_size'),
    shared_gate=True,
  )
  # Versions of transformers differ in the layers that have a window then.
  if keys.get('layer_types') is None and keys.flag('use_sliding_window', False):
    raise keys.refusal('use_sliding_window', 'False in a file without layer_types')
  layer = _layer(keys, experts, qkv_bias=keys.flag('qkv_bias', True))
  return _with_windows(keys, _model(keys, layer))


def _gemma(keys: Keys) -> ModelConfig:
  keys.only('use_bidirectional_attention', False)
  bias = keys.flag('attention_bias', False)
  # Files of the first Gemma have a hidden_act that this newer key corrects.
  name = 'hidden_activation' if keys.get('hidden_activation') else 'hidden_act'
  activation = keys.choice(name, ACTIVATIONS, 'gelu_pytorch_tanh')
  if name == 'hidden_act' and activation == 'gelu':
    activation = 'gelu_tanh'  # that Gemma was trained with, and transformers computes
  keys.get('hidden_act')
  mlp = MLPConfig(keys.whole('intermediate_size'), activation=activation, gated=True)
  layer = _layer(keys, mlp, qkv_bias=bias, proj_bias=bias)
  model = _model(keys, dataclasses.replace(layer, norm='rms_offset'), tied=True)
  return dataclasses.replace(model, final_norm='rms_offset', embedding_scale=True)


def _experts(keys: Keys, expert: MLPConfig, *, renormalize: bool) -> ExpertsConfig:
  """Return experts in every layer."""
  keys.only('decoder_sparse_step', 1)
  keys.only('mlp_only_layers', [])
  top_k = keys.whole('num_experts_per_tok', 2)
  if top_k < 2 and renormalize:
    raise keys.refusal('num_experts_per_tok', 'at least 2')
  count = keys.whole('num_experts' if keys.get('num_experts') else 'num_local_experts')
  router = RouterConfig(top_k=top_k, renormalize=renormalize)
  return ExpertsConfig(count=count, expert=expert, router=router)


def _with_windows(keys: Keys, model: ModelConfig) -> ModelConfig:
  """Return the model with a window in the layers that its keys say."""
  windowed = _windowed_layers(keys, model.depth)
  if not any(windowed):
    return model
  mixer = dataclasses.replace(model.layer.mixer, window=keys.whole('sliding_window'))
  local = dataclasses.replace(model.layer, mixer=mixer)
  if all(windowed):
    return dataclasses.replace(model, layer=local)
  runs: list[list[Any]] = []
  for name in (_WINDOWED if is_windowed else 'layer' for is_windowed in windowed):
    if runs and runs[-1][0] == name:
      runs[-1][1] += 1
    else:
      runs.append([name, 1])
  pattern = ' '.join(f'{name}*{count}' for name, count in runs)
  return dataclasses.replace(model, pattern=pattern, variants=Layers({_WINDOWED: local}))


def _windowed_layers(keys: Keys, depth: int) -> list[bool]:
  """Return whether each layer has a window, by `layer_types` or by the older keys."""
  first = keys.get('max_window_layers', depth)
  windows = keys.flag('use_sliding_window', False) and bool(keys.get('sliding_window'))
  kinds = keys.get('layer_types')
  if kinds is None:
    if type(first) is not int:
      raise keys.refusal('max_window_layers', 'an integer')
    return [windows and layer >= first for layer in range(depth)]
  names = ('full_attention', 'sliding_attention')
  if not isinstance(kinds, list) or len(kinds) != depth or any(k not in names for k in kinds):
    raise keys.refusal('layer_types', f'{depth} of {" or ".join(names)}')
  return [windows and kind == names[1] for kind in kinds]


def _mixer(model: ModelConfig) -> Any:
  """Return the mixer of a model of these families, which is softmax attention."""
  return model.layer.mixer


def _llama_keys(model: ModelConfig) -> dict[str, Any]:
  """Return the keys that all families of the Llama kind name alike."""
  layer: Any = model.layer
  mixer, ffn = layer.mixer, layer.ffn
  mlp = ffn.expert if isinstance(ffn, ExpertsConfig) else ffn
  return {
    'vocab_size': model.vocab_size,
    'hidden_size': model.width,
    'intermediate_size': mlp.width or 4 * model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': mixer.heads,
    'num_key_value_heads': mixer.key_heads,
    'head_dim': width_of_heads(mixer, model.width),
    'hidden_act': ACTIVATION_NAMES[mlp.activation],
    'max_position_embeddings': model.max_length,
    'rms_norm_eps': model.norm_epsilon,
    'tie_word_embeddings': model.tied_head,
    **rotary_keys(mixer.positions),
  }


def _llama_to_keys(model: ModelConfig) -> dict[str, Any]:
  layer: Any = model.layer
  return _llama_keys(model) | {
    'attention_bias': layer.mixer.qkv.bias,
    'mlp_bias': layer.ffn.bias,
  }


def _mistral_to_keys(model: ModelConfig) -> dict[str, Any]:
  return _llama_keys(model) | {'sliding_window': _mixer(model).window or None}


def _qwen2_to_keys(model: ModelConfig) -> dict[str, Any]:
  layers: list[Any] = list(model.in_order)
  windows = [layer.mixer.window for layer in layers]
  kinds = ['sliding_attention' if window else 'full_attention' for window in windows]
  own = {'use_sliding_window': any(windows), 'sliding_window': max(windows) or None}
  return _llama_keys(model) | own | {'layer_types': kinds}


def _qwen3_to_keys(model: ModelConfig) -> dict[str, Any]:
  return _qwen2_to_keys(model) | {'attention_bias': _mixer(model).qkv.bias}


def _qwen2_moe_to_keys(model: ModelConfig) -> dict[str, Any]:
  ffn: Any = model.layer.ffn
  return (
    _qwen2_to_keys(model)
    | _moe_keys(model)
    | {
      'qkv_bias': _mixer(model).qkv.bias,
      'shared_expert_intermediate_size': ffn.shared.width or 4 * model.width,
    }
  )


def _gemma_to_keys(model: ModelConfig) -> dict[str, Any]:
  return _llama_keys(model) | {'attention_bias': _mixer(model).qkv.bias}


def _qwen3_moe_to_keys(model: ModelConfig) -> dict[str, Any]:
  own = {'attention_bias': _mixer(model).qkv.bias}
  return _llama_keys(model) | _moe_keys(model) | own


def _moe_keys(model: ModelConfig) -> dict[str, Any]:
  ffn: Any = model.layer.ffn
  return {
    'moe_intermediate_size': ffn.expert.width or 4 * model.width,
    'num_experts': ffn.count,
    'num_experts_per_tok': ffn.router.top_k,
    'norm_topk_prob': ffn.router.renormalize,
    'decoder_sparse_step': 1,
    'mlp_only_layers': [],
  }


def _mixtral_to_keys(model: ModelConfig) -> dict[str, Any]:
  ffn: Any = model.layer.ffn
  own = {'num_local_experts': ffn.count, 'num_experts_per_tok': ffn.router.top_k}
  return _mistral_to_keys(model) | own


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
_GATED = tuple(
  rule for part in ('gate', 'up', 'down') for rule in linear(f'{_L}.mlp.{part}_proj', f'ffn/{part}')
)
_LLAMA_RULES = (*_ATTENTION, *_GATED, *_END)
_MOE = f'{_L}.block_sparse_moe'
_MIXTRAL_RULES = (
  *_ATTENTION,
  Rule(f'{_MOE}.gate.weight', ('ffn/router/kernel',), 'transposed'),
  *(
    Rule(f'{_MOE}.experts.{{expert}}.{theirs}.weight', (f'ffn/experts/{ours}',), 'transposed')
    for theirs, ours in (('w1', 'gate'), ('w2', 'down'), ('w3', 'up'))
  ),
  *_END,
)
_QWEN_MOE = (
  *_ATTENTION,
  Rule(f'{_L}.mlp.gate.weight', ('ffn/router/kernel',), 'transposed'),
  *(
    Rule(f'{_L}.mlp.experts.{{expert}}.{part}_proj.weight', (f'ffn/experts/{part}',), 'transposed')
    for part in ('gate', 'up', 'down')
  ),
  *(
    rule
    for part in ('gate', 'up', 'down')
    for rule in linear(f'{_L}.mlp.shared_expert.{part}_proj', f'ffn/shared/{part}')
  ),
  Rule(f'{_L}.mlp.shared_expert_gate.weight', ('ffn/shared_gate',), 'row'),
  *_END,
)

_QWEN = {'max_position_embeddings': 32768, 'sliding_window': 4096, 'max_window_layers': 28}
_MISTRAL = {'max_position_embeddings': 131072, 'num_key_value_heads': 8}
_DEFAULTS = {
  'mistral': {**_MISTRAL, 'sliding_window': 4096},
  'qwen2': {**_QWEN, 'num_key_value_heads': 32},
  'qwen3': {**_QWEN, 'num_key_value_heads': 32, 'head_dim': 128},
  'mixtral': {**_MISTRAL, 'rms_norm_eps': 1e-5, 'rope_theta': 1e6},
  'gemma': {'max_position_embeddings': 8192, 'num_key_value_heads': 16, 'head_dim': 256},
  'qwen2_moe': {**_QWEN, 'num_key_value_heads': 16, 'num_experts_per_tok': 4},
  'qwen3_moe': {**_QWEN, 'num_key_value_heads': 4, 'num_experts_per_tok': 8},
}
LLAMA_FAMILIES = tuple(
  Family(
    kind,
    architecture,
    to_model,
    to_keys,
    rules,
    'model.',
    ('rotary_emb.inv_freq',),
    _DEFAULTS.get(kind, {}),
  )
  for kind, architecture, to_model, to_keys, rules in (
    ('llama', 'LlamaForCausalLM', _llama, _llama_to_keys, _LLAMA_RULES),
    ('mistral', 'MistralForCausalLM', _mistral, _mistral_to_keys, _LLAMA_RULES),
    ('qwen2', 'Qwen2ForCausalLM', _qwen2, _qwen2_to_keys, _LLAMA_RULES),
    ('qwen3', 'Qwen3ForCausalLM', _qwen3, _qwen3_to_keys, _LLAMA_RULES),
    ('mixtral', 'MixtralForCausalLM', _mixtral, _mixtral_to_keys, _MIXTRAL_RULES),
    ('gemma', 'GemmaForCausalLM', _gemma, _gemma_to_keys, _LLAMA_RULES),
    ('qwen2_moe', 'Qwen2MoeForCausalLM', _qwen2_moe, _qwen2_moe_to_keys, _QWEN_MOE),
    ('qwen3_moe', 'Qwen3MoeForCausalLM', _qwen3_moe, _qwen3_moe_to_keys, _QWEN_MOE),
  )
)
