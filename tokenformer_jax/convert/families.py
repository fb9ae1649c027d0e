"""The families of models in the hub's layout: their keys and tensors, in both directions.

A `Family` has a function from the keys of a config.json to our model, one from our model to those
keys, and rules that say where each tensor lies among our parameters. A model is of a family if it
is the model of the keys that it is written with.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tokenformer_jax.config import (
  DenseConfig,
  ExpertsConfig,
  LayerConfig,
  MLPConfig,
  ModelConfig,
  NoPositionsConfig,
  ParallelConfig,
  PreNormConfig,
  RotaryConfig,
  RouterConfig,
  SoftmaxConfig,
)
from tokenformer_jax.config.model import Layers
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.errors import UserError

_ACTIVATIONS = {
  'gelu': 'gelu',
  'gelu_new': 'gelu_tanh',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
}
_NAMES = {'gelu': 'gelu', 'gelu_tanh': 'gelu_new', 'relu': 'relu', 'silu': 'silu'}
_WINDOWED = 'local'  # the variant with a window, in models that have layers without


class Rule(NamedTuple):
  """Where the numbers of tensors lie.

  Attributes:
    name: of a tensor, with {layer} and {expert} where there are several.
    paths: those in a layer, or in the model without {layer}. Several share one tensor.
    how: `same`; `transposed`; `columns`: several side by side; or `heads`: transposed, and of each
      head in turn.
  """

  name: str
  paths: tuple[str, ...]
  how: str = 'same'


class Family(NamedTuple):
  """A kind of models in the hub's layout."""

  kind: str  # model_type
  architecture: str
  to_model: Callable[[Keys], ModelConfig]
  to_keys: Callable[[ModelConfig], dict[str, Any]]
  rules: tuple[Rule, ...]
  prefix: str  # of all names but those of the head, absent in a file of the model without head
  stored: tuple[str, ...] = ()  # ends of the names of tensors that hold no parameters


def _linear(theirs: str, ours: str, how: str = 'transposed') -> Iterator[Rule]:
  yield Rule(f'{theirs}.weight', (f'{ours}/kernel',), how)
  yield Rule(f'{theirs}.bias', (f'{ours}/bias',))


def _norm(theirs: str, ours: str) -> Iterator[Rule]:
  yield Rule(f'{theirs}.weight', (f'{ours}/scale',))
  yield Rule(f'{theirs}.bias', (f'{ours}/bias',))


_PARTS = ('query', 'key', 'value')
_KERNELS = tuple(f'attention/{part}/kernel' for part in _PARTS)
_BIASES = tuple(f'attention/{part}/bias' for part in _PARTS)


def _layer(keys: Keys, *, qkv_bias: bool, proj_bias: bool, mlp: Any, window: int) -> LayerConfig:
  """Return a layer of the Llama kind."""
  heads, width = keys.whole('num_attention_heads'), keys.whole('hidden_size')
  _check_heads(keys, width, heads)
  keys.only('num_key_value_heads', heads)
  keys.only('head_dim', width // heads)
  return LayerConfig(
    mixer=SoftmaxConfig(
      heads=heads,
      window=window,
      positions=_rotary(keys, fraction=1.0),
      qkv=DenseConfig(bias=qkv_bias),
      proj=DenseConfig(bias=proj_bias),
    ),
    ffn=mlp,
    norm='rms',
    wiring=PreNormConfig(),
  )


def _check_heads(keys: Keys, width: int, heads: int) -> None:
  if width % heads:
    raise keys.refusal('num_attention_heads', f'a divisor of the width {width}')


def _rotary(keys: Keys, *, fraction: float, base: float = 10000.0) -> RotaryConfig:
  """Return the rotation, whose keys are in a table of their own or, in older files, beside it.

  `fraction` and `base` are for files that do not have them in the table.
  """
  name = 'rope_parameters' if keys.get('rope_parameters') else 'rope_scaling'
  values = keys.get(name, {})
  if not isinstance(values, dict):
    raise keys.refusal(name, 'a table of keys')
  kind = values.get('rope_type', values.get('type', 'default'))
  if kind != 'default':
    raise UserError(
      f'{name} has rope_type={kind!r:.40}, which cannot be converted; it must be default'
    )
  inner = Keys(values, name)
  return RotaryConfig(
    fraction=inner.number('partial_rotary_factor', fraction),
    base=inner.number('rope_theta', keys.number('rope_theta', base)),
  )


def _model(keys: Keys, layer: LayerConfig, **changes: Any) -> ModelConfig:
  """Return a model of equal layers with the sizes that all of the Llama kind name alike."""
  return ModelConfig(
    pattern=f'layer*{keys.whole("num_hidden_layers")}',
    width=keys.whole('hidden_size'),
    layer=layer,
    vocab_size=keys.whole('vocab_size'),
    norm_epsilon=keys.number('rms_norm_eps', 1e-6),
    final_norm='rms',
    max_length=keys.whole('max_position_embeddings', 2048),
    tied_head=keys.flag('tie_word_embeddings', False),
    **changes,
  )


def _gated(keys: Keys, bias: bool = False, width: str = 'intermediate_size') -> MLPConfig:
  activation = keys.choice('hidden_act', _ACTIVATIONS, 'silu')
  return MLPConfig(width=keys.whole(width), bias=bias, activation=activation, gated=True)


def _llama(keys: Keys) -> ModelConfig:
  bias = keys.flag('attention_bias', False)
  mlp = _gated(keys, keys.flag('mlp_bias', False))
  return _model(keys, _layer(keys, qkv_bias=bias, proj_bias=bias, mlp=mlp, window=0))


def _mistral(keys: Keys) -> ModelConfig:
  window = keys.whole('sliding_window') if keys.get('sliding_window') else 0
  return _model(
    keys, _layer(keys, qkv_bias=False, proj_bias=False, mlp=_gated(keys), window=window)
  )


def _qwen2(keys: Keys) -> ModelConfig:
  layer = _layer(keys, qkv_bias=True, proj_bias=False, mlp=_gated(keys), window=0)
  model = _model(keys, layer)
  windowed = _windowed_layers(keys, model.depth)
  if not any(windowed):
    return model
  mixer = dataclasses.replace(layer.mixer, window=keys.whole('sliding_window'))
  local = dataclasses.replace(layer, mixer=mixer)
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


def _mixtral(keys: Keys) -> ModelConfig:
  window = keys.whole('sliding_window') if keys.get('sliding_window') else 0
  top_k = keys.whole('num_experts_per_tok', 2)
  if top_k < 2:
    raise keys.refusal('num_experts_per_tok', 'at least 2')
  experts = ExpertsConfig(
    count=keys.whole('num_local_experts', 8),
    expert=_gated(keys),
    router=RouterConfig(top_k=top_k, renormalize=True),
  )
  return _model(keys, _layer(keys, qkv_bias=False, proj_bias=False, mlp=experts, window=window))


def _llama_keys(model: ModelConfig) -> dict[str, Any]:
  """Return the keys that all families of the Llama kind name alike."""
  mixer, ffn = model.layer.mixer, model.layer.ffn
  mlp = ffn.expert if isinstance(ffn, ExpertsConfig) else ffn
  return {
    'vocab_size': model.vocab_size,
    'hidden_size': model.width,
    'intermediate_size': mlp.width or 4 * model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': mixer.heads,
    'num_key_value_heads': mixer.heads,
    'hidden_act': _NAMES[mlp.activation],
    'max_position_embeddings': model.max_length,
    'rms_norm_eps': model.norm_epsilon,
    'tie_word_embeddings': model.tied_head,
    'rope_theta': mixer.positions.base,
  }


def _llama_to_keys(model: ModelConfig) -> dict[str, Any]:
  layer = model.layer
  return _llama_keys(model) | {
    'attention_bias': layer.mixer.qkv.bias,
    'mlp_bias': layer.ffn.bias,
  }


def _mistral_to_keys(model: ModelConfig) -> dict[str, Any]:
  return _llama_keys(model) | {'sliding_window': model.layer.mixer.window or None}


def _qwen2_to_keys(model: ModelConfig) -> dict[str, Any]:
  windows = [layer.mixer.window for layer in model.in_order]
  kinds = ['sliding_attention' if window else 'full_attention' for window in windows]
  own = {'use_sliding_window': any(windows), 'sliding_window': max(windows) or None}
  return _llama_keys(model) | own | {'layer_types': kinds}


def _mixtral_to_keys(model: ModelConfig) -> dict[str, Any]:
  ffn = model.layer.ffn
  own = {'num_local_experts': ffn.count, 'num_experts_per_tok': ffn.router.top_k}
  return _mistral_to_keys(model) | own


def _gpt2(keys: Keys) -> ModelConfig:
  keys.only('scale_attn_weights', True)
  keys.only('scale_attn_by_inverse_layer_idx', False)
  keys.only('add_cross_attention', False)
  width, heads = keys.whole('n_embd', 768), keys.whole('n_head', 12)
  if width % heads:
    raise keys.refusal('n_head', f'a divisor of the width {width}')
  activation = keys.choice('activation_function', _ACTIVATIONS, 'gelu_new')
  mlp = MLPConfig(keys.whole('n_inner', 4 * width), bias=True, activation=activation)
  dense = DenseConfig(bias=True)
  mixer = SoftmaxConfig(heads=heads, positions=NoPositionsConfig(), qkv=dense, proj=dense)
  return ModelConfig(
    pattern=f'layer*{keys.whole("n_layer", 12)}',
    width=width,
    layer=LayerConfig(mixer=mixer, ffn=mlp, norm='affine'),
    vocab_size=keys.whole('vocab_size', 50257),
    norm_epsilon=keys.number('layer_norm_epsilon', 1e-5),
    position_embedding='learned',
    max_length=keys.whole('n_positions', 1024),
    tied_head=keys.flag('tie_word_embeddings', True),
  )


def _gpt2_to_keys(model: ModelConfig) -> dict[str, Any]:
  ffn = model.layer.ffn
  return {
    'vocab_size': model.vocab_size,
    'n_embd': model.width,
    'n_inner': ffn.width or 4 * model.width,
    'n_layer': model.depth,
    'n_head': model.layer.mixer.heads,
    'n_positions': model.max_length,
    'activation_function': _NAMES[ffn.activation],
    'layer_norm_epsilon': model.norm_epsilon,
    'tie_word_embeddings': model.tied_head,
  }


def _gpt_neox(keys: Keys) -> ModelConfig:
  width, heads = keys.whole('hidden_size'), keys.whole('num_attention_heads')
  _check_heads(keys, width, heads)
  positions = _rotary(
    keys,
    fraction=keys.number('rotary_pct', 0.25),
    base=keys.number('rotary_emb_base', 10000.0),
  )
  rotated = int(width // heads * positions.fraction)
  if positions.fraction > 1 or rotated < 2 or rotated % 2:
    raise keys.refusal('rotary_pct', f'a part of {width // heads} entries that is an even number')
  dense = DenseConfig(bias=keys.flag('attention_bias', True))
  mixer = SoftmaxConfig(
    heads=heads,
    positions=positions,
    qkv=dense,
    proj=dense,
  )
  activation = keys.choice('hidden_act', _ACTIVATIONS, 'gelu')
  mlp = MLPConfig(keys.whole('intermediate_size'), bias=True, activation=activation)
  parallel = keys.flag('use_parallel_residual', True)
  wiring = ParallelConfig(gains=False, skip=True, two_norms=True) if parallel else PreNormConfig()
  return ModelConfig(
    pattern=f'layer*{keys.whole("num_hidden_layers")}',
    width=width,
    layer=LayerConfig(mixer=mixer, ffn=mlp, norm='affine', wiring=wiring),
    vocab_size=keys.whole('vocab_size'),
    norm_epsilon=keys.number('layer_norm_eps', 1e-5),
    max_length=keys.whole('max_position_embeddings', 2048),
    tied_head=keys.flag('tie_word_embeddings', False),
  )


def _gpt_neox_to_keys(model: ModelConfig) -> dict[str, Any]:
  mixer, ffn = model.layer.mixer, model.layer.ffn
  return {
    'vocab_size': model.vocab_size,
    'hidden_size': model.width,
    'intermediate_size': ffn.width or 4 * model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': mixer.heads,
    'max_position_embeddings': model.max_length,
    'hidden_act': _NAMES[ffn.activation],
    'layer_norm_eps': model.norm_epsilon,
    'tie_word_embeddings': model.tied_head,
    'rotary_emb_base': mixer.positions.base,
    'rope_theta': mixer.positions.base,
    'rotary_pct': mixer.positions.fraction,
    'attention_bias': mixer.qkv.bias,
    'use_parallel_residual': isinstance(model.layer.wiring, ParallelConfig),
  }


_L = 'model.layers.{layer}'
_ATTENTION = (
  Rule('model.embed_tokens.weight', ('embedding',)),
  *_norm(f'{_L}.input_layernorm', 'attention_norm'),
  *_linear(f'{_L}.self_attn.q_proj', 'attention/query'),
  *_linear(f'{_L}.self_attn.k_proj', 'attention/key'),
  *_linear(f'{_L}.self_attn.v_proj', 'attention/value'),
  *_linear(f'{_L}.self_attn.o_proj', 'attention/proj'),
  *_norm(f'{_L}.post_attention_layernorm', 'ffn_norm'),
)
_END = (*_norm('model.norm', 'final_norm'), Rule('lm_head.weight', ('head',)))
_GATED = tuple(
  rule
  for part in ('gate', 'up', 'down')
  for rule in _linear(f'{_L}.mlp.{part}_proj', f'ffn/{part}')
)
_LLAMA_RULES = (*_ATTENTION, *_GATED, *_END)
_LLAMA_STORED = ('rotary_emb.inv_freq',)
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
_H = 'transformer.h.{layer}'
_GPT2_RULES = (
  Rule('transformer.wte.weight', ('embedding',)),
  Rule('transformer.wpe.weight', ('positions',)),
  *_norm(f'{_H}.ln_1', 'attention_norm'),
  Rule(f'{_H}.attn.c_attn.weight', _KERNELS, 'columns'),
  Rule(f'{_H}.attn.c_attn.bias', _BIASES, 'columns'),
  *_linear(f'{_H}.attn.c_proj', 'attention/proj', 'same'),
  *_norm(f'{_H}.ln_2', 'ffn_norm'),
  *_linear(f'{_H}.mlp.c_fc', 'ffn/up', 'same'),
  *_linear(f'{_H}.mlp.c_proj', 'ffn/down', 'same'),
  *_norm('transformer.ln_f', 'final_norm'),
  Rule('lm_head.weight', ('head',)),
)
_X = 'gpt_neox.layers.{layer}'
_GPT_NEOX_RULES = (
  Rule('gpt_neox.embed_in.weight', ('embedding',)),
  *_norm(f'{_X}.input_layernorm', 'attention_norm'),
  *_norm(f'{_X}.post_attention_layernorm', 'ffn_norm'),
  Rule(f'{_X}.attention.query_key_value.weight', _KERNELS, 'heads'),
  Rule(f'{_X}.attention.query_key_value.bias', _BIASES, 'heads'),
  *_linear(f'{_X}.attention.dense', 'attention/proj'),
  *_linear(f'{_X}.mlp.dense_h_to_4h', 'ffn/up'),
  *_linear(f'{_X}.mlp.dense_4h_to_h', 'ffn/down'),
  *_norm('gpt_neox.final_layer_norm', 'final_norm'),
  Rule('embed_out.weight', ('head',)),
)

FAMILIES = {
  family.kind: family
  for family in (
    Family(
      'llama', 'LlamaForCausalLM', _llama, _llama_to_keys, _LLAMA_RULES, 'model.', _LLAMA_STORED
    ),
    Family(
      'mistral',
      'MistralForCausalLM',
      _mistral,
      _mistral_to_keys,
      _LLAMA_RULES,
      'model.',
      _LLAMA_STORED,
    ),
    Family(
      'qwen2', 'Qwen2ForCausalLM', _qwen2, _qwen2_to_keys, _LLAMA_RULES, 'model.', _LLAMA_STORED
    ),
    Family(
      'mixtral',
      'MixtralForCausalLM',
      _mixtral,
      _mixtral_to_keys,
      _MIXTRAL_RULES,
      'model.',
      _LLAMA_STORED,
    ),
    Family(
      'gpt2',
      'GPT2LMHeadModel',
      _gpt2,
      _gpt2_to_keys,
      _GPT2_RULES,
      'transformer.',
      ('.attn.bias', '.attn.masked_bias'),
    ),
    Family(
      'gpt_neox',
      'GPTNeoXForCausalLM',
      _gpt_neox,
      _gpt_neox_to_keys,
      _GPT_NEOX_RULES,
      'gpt_neox.',
      ('.attention.bias', '.attention.masked_bias', 'rotary_emb.inv_freq'),
    ),
  )
}


def match(model: ModelConfig) -> Family | None:
  """Return the first family that a model is exactly of, or None."""
  for family in FAMILIES.values():
    try:
      same = family.to_model(Keys(family.to_keys(model), 'the model'))
    except (AttributeError, KeyError, UserError):  # It has other parts, or sizes they cannot have.
      continue
    if _without_balance(same) == _without_balance(model):
      return family
  return None


def _without_balance(model: ModelConfig) -> ModelConfig:
  """Return the model without what acts in training only, which no file records."""

  def plain(name: str, layer: LayerConfig) -> LayerConfig:
    del name
    if not isinstance(layer.ffn, ExpertsConfig):
      return layer
    ffn = layer.ffn
    router = dataclasses.replace(ffn.router, jitter=0.0, z_loss=0.0)
    kept = ExpertsConfig(count=ffn.count, expert=ffn.expert, shared=ffn.shared, router=router)
    return dataclasses.replace(layer, ffn=dataclasses.replace(kept, dispatch=ffn.dispatch))

  return model.map_layers(plain)
