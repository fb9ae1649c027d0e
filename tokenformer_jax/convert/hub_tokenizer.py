"""Write a run's tokenizer as the files that transformers reads."""

import copy
import json
from pathlib import Path
from typing import Any

import tokenizers as hf

from tokenformer_jax.data import tokenizers

_BYTES_END = tokenizers.END_OF_DOCUMENT


def to_files(stored: dict[str, Any], max_length: int) -> dict[str, Any]:
  """Return the JSON content of the tokenizer's files by name.

  Encoding with special tokens begins a text with the end of the document before it, as in training
  and in `generate`. `stored` is the tokenizer in a checkpoint, with its chat template.
  """
  own = tokenizers.from_json(stored)
  content = _bytes_as_bpe() if stored['kind'] == 'bytes' else copy.deepcopy(stored['tokenizer'])
  text = hf.Tokenizer.from_str(json.dumps(content)).id_to_token(own.end_of_document)
  begin = {
    'type': 'TemplateProcessing',
    'single': [_special(text, 0), _sequence('A', 0)],
    'pair': [_special(text, 0), _sequence('A', 0), _sequence('B', 1)],
    'special_tokens': {text: {'id': text, 'ids': [own.end_of_document], 'tokens': [text]}},
  }
  was = content.get('post_processor')
  if was is not None and was['type'] == 'ByteLevel':
    content['post_processor'] = {'type': 'Sequence', 'processors': [was, begin]}
  elif was is None or begin not in was.get('processors', ()):
    content['post_processor'] = begin
  settings: dict[str, Any] = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': text,
    'eos_token': text,
    'pad_token': text,
    'padding_side': 'left',
    'clean_up_tokenization_spaces': False,
    'model_input_names': ['input_ids', 'attention_mask'],
    'model_max_length': max_length,
  }
  if chat := stored.get('chat'):
    settings |= chat['tokens']
    # A conversation begins with the end of the document before it.
    settings['chat_template'] = f'{{{{- {json.dumps(text)} }}}}{chat["source"]}'
  return {'tokenizer.json': content, 'tokenizer_config.json': settings}


def end_ids(stored: dict[str, Any]) -> list[int]:
  """Return the ids that end a text: the end of a document, and that of an answer in a chat."""
  ids = [tokenizers.from_json(stored).end_of_document]
  token = stored.get('chat', {}).get('tokens', {}).get('eos_token')
  if token and stored['kind'] != 'bytes':
    found = hf.Tokenizer.from_str(json.dumps(stored['tokenizer'])).token_to_id(token)
    ids += [] if found is None or found in ids else [found]
  return ids


def is_of_bytes(file: Path) -> bool:
  """Return whether a `tokenizer.json` is that of `to_files` for a tokenizer of bytes."""
  try:
    return json.loads(file.read_text('utf-8')) == to_files({'kind': 'bytes'}, 0)[file.name]
  except (OSError, ValueError, RecursionError):
    return False  # whoever loads it says why


def _special(text: str, type_id: int) -> dict[str, Any]:
  return {'SpecialToken': {'id': text, 'type_id': type_id}}


def _sequence(name: str, type_id: int) -> dict[str, Any]:
  return {'Sequence': {'id': name, 'type_id': type_id}}


def _bytes_as_bpe() -> dict[str, Any]:
  """Return the tokenizer of bytes as a BPE without merges, whose ids are the bytes.

  The end of document takes the place of the byte 0xFF, which UTF-8 never uses.
  """
  byte_level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  # The library writes printable bytes as themselves, and the n-th other byte as chr(256 + n).
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in printable]
  letters = {byte: chr(byte) for byte in printable}
  letters |= {byte: chr(256 + n) for n, byte in enumerate(others)}
  letters[0xFF] = _BYTES_END
  bpe = hf.models.BPE({letter: byte for byte, letter in letters.items()}, [])
  tokenizer = hf.Tokenizer(bpe)
  tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, hf.decoders.ByteLevel()
  tokenizer.add_special_tokens([_BYTES_END])
  return json.loads(tokenizer.to_str())
