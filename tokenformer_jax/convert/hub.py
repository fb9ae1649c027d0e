"""Find the model of a folder in the hub's layout: config.json, safetensors files, a tokenizer."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer_jax.config import LMConfig
from tokenformer_jax.convert import families, tensor_files, tensor_layout
from tokenformer_jax.convert.family import Family
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.convert.tensor_layout import Weights
from tokenformer_jax.data.reading import read_json
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import messages

_CONFIG = 'config.json'
# Keys of a config.json that do not change what a trained model computes.
_IGNORED = """
  architectures model_type torch_dtype dtype transformers_version _name_or_path tokenizer_class
  use_cache bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id initializer_range
  attention_dropout hidden_dropout classifier_dropout attn_pdrop embd_pdrop resid_pdrop
  resid_dropout embd_dropout summary_activation summary_first_dropout summary_proj_to_labels
  summary_type summary_use_proj task_specific_params gradient_checkpointing pretraining_tp n_ctx
  reorder_and_upcast_attn output_attentions output_hidden_states output_router_logits return_dict
  router_aux_loss_coef router_jitter_noise id2label label2id problem_type chunk_size_feed_forward
  auto_map finetuning_task intermediate_size max_window_layers sliding_window rope_theta is_decoder
  tie_encoder_decoder cache_implementation sliding_window_size hidden_activation name_or_path
  attn_implementation _attn_implementation _attn_implementation_autoset _commit_hash num_labels
  is_llama_config rope_interleaved use_mrope tie_last_hidden_states max_sequence_length _num_labels
  attention_probs_dropout_prob hidden_dropout_prob
"""
# Keys that make it another model, in all families and in some: layer_types make a Ministral.
_REFUSED = {
  '': ('quantization_config', 'per_layer_config', 'transformers_weights'),
  'mistral': ('layer_types',),
  'gpt_neox': ('head_dim',),
}
# Ends of the names of tensors that hold no parameters: masks and frequencies.
_NO_PARAMETERS = (
  *('.attn.bias', '.attn.masked_bias', '.attention.bias', '.attention.masked_bias'),
  'rotary_emb.inv_freq',
)
# Kinds of models of images and text: that of their text model, which alone is converted. Its keys
# are in `text_config`.
_TEXT_MODELS = {'gemma3': 'gemma3_text'}
_KINDS = {family.architecture: kind for kind, family in families.FAMILIES.items()}
_KINDS['Gemma3ForConditionalGeneration'] = 'gemma3'
# Names in models of images and text, of older and newer versions of transformers.
_TEXT = re.compile(r'^(?:model\.)?language_model\.(?:model\.)?')
IMAGES = re.compile(r'(?:model\.)?(?:vision_tower|multi_modal_projector)\.')
# Other names of keys of GPT-2, which win in transformers.
_ALIASES = {'hidden_size': 'n_embd', 'max_position_embeddings': 'n_positions'}
_ALIASES |= {'num_hidden_layers': 'n_layer', 'num_attention_heads': 'n_head'}
# Keys that may be null in transformers, as absent or with a meaning of their own.
_NULLABLE = """
  head_dim num_key_value_heads n_inner sliding_window layer_types no_rope_layers mlp_only_layers
  attn_logit_softcapping final_logit_softcapping partial_rotary_factor rope_scaling rope_parameters
  use_bidirectional_attention
"""


def is_folder(source: Path) -> bool:
  """Return whether a path is a folder in the hub's layout, by its config.json."""
  file = source / _CONFIG
  return file.is_file() and bool({'model_type', 'architectures'} & set(read_json(file)))


def find_model(source: Path) -> tuple[Family, LMConfig, list[str]]:
  """Return the family and the model of a folder, and the keys of its config that are not known."""
  file = source / _CONFIG
  values = read_json(file)
  kind = _kind(values, file)
  if kind in _TEXT_MODELS:
    values = _text_model(values, file)
  family = families.FAMILIES[_TEXT_MODELS.get(kind, kind)]
  if kind == 'gpt2':
    values |= {own: values.pop(name) for name, own in _ALIASES.items() if name in values}
  keys = Keys(values, str(file), family.defaults)
  for name in (*_REFUSED[''], *_REFUSED.get(kind, ())):
    keys.only(name)
  keys.only('is_encoder_decoder', False)
  keys.only('is_causal', True)
  for name in ('dtype', 'torch_dtype'):
    keys.only(name, *tensor_files.DTYPES, 'float64')
  model = family.to_model(keys)
  for name in sorted(keys.read - {*_NULLABLE.split()} | {'head_dim'} & family.defaults.keys()):
    if values.get(name, ...) is None:
      raise keys.refusal(name, 'absent or a value of its type, as in transformers')
  return family, model, keys.unread(_IGNORED.split())


def find(source: Path) -> Weights:
  """Return the model and the tensors of a folder; a message names its keys that are not known."""
  family, model, unread = find_model(source)
  has_images = _kind(read_json(source / _CONFIG), source / _CONFIG) in _TEXT_MODELS
  stored = tensor_files.find(source, skipped=lambda name: name.endswith(_NO_PARAMETERS))
  tensors = {text_name(n): t for n, t in stored.items() if not (has_images and IMAGES.match(n))}
  messages.say(
    f'{source} is a {family.architecture}'
    + (' with parts for images, which are left out' if len(tensors) < len(stored) else '')
    + (f'; not read, because not known: {", ".join(unread)}' if unread else '')
  )
  names = {rule.paths[0]: rule.name for rule in family.rules}
  head, embedding = names['head'], names['embedding']
  if not any(name.startswith(family.prefix) for name in tensors):  # a model without its head
    tensors = {n if n == head else f'{family.prefix}{n}': t for n, t in tensors.items()}
  if model.tied_head and head in tensors:  # as in files of PyTorch
    tensors.setdefault(embedding, tensors[head])
    if np.array_equal(tensors[head].read(), tensors[embedding].read()):
      del tensors[head]
    else:
      model = dataclasses.replace(model, tied_head=False)
      messages.say(
        f'{source / _CONFIG} has tie_word_embeddings=true, and {head} is not {embedding}: the '
        'model has a head of its own, as in transformers'
      )
  layout = tensor_layout.layout(model, family.rules)
  in_class = {text_name(name): _name_in_class(name, has_images) for name in (*tensors, *stored)}
  weights = Weights(model, layout, tensors, family.kind, in_class)
  weights.check(f'a {family.architecture} of this {_CONFIG}')
  return weights


def text_name(name: str) -> str:
  """Return the name of a tensor or module as in a language model alone."""
  return _TEXT.sub('model.', name).replace('model.lm_head', 'lm_head')


def _text_model(values: dict[str, Any], file: Path) -> dict[str, Any]:
  """Return the keys of the text model in a model of images and text."""
  text = values.get('text_config')
  if not isinstance(text, dict):
    raise UserError(f'{file} has no table text_config, the keys of its text model; fetch it again')
  text = {name: value for name, value in text.items() if name != 'tie_word_embeddings'}
  own = ('tie_word_embeddings', 'quantization_config', 'dtype', 'torch_dtype')
  return text | {name: values[name] for name in own if name in values}


def _kind(values: Mapping[str, Any], file: Path) -> str:
  """Return the model_type of a folder that can be converted.

  Files of older models may have architectures alone.
  """
  named, code, kind = (values.get(name) for name in ('architectures', 'auto_map', 'model_type'))
  architecture = str(named[0]) if isinstance(named, list) and named and named[0] else None
  theirs = code.get('AutoModelForCausalLM') if isinstance(code, dict) else None
  # Where transformers has a class of this name, it uses its own unless told to trust the author's.
  has_own = architecture in _KINDS and f'{theirs}'.endswith(f'.{architecture}')
  if code and not has_own:
    raise UserError(
      f'{file} has auto_map: its model is computed by Python code of its author, which is never '
      'run here; convert a model of a family that transformers has itself'
    )
  kind = _KINDS.get(architecture or '') if kind is None else kind
  if not isinstance(kind, str) or kind not in _KINDS.values():
    raise UserError(
      f'{file} is of a {kind or architecture!r:.80}, which cannot be converted; it must be one of '
      f'{", ".join(sorted(_KINDS))}'
    )
  if architecture is not None and _KINDS.get(architecture) != kind:
    raise UserError(
      f'{file} has model_type={kind!r}, by which transformers takes a model, and architectures='
      f'{named!r:.80} of another; correct the one that is wrong'
    )
  return kind


def _name_in_class(name: str, has_images: bool) -> str:
  """Return the name of a tensor in the model that transformers makes of the folder."""
  if not has_images:
    return text_name(name)
  if IMAGES.match(name):
    return f'model.{name.removeprefix("model.")}'
  return text_name(name).replace('model.', 'model.language_model.', 1)
