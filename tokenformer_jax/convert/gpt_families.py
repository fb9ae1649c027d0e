"""GPT-2 and GPT-NeoX (Pythia) in the hub's layout."""

from tokenformer_jax.config import (
  DenseConfig,
  LayerConfig,
  LMConfig,
  MLPConfig,
  NoPositionsConfig,
  ParallelConfig,
  PreNormConfig,
  SoftmaxConfig,
)
from tokenformer_jax.convert.family import (
  ACTIVATIONS,
  Family,
  check_heads,
  check_rotated,
  linear,
  norm,
  rotary,
)
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.tensor_layout import Rule

_KERNELS = tuple(f'attention/{name}/kernel' for name in ('query', 'key', 'value'))
_BIASES = tuple(f'attention/{name}/bias' for name in ('query', 'key', 'value'))


def _gpt2(keys: Keys) -> LMConfig:
  keys.only('scale_attn_weights', True)
  keys.only('scale_attn_by_inverse_layer_idx', False)
  keys.only('add_cross_attention', False)
  width, heads = keys.whole('n_embd', 768), keys.whole('n_head', 12)
  check_heads(keys, 'n_head', width, heads)
  activation = keys.choice('activation_function', ACTIVATIONS, 'gelu_new')
  mlp = MLPConfig(keys.whole('n_inner', 4 * width), bias=True, activation=activation)
  dense = DenseConfig(bias=True)
  mixer = SoftmaxConfig(heads=heads, positions=NoPositionsConfig(), qkv=dense, proj=dense)
  return LMConfig(
    pattern=f'layer*{keys.whole("n_layer", 12)}',
    width=width,
    layer=LayerConfig(mixer=mixer, ffn=mlp, norm='affine'),
    vocab_size=keys.whole('vocab_size', 50257),
    norm_epsilon=keys.number('layer_norm_epsilon', 1e-5),
    position_embedding='learned',
    max_length=keys.whole('n_positions', 1024),
    tied_head=keys.flag('tie_word_embeddings', True),
  )


def _gpt_neox(keys: Keys) -> LMConfig:
  width, heads = keys.whole('hidden_size'), keys.whole('num_attention_heads')
  check_heads(keys, 'num_attention_heads', width, heads)
  positions = rotary(
    keys,
    fraction=keys.number('rotary_pct', keys.number('partial_rotary_factor', 0.25)),
    base=keys.number('rotary_emb_base', 10000.0),
  )
  check_rotated(keys, 'rotary_pct', width // heads, positions.fraction)
  dense = DenseConfig(bias=keys.flag('attention_bias', True))
  mixer = SoftmaxConfig(heads=heads, positions=positions, qkv=dense, proj=dense)
  activation = keys.choice('hidden_act', ACTIVATIONS, 'gelu')
  mlp = MLPConfig(keys.whole('intermediate_size'), bias=True, activation=activation)
  parallel = keys.flag('use_parallel_residual', True)
  wiring = ParallelConfig(gains=False, skip=True, two_norms=True) if parallel else PreNormConfig()
  return LMConfig(
    pattern=f'layer*{keys.whole("num_hidden_layers")}',
    width=width,
    layer=LayerConfig(mixer=mixer, ffn=mlp, norm='affine', wiring=wiring),
    vocab_size=keys.whole('vocab_size'),
    norm_epsilon=keys.number('layer_norm_eps', 1e-5),
    max_length=keys.whole('max_position_embeddings', 2048),
    tied_head=keys.flag('tie_word_embeddings', False),
  )


_H = 'transformer.h.{layer}'
_GPT2_RULES = (
  Rule('transformer.wte.weight', ('embedding',)),
  Rule('transformer.wpe.weight', ('positions',)),
  *norm(f'{_H}.ln_1', 'attention_norm'),
  Rule(f'{_H}.attn.c_attn.weight', _KERNELS),
  Rule(f'{_H}.attn.c_attn.bias', _BIASES),
  *linear(f'{_H}.attn.c_proj', 'attention/proj', 'same'),
  *norm(f'{_H}.ln_2', 'ffn_norm'),
  *linear(f'{_H}.mlp.c_fc', 'ffn/up', 'same'),
  *linear(f'{_H}.mlp.c_proj', 'ffn/down', 'same'),
  *norm('transformer.ln_f', 'final_norm'),
  Rule('lm_head.weight', ('head',)),
)
_X = 'gpt_neox.layers.{layer}'
_GPT_NEOX_RULES = (
  Rule('gpt_neox.embed_in.weight', ('embedding',)),
  *norm(f'{_X}.input_layernorm', 'attention_norm'),
  *norm(f'{_X}.post_attention_layernorm', 'ffn_norm'),
  Rule(f'{_X}.attention.query_key_value.weight', _KERNELS, 'heads'),
  Rule(f'{_X}.attention.query_key_value.bias', _BIASES, 'heads'),
  *linear(f'{_X}.attention.dense', 'attention/proj'),
  *linear(f'{_X}.mlp.dense_h_to_4h', 'ffn/up'),
  *linear(f'{_X}.mlp.dense_4h_to_h', 'ffn/down'),
  *norm('gpt_neox.final_layer_norm', 'final_norm'),
  Rule('embed_out.weight', ('head',)),
)

GPT_FAMILIES = (
  Family('gpt2', 'GPT2LMHeadModel', _gpt2, _GPT2_RULES),
  Family('gpt_neox', 'GPTNeoXForCausalLM', _gpt_neox, _GPT_NEOX_RULES),
)
