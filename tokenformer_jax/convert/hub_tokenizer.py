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
  and in `generate`; the tokenizer of a folder of the hub goes back as it came. `stored` is the
  tokenizer in a checkpoint, with its chat template.
  """
  own = tokenizers.from_json(stored)
  content = _bytes_as_bpe() if stored['kind'] == 'bytes' else copy.deepcopy(stored['tokenizer'])
  known = hf.Tokenizer.from_str(json.dumps(content))

  def to_text(id_: int) -> str:
    return known.id_to_token(id_) or ''

  text, first = to_text(own.end_of_document), ''.join(map(to_text, own.begin))
  named = {name: to_text(id_) for name, id_ in own.special_ids.items()}
  is_ours = own.begin == (own.end_of_document,)
  if is_ours:
    _begin_with_end(content, text, own.end_of_document)
  settings: dict[str, Any] = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    **({'bos_token': first} if first else {}),
    'pad_token': text,
    **named,
    **({'bos_token': text} if is_ours else {}),
    'eos_token': text,
    'padding_side': 'left',
    'clean_up_tokenization_spaces': False,
    'model_input_names': ['input_ids', 'attention_mask'],
    'model_max_length': max_length,
  }
  if chat := stored.get('chat'):
    settings |= chat['tokens']
    # A conversation begins as a text does. Templates that come from a folder write that themselves.
    written = first if is_ours or 'bos_token' not in chat['source'] else ''
    begin = f'{{{{- {json.dumps(written)} }}}}' if written else ''
    settings['chat_template'] = begin + chat['source']
  return {'tokenizer.json': content, 'tokenizer_config.json': settings}


def _begin_with_end(content: dict[str, Any], text: str, end: int) -> None:
  """Have a tokenizer begin a text with the end of a document, a token with an id and a text."""
  begin = {
    'type': 'TemplateProcessing',
    'single': [_special(text, 0), _sequence('A', 0)],
    'pair': [_special(text, 0), _sequence('A', 0), _sequence('B', 1)],
    'special_tokens': {text: {'id': text, 'ids': [end], 'tokens': [text]}},
  }
  was = content.get('post_processor')
  if was is not None and was['type'] == 'ByteLevel':
    content['post_processor'] = {'type': 'Sequence', 'processors': [was, begin]}
  elif was is None or begin not in was.get('processors', ()):
    content['post_processor'] = begin


def special_ids(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
  """Return the keys of a config.json with the ids that begin, end and pad texts."""
  end, named = tokenizer.end_of_document, tokenizer.special_ids
  ids = {'bos_token_id': tokenizer.begin[0]} if tokenizer.begin else {}
  if 'bos_token' in named and tokenizer.begin != (end,):
    ids['bos_token_id'] = named['bos_token']
  return {**ids, 'eos_token_id': end, 'pad_token_id': named.get('pad_token', end)}


def end_ids(stored: dict[str, Any]) -> list[int]:
  """Return the ids that end a text: the tokenizer's, and that of an answer in a chat."""
  ids = list(tokenizers.from_json(stored).ends)
  token = stored.get('chat', {}).get('tokens', {}).get('eos_token')
  if token and stored['kind'] != 'bytes':
    end = hf.Tokenizer.from_str(json.dumps(stored['tokenizer'])).token_to_id(token)
    ids += [] if end is None or end in ids else [end]
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

  The end of document has the id of the byte 0xFF, which UTF-8 never uses.
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
