"""Keep the files beside the weights of a folder of the hub in its run, and write them again.

A checkpoint holds them with its tokenizer, so they go along with training and growth.
"""

import base64
import fnmatch
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.convert import families
from tokenformer_jax.convert.family import Family
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.data.reading import parse_object
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import messages

CONFIG, GENERATION = 'config.json', 'generation_config.json'
TOKENIZER, SETTINGS, TEMPLATE = 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'
_MODEL = (CONFIG, GENERATION, 'LICENSE*', 'NOTICE*')
_VOCABULARY = (
  *(TOKENIZER, SETTINGS, TEMPLATE, 'special_tokens_map.json', 'added_tokens.json'),
  *('chat_template.json', 'additional_chat_templates/*.jinja'),
  *('tokenizer.model', 'vocab.json', 'merges.txt'),  # other programs read them
)
PATTERNS = (*_MODEL, *_VOCABULARY)
_MOST_BYTES = 2**26
_KEY = 'files'  # of a stored tokenizer


def pack(model: Path, vocabulary: Path | None) -> dict[str, dict[str, str]]:
  """Return the files of the folders of a model and of its tokenizer, for a stored tokenizer.

  A file is too large above 64 MiB, and then named in a message.
  """
  packed = {}
  for folder, patterns in ((model, _MODEL), (vocabulary, _VOCABULARY)):
    if folder is None:
      continue
    files = (file for pattern in patterns for file in folder.glob(pattern))
    for file in sorted(filter(Path.is_file, files)):
      name = file.relative_to(folder).as_posix()
      if file.stat().st_size > _MOST_BYTES:
        messages.say(f'{file} has more than {_MOST_BYTES:,} bytes and does not go out again')
      else:
        packed[name] = base64.b64encode(zlib.compress(file.read_bytes())).decode()
  return {_KEY: packed} if packed else {}


def unpack(stored: Mapping[str, Any]) -> dict[str, bytes]:
  """Return the files in a stored tokenizer by name; empty: it did not come from a folder."""
  return {name: _unpacked(name, text) for name, text in stored.get(_KEY, {}).items()}


def _unpacked(name: str, text: str) -> bytes:
  """Return the content of a file, whose name and size a stranger may have chosen."""
  parts = name.split('/')
  known = (pattern.split('/') for pattern in PATTERNS)
  if not any(len(parts) == len(one) and all(map(fnmatch.fnmatchcase, parts, one)) for one in known):
    raise UserError(
      f'the tokenizer of the checkpoint holds a file {name!r:.80}, which is none of a folder of '
      'the hub; take another checkpoint'
    )
  content = zlib.decompressobj().decompress(base64.b64decode(text), _MOST_BYTES + 1)
  if len(content) > _MOST_BYTES:
    raise UserError(
      f'{name} in the tokenizer of the checkpoint has more than {_MOST_BYTES:,} bytes'
    )
  return content


def read(stored: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Return the object in one of the files in a stored tokenizer; empty: it is not there."""
  own = {name: stored[_KEY][name]} if name in stored.get(_KEY, {}) else {}
  return parse_object(unpack({_KEY: own})[name], name) if own else {}


def config(
  stored: Mapping[str, Any], family: Family, model: ModelConfig, written: dict[str, Any]
) -> dict[str, Any] | bytes:
  """Return the content of a config.json: what came, if it still makes the model.

  Else it has the keys `written`, those of the family, and all that came and are not of the model.
  """
  came = read(stored, CONFIG)
  if came.get('model_type') != family.kind:
    return written
  keys = Keys(came, CONFIG, family.defaults)
  is_same = families.is_same(family.to_model(keys), model)
  # The Python files that auto_map names do not go along; transformers has the class itself.
  kept = {key: value for key, value in came.items() if key != 'auto_map'}
  if not is_same:
    kept = {**written, **{key: value for key, value in kept.items() if key not in keys.read}}
  if 'torch_dtype' in came:  # the older name of the key
    kept = {key: value for key, value in kept.items() if key != 'dtype' or key in came}
  names = [key for key in ('dtype', 'torch_dtype') if key in came]
  if not names and written['dtype'] != 'float32':
    names = ['dtype']
  kept |= dict.fromkeys(names, written['dtype'])
  return unpack(stored)[CONFIG] if kept == came else kept
