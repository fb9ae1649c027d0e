"""A tiny model of every family of the hub, and its folder, written without transformers."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import released
import safetensors.numpy
from tiny import normal_params

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.convert import families, tensor_files, tensor_layout
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params
from tokenformer_jax.runs.checkpoint import Deferred

_NEOX = {
  'vocab_size': 64,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'max_position_embeddings': 32,
}
_LLAMA = {**_NEOX, 'num_key_value_heads': 2}
_SCALED = {'factor': 8.0, 'original_max_position_embeddings': 16}
_LLAMA3 = {'rope_type': 'llama3', 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, **_SCALED}
_YARN = {'rope_type': 'yarn', **_SCALED}
_EXPERTS = {'num_experts': 4, 'moe_intermediate_size': 8, 'num_experts_per_tok': 2}
_WINDOWS = {'use_sliding_window': True, 'sliding_window': 5, 'max_window_layers': 1}
_GEMMA2 = {'head_dim': 6, 'query_pre_attn_scalar': 5, 'sliding_window': 5}
KEYS = {
  'llama': {**_LLAMA, 'rope_scaling': _LLAMA3},
  'mistral': {**_LLAMA, 'sliding_window': 5, 'head_dim': 6},
  'qwen2': {**_LLAMA, **_WINDOWS, 'tie_word_embeddings': True},
  'qwen3': {**_LLAMA, 'head_dim': 6, 'attention_bias': True, 'rope_scaling': _YARN},
  'smollm3': {**_LLAMA, 'no_rope_layer_interval': 2, 'attention_bias': True},
  'phi3': {**_LLAMA, 'partial_rotary_factor': 0.5, 'sliding_window': 5, 'pad_token_id': 0},
  'olmo2': {**_LLAMA, 'head_dim': 6, 'attention_bias': True},
  'gemma': {**_LLAMA, 'num_key_value_heads': 1, 'head_dim': 8, 'hidden_act': 'gelu'},
  'gemma2': {**_LLAMA, **_GEMMA2, 'final_logit_softcapping': 2.0, 'attn_logit_softcapping': 0.5},
  'gemma3_text': {
    **_LLAMA,
    **_GEMMA2,
    'num_hidden_layers': 3,
    'sliding_window_pattern': 3,
    'rope_theta': 1e4,
    'rope_local_base_freq': 100.0,
    'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
  },
  'mixtral': {**_LLAMA, 'num_local_experts': 4},
  'qwen2_moe': {**_LLAMA, **_EXPERTS, 'shared_expert_intermediate_size': 12},
  'qwen3_moe': {**_LLAMA, **_EXPERTS, 'head_dim': 6, 'norm_topk_prob': True},
  'gpt2': {'vocab_size': 64, 'n_embd': 16, 'n_layer': 2, 'n_head': 4, 'n_positions': 32},
  'gpt_neox': {**_NEOX, 'rotary_pct': 0.5},
}


def model(kind: str) -> ModelConfig:
  """The model of a family."""
  family = families.FAMILIES[kind]
  return family.to_model(Keys(KEYS[kind], 'the test', family.defaults))


@functools.cache
def params(kind: str) -> Params:
  """Parameters so large that every part matters."""
  return normal_params(define_lm(model(kind)), 0.2)


def write_model(
  folder: Path,
  model: ModelConfig,
  read: Callable[[tuple], np.ndarray],
  dtype: str = 'float32',
) -> None:
  """Writes config.json and the weights of a model of a family."""
  family, keys = families.match(model)
  layout = tensor_layout.layout(model, family.rules)
  shapes = {name: entry.shape for name, entry in layout.items()}
  tensor_files.write(folder, dtype, shapes, tensor_layout.stream(layout, read))
  (folder / 'config.json').write_text(json.dumps({'eos_token_id': 0, 'pad_token_id': 0, **keys}))


def made(params: Any) -> Any:
  """Returns deferred parameters as arrays."""

  def whole(array: Deferred) -> np.ndarray:
    return np.concatenate([chunk.reshape(-1) for _, chunk in array.chunks()]).reshape(array.shape)

  return jax.tree.map(whole, params)


def write(folder: Path, kind: str = 'llama', *, dtype: str = 'float32', **changes: Any) -> Path:
  """Writes a folder of random parameters, with changes of its config.json; None drops a key."""
  family = families.FAMILIES[kind]
  arrays = {
    tuple(key.key for key in path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params(kind))
  }
  folder.mkdir(parents=True)
  write_model(folder, model(kind), arrays.__getitem__, dtype)
  released.write_tokenizer(folder)
  values = {'architectures': [family.architecture], 'model_type': kind, **KEYS[kind], **changes}
  values = {key: value for key, value in values.items() if value is not None}
  (folder / 'config.json').write_text(json.dumps(values))
  return folder


def write_images(folder: Path, before: str = 'language_model.model.') -> Path:
  """Writes a model of images and text whose text model is that of `write`, as Gemma 3 4B.

  The names of its text model begin with `before`, by the version of transformers.
  """
  write(folder, 'gemma3_text')
  older = before.startswith('language_model')
  file = folder / 'model.safetensors'
  tensors = {
    name.replace('model.', before, 1) if name.startswith('model.') else f'language_model.{name}': t
    for name, t in safetensors.numpy.load_file(file).items()
  }
  for name in ('vision_tower.embeddings.weight', 'multi_modal_projector.norm.weight'):
    tensors[name if older else f'model.{name}'] = np.ones(3, np.float32)
  safetensors.numpy.save_file(tensors, file)
  text = json.loads((folder / 'config.json').read_text())
  values = {'architectures': ['Gemma3ForConditionalGeneration'], 'model_type': 'gemma3'}
  (folder / 'config.json').write_text(json.dumps({**values, 'text_config': text}))
  return folder
