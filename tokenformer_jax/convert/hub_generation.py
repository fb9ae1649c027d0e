"""Read and write what the folder of a model says about writing texts: generation_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenformer_jax.convert import folder_files, hub_tokenizer
from tokenformer_jax.convert.hub_keys import Keys
from tokenformer_jax.data.reading import read_json
from tokenformer_jax.errors import UserError

FILE = folder_files.GENERATION

# Keys that say how long a text is or what is returned besides it, or that are read elsewhere.
_IGNORED = """
  bos_token_id pad_token_id decoder_start_token_id transformers_version _from_model_config
  max_length use_cache cache_implementation return_dict_in_generate output_attentions
  output_hidden_states output_scores output_logits chat_format
"""
# Values that change nothing, such as a penalty of 1, one beam and no repetition forbidden.
_NEUTRAL = (None, False, 0, 1, '', [], {})
# How transformers draws if a folder asks for draws and does not say more.
_DRAWS = {'temperature': 1.0, 'top_k': 50, 'top_p': 1.0}


class Generation(NamedTuple):
  """How a model writes texts.

  Attributes:
    ends: the ids that end a text.
    draws: the settings of draws that the folder states; none: it states nothing of draws.
    unread: the keys of the file that have no effect here, with their values.
  """

  ends: tuple[int, ...]
  draws: dict[str, float]
  unread: list[str]


def find(folder: Path, vocab_size: int) -> Generation:
  """Return how the model of a folder writes texts; `config.json` has the ids in older folders."""
  file = folder / FILE
  values = read_json(file) if file.is_file() else {}
  keys, where = Keys(values, str(file)), str(file)
  ends = keys.get('eos_token_id')
  if ends is None:
    where = str(folder / 'config.json')
    ends = read_json(folder / 'config.json').get('eos_token_id')
  return Generation(_ids(ends, vocab_size, where), _draws(keys), _unread(keys, values))


def stored_draws(stored: Mapping[str, Any]) -> dict[str, float]:
  """Return `Generation.draws` of the folder that a run came from, from its stored tokenizer."""
  return _draws(Keys(folder_files.read(stored, FILE), FILE))


def to_file(stored: dict[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
  """Return the content of a run's generation_config.json, by its name if there is one.

  It is what came, with the ends that are not in it. A folder that came without the file, whose
  config.json has the ends, goes out without it. `ids` are the keys of a model without a folder.
  """
  came, config = (folder_files.read(stored, name) for name in (FILE, folder_files.CONFIG))
  has_file = FILE in folder_files.unpack(stored)
  known = came.get('eos_token_id', config.get('eos_token_id'))
  known = known if isinstance(known, list) else [] if known is None else [known]
  ends = hub_tokenizer.end_ids(stored)
  if known:  # What a folder states wins over the end of documents alone.
    ends = known + [end for end in hub_tokenizer.turn_ids(stored) if end not in known]
  if ends == known:
    return {FILE: folder_files.unpack(stored)[FILE]} if has_file else {}
  return {FILE: {**(came if has_file else ids), 'eos_token_id': ends}}


def _ids(value: Any, vocab_size: int, where: str) -> tuple[int, ...]:
  """Return the ids of a key that holds one, several or null."""
  ids = value if isinstance(value, list) else [] if value is None else [value]
  if any(type(id_) is not int or not 0 <= id_ < vocab_size for id_ in ids):
    raise UserError(
      f'{where} has eos_token_id={value!r:.80}; it must be one or several ids from 0 to '
      f'{vocab_size - 1}'
    )
  return tuple(ids)


def _draws(keys: Keys) -> dict[str, float]:
  """Return the settings of draws; without draws, that which takes the likeliest tokens."""
  stated = temperature, top_k, _ = [*map(keys.get, _DRAWS)]
  if not keys.flag('do_sample', True):
    return {'temperature': 0.0}
  # A temperature of 0 takes the likeliest token; a top_k of 0 or −1 limits nothing.
  draws = {
    'temperature': keys.number('temperature', _DRAWS['temperature']) if temperature != 0 else 0.0,
    'top_k': keys.whole('top_k', _DRAWS['top_k']) if top_k not in (0, -1) else 0,
    'top_p': keys.number('top_p', _DRAWS['top_p']),
  }
  if keys.get('do_sample'):
    return draws
  return {name: draws[name] for name, one in zip(_DRAWS, stated, strict=True) if one is not None}


def _unread(keys: Keys, values: Mapping[str, Any]) -> list[str]:
  return [
    f'{name}={values[name]!r:.40}'
    for name in keys.unread(_IGNORED.split())
    if values[name] not in _NEUTRAL
  ]
