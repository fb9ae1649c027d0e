"""A tiny random model of every family of the hub, with the options that tell families apart."""

import functools
from pathlib import Path

import hub_folders
import jax
import jax.numpy as jnp
import numpy as np
import released

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.convert import families
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.to_run import to_jax
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import Params

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
_EXPERTS = {'num_experts': 4, 'moe_intermediate_size': 8, 'num_experts_per_tok': 2}
_WINDOWS = {'use_sliding_window': True, 'sliding_window': 5, 'max_window_layers': 1}
KEYS = {
  'llama': {**_LLAMA, 'rope_scaling': _LLAMA3},
  'mistral': {**_LLAMA, 'sliding_window': 5, 'head_dim': 6},
  'qwen2': {**_LLAMA, **_WINDOWS, 'tie_word_embeddings': True},
  'qwen3': {**_LLAMA, 'head_dim': 6, 'rope_scaling': {'rope_type': 'yarn', **_SCALED}},
  'gemma': {**_LLAMA, 'num_key_value_heads': 1, 'head_dim': 8},
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
  rng = np.random.default_rng(0)
  abstract = define_lm(model(kind)).abstract
  return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) * 0.2, p.dtype), abstract)


def bring(root: Path, kind: str) -> Path:
  """Writes the folder of a family in `root` and makes a run of it; returns the run's directory."""
  folder = root / 'folder'
  folder.mkdir(parents=True)

  def read(path: tuple) -> np.ndarray:
    array = params(kind)
    for key in path:
      array = array[key]
    return np.asarray(array)

  hub_folders.write_model(folder, model(kind), read)
  released.write_tokenizer(folder)
  to_jax(folder, root / 'run')
  return root / 'run'
