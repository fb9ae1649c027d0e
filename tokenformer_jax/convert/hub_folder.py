"""Describe a language model as a folder that transformers loads, and find the model of a folder.

The folder has the weights in safetensors files, the tokenizer, and the PyTorch files of the model
(`modeling_tokenformer.py`). Its `config.json` holds the section `model` of the run's config, so the
folder converts back to the same parameters.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import ModelConfig, matching, pattern
from tokenformer_jax.config.groups import without_records
from tokenformer_jax.config.model import layer_path
from tokenformer_jax.config.section import leaves
from tokenformer_jax.convert import families, tensor_files, tensor_layout
from tokenformer_jax.convert.tensor_layout import Rule, Weights
from tokenformer_jax.data.reading import read_json
from tokenformer_jax.errors import UserError
from tokenformer_jax.model import trunk
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs import saved_config

MODEL_TYPE = 'tokenformer'
CODE = ('modeling_tokenformer.py', 'modeling_tokenformer_layers.py')  # in this folder

# The values of keys with others that the files do not know, by the end of the key's path.
_VALUES = {
  'mixer.kind': ('softmax',),
  'wiring.kind': ('pre_norm', 'post_norm', 'skipless', 'parallel', 'sandwich'),
  'scaling.kind': ('none', 'linear', 'llama3', 'yarn'),
  'norm': ('plain', 'bias', 'affine', 'rms', 'rms_plain', 'rms_offset', 'none'),
}


def read_code() -> dict[str, str]:
  """Return the PyTorch files by name."""
  return {name: Path(__file__).with_name(name).read_text('utf-8') for name in CODE}


def check_can_load(model: ModelConfig) -> None:
  """Check that the PyTorch files compute what a language model does.

  They know a key of a layer if they name it.
  """
  known = {key for text in read_code().values() for key in re.findall(r"'(\w+)'", text)}
  for name, layer in families.without_training(model).layers.items():
    for leaf in leaves(layer):
      key = leaf.path.rpartition('.')[2]
      allowed = next((v for end, v in _VALUES.items() if f'.{leaf.path}'.endswith(f'.{end}')), None)
      if (key in known or leaf.value == leaf.default) and (not allowed or leaf.value in allowed):
        continue
      which = f'only {", ".join(map(repr, allowed))}' if allowed else f'only {leaf.default!r}'
      raise UserError(
        f'{layer_path(name)}.{leaf.path} is {leaf.value!r}; the PyTorch files that to-hf writes '
        f'know {which}, so this model can be used in JAX only'
      )


def layout(model: ModelConfig) -> tensor_layout.Layout:
  """Return every tensor of a model's folder by name; allocate nothing.

  A name is the path of the parameter, with the number of the layer: `blocks.3.ffn.keys`.
  """
  rules: dict[Rule, None] = {}
  stacks = {path.stack for path in trunk.layer_paths(model.repeats)}
  for path, _ in jax.tree_util.tree_leaves_with_path(define_lm(model).abstract):
    names = tuple(key.key for key in path)
    prefix = ''
    if names[0] == 'blocks':
      prefix, names = 'blocks.{layer}.', names[2 if names[1] in stacks else 1 :]
    rules[Rule(prefix + '.'.join(names), ('/'.join(names),))] = None
  return tensor_layout.layout(model, rules)


def describe(model: ModelConfig, ids: Mapping[str, int], dtype: str) -> dict[str, Any]:
  """Return the content of `config.json`; `ids` are its keys of special tokens."""
  return {
    'model_type': MODEL_TYPE,
    'architectures': ['TokenformerForCausalLM'],
    'auto_map': {
      'AutoConfig': 'modeling_tokenformer.TokenformerConfig',
      'AutoModelForCausalLM': 'modeling_tokenformer.TokenformerForCausalLM',
    },
    'dtype': dtype,
    'vocab_size': model.vocab_size,
    'hidden_size': model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': max(model.heads),
    'max_position_embeddings': model.max_length,
    **ids,
    'tie_word_embeddings': False,  # A tied head has no tensor of its own.
    'format': saved_config.FORMAT,
    'layers': pattern.names(model.repeats),
    'tokenformer': config_lib.to_json(matching.untied(without_records(model))),
  }


def is_ours(source: Path) -> bool:
  """Return whether a folder with a config.json is one of `to-hf` with our PyTorch files."""
  return read_json(source / 'config.json').get('model_type') == MODEL_TYPE


def find(source: Path) -> Weights | None:
  """Return the model and the tensors of a folder from `to-hf`; None: this is another folder."""
  file = source / 'config.json'
  if not is_ours(source):
    return None
  stored = read_json(file)
  saved_config.check_format(stored.get('format'), str(file))
  section = {'model': stored.get('tokenformer')}
  model = saved_config.parse(config_lib.Config, section, str(file)).model
  # Check what a stranger wrote before anything is made of it.
  data = config_lib.TextConfig(sequence_length=model.max_length or 1)
  config_lib.resolve(config_lib.to_config_dict(config_lib.Config(model=model, data=data)))
  weights = Weights(model, layout(model), tensor_files.find(source))
  weights.check(f'the model of {file}')
  return weights
