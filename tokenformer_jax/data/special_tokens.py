"""Read the special tokens that a folder of the hub names, with the precedence of `transformers`."""

import json
from pathlib import Path
from typing import Any

from tokenformer_jax.errors import UserError

_END = '<|endoftext|>'
_LLAMA = {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}
_GPT2 = {'bos_token': _END, 'eos_token': _END, 'unk_token': _END}
# The tokens of a class of tokenizers that no file names.
_DEFAULTS = {
  'LlamaTokenizer': _LLAMA,
  'CodeLlamaTokenizer': _LLAMA,
  'GemmaTokenizer': {f'{name}_token': f'<{name}>' for name in ('bos', 'eos', 'unk', 'pad')},
  'GPT2Tokenizer': _GPT2,
  'GPTNeoXTokenizer': {**_GPT2, 'pad_token': '<|padding|>'},
  'Qwen2Tokenizer': {'eos_token': _END, 'unk_token': _END, 'pad_token': _END},
}
_QWEN = dict.fromkeys(('qwen2', 'qwen2_moe', 'qwen3', 'qwen3_moe'), 'Qwen2Tokenizer')
# The class of a `model_type` whose folder names none, and where the name is not heeded.
_CLASSES = {'gemma': 'GemmaTokenizer', 'gpt2': 'GPT2Tokenizer', 'gpt_neox': 'GPTNeoXTokenizer'}
_CLASSES |= _QWEN | dict.fromkeys(('gemma2', 'gemma3', 'gemma3_text'), 'GemmaTokenizer')
_FIXED = {'mistral': '', 'mixtral': '', 'phi3': '', 'qwen2': 'Qwen2Tokenizer'}


def read(folder: Path) -> dict[str, str]:
  """Return the special tokens of a folder by their names, such as `eos_token`."""
  own = read_json(folder / 'tokenizer_config.json')
  named = own
  if 'added_tokens_decoder' not in own:  # A file of older versions, which newer ones do not read.
    named = {**own, **read_json(folder / 'special_tokens_map.json')}
  tokens = {name: token for name, token in named.items() if name.endswith('_token')}
  if isinstance(extra := named.get('extra_special_tokens'), dict):
    tokens |= extra
  tokens = {**_defaults(folder, own), **tokens}
  texts = {k: v.get('content') if isinstance(v, dict) else v for k, v in tokens.items()}
  return {name: text for name, text in texts.items() if isinstance(text, str)}


def end_ids(folder: Path) -> list[int]:
  """Return the ids that end texts by `config.json`, else by `generation_config.json`."""
  for name in ('config.json', 'generation_config.json'):
    value = read_json(folder / name).get('eos_token_id')
    ids = value if isinstance(value, list) else [value]
    if ids := [id_ for id_ in ids if type(id_) is int and 0 <= id_ < 2**31]:
      return ids
  return []


def read_json(file: Path) -> dict[str, Any]:
  """Return the object in a file; empty: there is no file, or it holds something else."""
  if not file.is_file():
    return {}
  try:
    values = json.loads(file.read_text('utf-8'))
  except (OSError, ValueError, RecursionError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(f'{file} is not valid JSON ({reason!s:.80}); download it again') from error
  return values if isinstance(values, dict) else {}


def _defaults(folder: Path, own: dict[str, Any]) -> dict[str, str]:
  config = read_json(folder / 'config.json')
  kind = str(config.get('model_type'))
  named = own.get('tokenizer_class') or config.get('tokenizer_class') or _CLASSES.get(kind)
  named = _FIXED.get(kind, str(named).removesuffix('Fast'))
  file = folder / 'tokenizer.json'
  if named == 'LlamaTokenizer' and file.is_file() and b'"ByteLevel"' in file.read_bytes():
    return {}
  return _DEFAULTS.get(named, {})
