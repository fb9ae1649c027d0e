"""Write a run's tokenizer as the files that transformers reads."""

import contextlib
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf

from tokenformer_jax.convert import folder_files
from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.chat_template import Template
from tokenformer_jax.data.reading import read_json
from tokenformer_jax.errors import UserError

_BYTES_END = tokenizers.END_OF_DOCUMENT
_QUESTION = [{'role': 'user', 'content': 'Hi'}]


def to_files(stored: dict[str, Any], max_length: int) -> dict[str, Any]:
  """Return the content of the tokenizer's files by name: bytes as they came, or JSON.

  Encoding with special tokens begins a text with the end of the document before it, as in training
  and in `generate`; the files of a folder of the hub go back as they came, but for a template that
  the run learned from. `stored` is the tokenizer in a checkpoint, with its chat template.
  """
  own, files = tokenizers.from_json(stored), folder_files.unpack(stored)
  if folder_files.TOKENIZER in files:
    return _with_template_of_run(files, stored, own)
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
    settings['chat_template'] = _template(chat, settings, own, known)
  return files | {folder_files.TOKENIZER: content, folder_files.SETTINGS: settings}


def _with_template_of_run(
  files: dict[str, Any], stored: dict[str, Any], own: tokenizers.Tokenizer
) -> dict[str, Any]:
  """Return the files of a folder, with the chat template that the run learned from in its place."""
  if not _has_own_template(stored):
    return files
  known = hf.Tokenizer.from_str(json.dumps(stored['tokenizer']))
  template = _template(stored['chat'], {}, own, known)
  settings = folder_files.read(stored, folder_files.SETTINGS)
  kept = {name: content for name, content in files.items() if not name.endswith('.jinja')}
  settings = {**stored['chat']['tokens'], **settings, 'chat_template': template}
  return kept | {folder_files.SETTINGS: settings}


def _has_own_template(stored: Mapping[str, Any]) -> bool:
  """Return whether a run has a chat template that is in none of the files that it came with."""
  if 'chat' not in stored:
    return False
  named = folder_files.read(stored, folder_files.SETTINGS).get('chat_template')
  files = folder_files.unpack(stored).items()
  came = [named, *(text.decode() for name, text in files if name.endswith('.jinja'))]
  return json.dumps(stored['chat']['source']) not in json.dumps(came)


def _template(
  chat: Mapping[str, Any],
  settings: Mapping[str, Any],
  own: tokenizers.Tokenizer,
  known: hf.Tokenizer,
) -> str | list[dict[str, str]]:
  """Return a `chat_template` that writes elsewhere what the run's writes here.

  It writes what comes before a conversation, unless the run's does. A token that the `settings`
  there name, and that has no value here, is empty.
  """
  made, tokens = Template(**chat), chat['tokens']
  first = ''.join(known.id_to_token(id_) or '' for id_ in made.begin(own))
  names = [name for name in settings if name.endswith('_token') and name not in tokens]

  def to_source(source: str) -> str:
    empty = ''.join(f"{{%- set {name} = '' %}}" for name in names if name in source)
    try:
      text = Template('', source, tokens).render(_QUESTION, ask=True).text
      has_first = text.startswith(first)
    except (UserError, ImportError):  # It refuses such a question, or Jinja is not installed.
      has_first = 'bos_token' in tokens and 'bos_token' in source
    return empty + ('' if has_first else f'{{{{- {json.dumps(first)} }}}}') + source

  sources = {'default': made.source, **made.named}
  written = [{'name': name, 'template': to_source(text)} for name, text in sources.items()]
  return written if made.named else written[0]['template']


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
  return [*dict.fromkeys((*tokenizers.from_json(stored).ends, *turn_ids(stored)))]


def turn_ids(stored: Mapping[str, Any]) -> list[int]:
  """Return the ids that end an answer by the template that a run learned from."""
  if stored['kind'] == 'bytes' or not _has_own_template(stored):
    return []
  chat = stored['chat']
  texts = [chat['tokens'].get('eos_token', '')]
  with contextlib.suppress(UserError, ImportError):  # as in `_source`
    texts.append(Template(**chat).end_of_turn(_QUESTION))
  known = hf.Tokenizer.from_str(json.dumps(stored['tokenizer']))
  return [id_ for id_ in map(known.token_to_id, texts) if id_ is not None]


def is_of_bytes(file: Path) -> bool:
  """Return whether a `tokenizer.json` is that of `to_files` for a tokenizer of bytes."""
  try:
    return read_json(file) == to_files({'kind': 'bytes'}, 0)[file.name]
  except UserError:
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
