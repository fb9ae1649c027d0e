"""Read what a folder of the hub says about its tokens, with the precedence of `transformers`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers as hf

from tokenformer_jax.data import reading
from tokenformer_jax.errors import UserError

_SETTINGS, _CONFIG = 'tokenizer_config.json', 'config.json'
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
_PREFIXED = ('LlamaTokenizer', 'CodeLlamaTokenizer')  # by a space before a text
_QWEN = dict.fromkeys(('qwen2', 'qwen2_moe', 'qwen3', 'qwen3_moe'), 'Qwen2Tokenizer')
# The class of a `model_type` whose folder names none, and where the name is not heeded.
_CLASSES = {'gemma': 'GemmaTokenizer', 'gpt2': 'GPT2Tokenizer', 'gpt_neox': 'GPTNeoXTokenizer'}
_CLASSES |= _QWEN | dict.fromkeys(('gemma2', 'gemma3', 'gemma3_text'), 'GemmaTokenizer')
_FIXED = {**dict.fromkeys(('mistral', 'mixtral', 'phi3', 'olmo2'), ''), 'qwen2': 'Qwen2Tokenizer'}
# Where the class of Qwen splits a text, whatever its file says.
_QWEN_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def read(folder: Path) -> 'FolderTokens':
  """Read the files of a folder, each once; a file that is not there says nothing."""
  settings, config = _read(folder, _SETTINGS), _read(folder, _CONFIG)
  named = settings
  if 'added_tokens_decoder' not in settings:  # A file of older versions, which newer ones ignore.
    named = {**settings, **_read(folder, 'special_tokens_map.json')}
  stated = {name: token for name, token in named.items() if name.endswith('_token')}
  extra = named.get('extra_special_tokens')
  stated |= extra if isinstance(extra, dict) else {}
  return FolderTokens(folder, settings, config, stated, _class(folder, settings, config))


class FolderTokens(NamedTuple):
  """What the files of a folder say about its tokens.

  Attributes:
    settings: the content of `tokenizer_config.json`.
    config: the content of `config.json`.
    stated: the special tokens that files name, as texts or tables, by names such as `eos_token`.
    kind: the class of the tokenizer, if `transformers` takes one of `_DEFAULTS`, or ''.
  """

  folder: Path
  settings: dict[str, Any]
  config: dict[str, Any]
  stated: dict[str, Any]
  kind: str

  @property
  def named(self) -> dict[str, str]:
    """The texts of the special tokens, those of the class included."""
    tokens = {**_DEFAULTS.get(self.kind, {}), **self.stated}
    return {name: text for name, token in tokens.items() if (text := _text(token))}

  @property
  def end_ids(self) -> list[int]:
    """The ids that end texts by `config.json`, else by `generation_config.json`."""
    for values in (self.config, _read(self.folder, 'generation_config.json')):
      value = values.get('eos_token_id')
      ids = value if isinstance(value, list) else [value]
      if ids := [id_ for id_ in ids if type(id_) is int and 0 <= id_ < 2**31]:
        return ids
    return []


def extend(tokenizer: hf.Tokenizer, tokens: FolderTokens) -> None:
  """Change a tokenizer by the other files of its folder: add tokens, and flags to known ones.

  `add_prefix_space` and `legacy` count for the classes that obey them.

  Raises:
    UserError: an `eos_token` is no token, a new token would have another id than stated, or special
      tokens in a conversation would be plain text.
  """
  folder, own, stated = tokens.folder, tokens.settings, tokens.stated
  if own.get('split_special_tokens'):
    raise UserError(f'{folder}/{_SETTINGS} has split_special_tokens=true; it must be false here')
  _set_prefix(tokenizer, tokens.kind, own)
  extra = own.get('extra_special_tokens') or own.get('additional_special_tokens')
  special = [*stated.values(), *(extra if isinstance(extra, list) else [])]
  texts = {*map(_text, special)}
  known = tokenizer.get_added_tokens_decoder()
  for id_, token in sorted(_listed(tokens, texts, known).items()):
    token.special |= token.content in texts
    is_new = tokenizer.token_to_id(token.content) is None
    tokenizer.add_tokens([token])
    if is_new and (given := tokenizer.token_to_id(token.content)) != id_:
      raise UserError(
        f'a file in {folder} adds the token {token.content!r} with the id {id_}, but the next free '
        f'id is {given}; correct the id, or add the tokens before it'
      )
  if (end := _text(stated.get('eos_token'))) and tokenizer.token_to_id(end) is None:
    raise UserError(
      f'the eos_token {end!r} of {folder} is no token of its tokenizer.json, and no file there '
      f'adds it; correct eos_token in {_SETTINGS}, or add the token'
    )
  defaults = _DEFAULTS.get(tokens.kind, {}).values()
  special += [text for text in defaults if tokenizer.token_to_id(text) is not None]
  added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
  has_no_flags = tokens.kind == 'Qwen2Tokenizer'
  for token in special:
    if (text := _text(token)) and (has_no_flags or text not in added):
      is_plain = has_no_flags or not isinstance(token, dict)
      tokenizer.add_tokens([_token({'content': text} if is_plain else token, True)])


def _listed(
  tokens: FolderTokens, special: set[str], known: Mapping[int, hf.AddedToken]
) -> dict[int, hf.AddedToken]:
  """Return the tokens that files beside tokenizer.json list, by their stated ids."""
  table, file = tokens.settings.get('added_tokens_decoder'), tokens.folder / _SETTINGS
  try:
    if table is not None:
      return {int(id_): _token(fields, fields.get('special')) for id_, fields in table.items()}
    file = tokens.folder / 'added_tokens.json'  # of older versions
    older = {id_: text for text, id_ in _read(tokens.folder, file.name).items() if id_ not in known}
    return {int(id_): _token({'content': text}, text in special) for id_, text in older.items()}
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise UserError(f'{file} lists added tokens in another form than ids and tokens') from error


def _read(folder: Path, name: str) -> dict[str, Any]:
  """Return the object in a file of a folder; empty: the file is not there."""
  return reading.read_json(folder / name) if (folder / name).is_file() else {}


def _token(fields: Mapping[str, Any], special: Any) -> hf.AddedToken:
  flags = ('lstrip', 'rstrip', 'normalized', 'single_word')
  given = {flag: fields[flag] for flag in flags if flag in fields}
  return hf.AddedToken(fields['content'], special=bool(special), **given)


def _text(token: Any) -> str:
  """Return the text of a token that is a text or a table; empty: it is neither."""
  text = token.get('content') if isinstance(token, dict) else token
  return text if isinstance(text, str) else ''


def _set_prefix(tokenizer: hf.Tokenizer, kind: str, own: Mapping[str, Any]) -> None:
  """Set whether a text begins with a space, where the class of the tokenizer decides it."""
  steps, asked = tokenizer.pre_tokenizer, own.get('add_prefix_space')
  if kind == 'Qwen2Tokenizer':
    words = hf.pre_tokenizers.Split(hf.Regex(_QWEN_WORDS), 'isolated')
    letters = hf.pre_tokenizers.ByteLevel(add_prefix_space=bool(asked), use_regex=False)
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Sequence([words, letters])
    tokenizer.normalizer = hf.normalizers.NFC()
  if kind in ('GPT2Tokenizer', 'GPTNeoXTokenizer'):
    for step in steps if isinstance(steps, hf.pre_tokenizers.Sequence) else [steps]:
      if isinstance(step, hf.pre_tokenizers.ByteLevel):
        step.add_prefix_space = bool(asked)
  if kind == 'GPTNeoXTokenizer':  # adds no token to a text, whatever its file says
    tokenizer.post_processor = hf.processors.TemplateProcessing('$A', '$A $B', [])
  if kind in _PREFIXED and isinstance(tokenizer.model, hf.models.BPE):
    first = 'always' if kind == 'LlamaTokenizer' and own.get('legacy') else 'first'
    scheme = 'never' if asked is False else first
    steps = hf.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.normalizer, tokenizer.pre_tokenizer = None, steps
    decoders = [hf.decoders.Replace('▁', ' '), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
    if scheme != 'never' or kind != 'LlamaTokenizer':
      decoders.append(hf.decoders.Strip(' ', 1, 0))
    tokenizer.decoder = hf.decoders.Sequence(decoders)


def _class(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
  """Return the class of a folder's tokenizer, if `transformers` takes one of `_DEFAULTS`."""
  kind = str(config.get('model_type'))
  named = settings.get('tokenizer_class') or config.get('tokenizer_class') or _CLASSES.get(kind)
  named = _FIXED.get(kind, str(named).removesuffix('Fast'))
  file = folder / 'tokenizer.json'
  if named == 'LlamaTokenizer' and file.is_file() and b'"ByteLevel"' in file.read_bytes():
    return ''
  return named if named in _DEFAULTS else ''
