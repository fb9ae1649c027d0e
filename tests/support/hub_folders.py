"""Tiny folders in the hub's layout, written without transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import released

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.convert import families, tensor_files, tensor_layout
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs.checkpoint import Deferred

_NEOX = {
  'vocab_size': 64,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'max_position_embeddings': 32,
}
_LLAMA = {**_NEOX, 'num_key_value_heads': 2}
_GPT2 = {'vocab_size': 64, 'n_embd': 16, 'n_layer': 2, 'n_head': 2, 'n_positions': 32}
KEYS = {
  'llama': _NEOX,
  'mistral': {**_LLAMA, 'sliding_window': 5},
  'qwen2': {
    **_LLAMA,
    'use_sliding_window': True,
    'sliding_window': 5,
    'max_window_layers': 1,
    'tie_word_embeddings': True,
  },
  'qwen3': {**_LLAMA, 'num_key_value_heads': 1, 'head_dim': 6, 'attention_bias': True},
  'qwen3_moe': {**_LLAMA, 'num_experts': 3, 'moe_intermediate_size': 8, 'norm_topk_prob': True},
  'qwen2_moe': {
    **_LLAMA,
    'num_experts': 3,
    'moe_intermediate_size': 8,
    'shared_expert_intermediate_size': 12,
  },
  'gemma': {**_LLAMA, 'num_key_value_heads': 1, 'head_dim': 8, 'hidden_act': 'gelu'},
  'mixtral': {**_LLAMA, 'num_local_experts': 3},
  'gpt2': _GPT2,
  'gpt_neox': {**_NEOX, 'rotary_pct': 0.5},
}


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
  (folder / 'config.json').write_text(json.dumps({'eos_token_id': 0, **keys}))


def made(params: Any) -> Any:
  """Returns deferred parameters as arrays."""

  def whole(array: Deferred) -> np.ndarray:
    return np.concatenate([chunk.reshape(-1) for _, chunk in array.chunks()]).reshape(array.shape)

  return jax.tree.map(whole, params)


def write(folder: Path, kind: str = 'llama', *, dtype: str = 'float32', **changes: Any) -> Path:
  """Writes a folder of random parameters, with changes of its config.json; None drops a key."""
  family = families.FAMILIES[kind]
  model = family.to_model(Keys(KEYS[kind], 'the test', family.defaults))
  rng = np.random.default_rng(0)
  arrays = {
    tuple(key.key for key in path): rng.normal(size=leaf.shape).astype(np.float32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(define_lm(model).abstract)
  }
  folder.mkdir(parents=True)
  write_model(folder, model, arrays.__getitem__, dtype)
  released.write_tokenizer(folder)
  values = {'architectures': [family.architecture], 'model_type': kind, **KEYS[kind], **changes}
  values = {key: value for key, value in values.items() if value is not None}
  (folder / 'config.json').write_text(json.dumps(values))
  return folder
