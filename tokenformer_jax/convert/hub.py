"""Find the model of a folder in the hub's layout: config.json, safetensors files, a tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenformer_jax.config import LMConfig
from tokenformer_jax.convert import families, tensor_files, tensor_layout
from tokenformer_jax.convert.family import Family
from tokenformer_jax.convert.hub_keys import Keys, read_json
from tokenformer_jax.convert.tensor_layout import Weights
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
  tie_encoder_decoder cache_implementation sliding_window_size hidden_activation
"""
# Keys that make it another model: with the first, transformers takes a Mistral for a Ministral.
_REFUSED = {'mistral': ('layer_types',), 'gpt_neox': ('head_dim',)}
# Ends of the names of tensors that hold no parameters: masks and frequencies.
_NO_PARAMETERS = (
  *('.attn.bias', '.attn.masked_bias', '.attention.bias', '.attention.masked_bias'),
  'rotary_emb.inv_freq',
)
# Models of images and text by their architecture: that of their text model, which alone is
# converted. Its keys are in `text_config`, and the names of its tensors begin with `_TEXT`.
_TEXT_MODELS = {'Gemma3ForConditionalGeneration': 'Gemma3ForCausalLM'}
_TEXT = 'language_model.'


def is_folder(source: Path) -> bool:
  """Return whether a path is a folder in the hub's layout, by its config.json."""
  file = source / _CONFIG
  return file.is_file() and bool({'model_type', 'architectures'} & set(read_json(file)))


def find_model(source: Path) -> tuple[Family, LMConfig, list[str]]:
  """Return the family and the model of a folder, and the keys of its config that are not known."""
  file = source / _CONFIG
  values = _text_model(read_json(file), file)
  family = _family(values, file)
  keys = Keys(values, str(file), family.defaults)
  keys.only('quantization_config')
  keys.only('is_encoder_decoder', False)
  keys.only('is_causal', True)
  for name in _REFUSED.get(family.kind, ()):
    keys.only(name)
  model = family.to_model(keys)
  return family, model, keys.unread(_IGNORED.split())


def find(source: Path) -> Weights:
  """Return the model and the tensors of a folder; a message names its keys that are not known."""
  family, model, unread = find_model(source)
  tensors = tensor_files.find(source, skipped=lambda name: name.endswith(_NO_PARAMETERS))
  of_text = {name.removeprefix(_TEXT): t for name, t in tensors.items() if name.startswith(_TEXT)}
  messages.say(
    f'{source} is a {family.architecture}'
    + (' with parts for images, which are left out' if of_text else '')
    + (f'; not read, because not known: {", ".join(unread)}' if unread else '')
  )
  tensors = of_text or tensors
  if not any(name.startswith(family.prefix) for name in tensors):  # a model without its head
    tensors = {f'{family.prefix}{name}': tensor for name, tensor in tensors.items()}
  layout = tensor_layout.layout(model, family.rules)
  if model.tied_head:  # Files of PyTorch may hold it all the same.
    heads = [rule.name for rule in family.rules if rule.paths == ('head',)]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in heads}
  weights = Weights(model, layout, tensors, family.kind)
  weights.check(f'a {family.architecture} of this {_CONFIG}')
  return weights


def _text_model(values: dict[str, Any], file: Path) -> dict[str, Any]:
  """Return the keys of the text model if there are several; else the values themselves."""
  named = values.get('architectures')
  text_model = _TEXT_MODELS.get(named[0]) if isinstance(named, list) and named else None
  if text_model is None:
    return values
  text = values.get('text_config')
  if not isinstance(text, dict):
    raise UserError(f'{file} has no table text_config, the keys of its text model; fetch it again')
  own = {name: values.get(name) for name in ('tie_word_embeddings', 'quantization_config')}
  return {**text, **own, 'architectures': [text_model]}


def _family(values: Mapping[str, Any], file: Path) -> Family:
  named, code = values.get('architectures'), values.get('auto_map')
  architecture = named[0] if isinstance(named, list) and named else ''
  known = {family.architecture: family for family in families.FAMILIES.values()}
  theirs = code.get('AutoModelForCausalLM') if isinstance(code, dict) else None
  # Where transformers has a class of this name, it uses its own unless told to trust the author's.
  has_own = architecture in known and f'{theirs}'.endswith(f'.{architecture}')
  if code and not has_own:
    raise UserError(
      f'{file} has auto_map: its model is computed by Python code of its author, which is never '
      'run here; convert a model of a family that transformers has itself'
    )
  # Files of older models have model_type alone.
  family = known.get(architecture) if architecture else None
  if not architecture and isinstance(values.get('model_type'), str):
    family = families.FAMILIES.get(values['model_type'])
  if family is None:
    what = architecture or values.get('model_type')
    raise UserError(
      f'{file} is of a {what!r:.80}, which cannot be converted; it must be one of '
      f'{", ".join(sorted(known))}'
    )
  return family
