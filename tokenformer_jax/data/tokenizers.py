"""Tokenize text by bytes, or by any `tokenizer.json` of Hugging Face's `tokenizers`.

A tokenizer converts to JSON and back (`to_json`, `from_json`). Token stores and checkpoints contain
that JSON, so they need no other file.
"""

import abc
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as hf

from tokenformer_jax.data import marks, special_tokens
from tokenformer_jax.errors import UserError, arg

Spans = Sequence[tuple[int, int]]

BPE_SIZES = range(257, 65537)  # at least 256 bytes and the end of document; at most 16 bits
BPE_TRAINING_BYTES = 64 * 2**20  # more text barely changes the merges, but costs time and memory

# For messages about a missing tokenizer.json.
WHERE_TO_GET = (
  'the released models and the Pile configs use the tokenizer of GPT-NeoX-20B; for another model, '
  'get the file from the page that offers its weights'
)

END_OF_DOCUMENT = '<|endoftext|>'  # of a BPE that was trained here
_INVALID = '\N{REPLACEMENT CHARACTER}'
_ENDS_OF_DOCUMENT = (END_OF_DOCUMENT, '</s>', '<|end_of_text|>', '<eos>', '[SEP]')


class Tokenizer(abc.ABC):
  """A reversible map from text to ids.

  Attributes:
    size: the number of ids; every id is smaller.
    end_of_document: the id that ends a document. Encoding never adds it.
    begin: the ids before a text that a model continues or scores: those that the file adds, or else
      the end of the document before. The model of a folder may have none.
    ends: the ids that end a written text, the end of a document first.
    special_ids: the ids of special tokens that a folder names, such as `pad_token`.
  """

  size: int
  end_of_document: int
  begin: tuple[int, ...]
  ends: tuple[int, ...]
  special_ids: Mapping[str, int] = {}

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each text, int32, without an end of document."""

  @abc.abstractmethod
  def encode_chats(self, chats: Sequence[tuple[str, Spans]]) -> list[np.ndarray]:
    """Return the ids of texts of conversations, int32, with marks.

    A text that spells a special token means that token, unlike in plain text. The spans are the
    ranges of characters of which the tokens carry loss: see `marks`.
    """

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of any ids. Invalid UTF-8 is replaced; unknown ids are left out."""

  @abc.abstractmethod
  def to_json(self) -> dict[str, Any]:
    """Return all that `from_json` needs, as JSON values."""

  def encode(self, text: str) -> np.ndarray:
    """Return the ids of one text, int32."""
    return self.encode_batch([text])[0]

  def start(self, ids: np.ndarray) -> np.ndarray:
    """Return the ids of a text after those that begin it, unless it has them; never nothing."""
    begin = self.begin or (() if len(ids) else (self.end_of_document,))
    has_begin = len(ids) and np.array_equal(ids[: len(begin)], begin)
    return ids if has_begin else np.append(np.array(begin, np.int32), ids)

  @property
  def opening(self) -> tuple[int, ...]:
    """Return the ids before each document in training: `begin`, unless the last end is the same."""
    return () if self.begin == (self.end_of_document,) else self.begin

  @property
  def boundary(self) -> int:
    """Return the id that begins a document in training, which comes nowhere else in it."""
    return (self.begin or (self.end_of_document,))[0]

  def document(
    self, ids: Sequence[int] | np.ndarray, *, begins: bool = True, ends: bool = True
  ) -> np.ndarray:
    """Return the ids of a document in training, or of a piece of one that `begins` or `ends` it.

    The first token of a document is marked (see `marks`): that of its opening, or without one the
    end of the document before.
    """
    pieces = self.opening * begins, ids, (self.end_of_document,) * ends
    ids = np.concatenate([np.asarray(piece, np.int32) for piece in pieces])
    at, is_first = (0, begins) if self.opening else (len(ids) - 1, ends)
    return marks.begin(ids, (np.arange(len(ids)) == at) & is_first)

  def conversation(self, ids: np.ndarray, begin: Sequence[int]) -> np.ndarray:
    """Return the marked ids of a conversation after `begin`, with an end, unless it has them.

    Those at the beginning carry no loss, and the end that of the last token. The first token of all
    begins a document.
    """
    end, ids = self.end_of_document, marks.after(begin, ids)
    if marks.plain(ids)[-1] != end:
      ids = np.append(ids, end if ids[-1] >= 0 else marks.flip(end))
    return marks.begin(ids, np.arange(len(ids)) == 0)

  def of_folder(self, ends: Sequence[int], rows: int) -> 'Tokenizer':
    """Return the tokenizer of a folder's model, whose texts begin as the tokenizer's file says.

    `ends` are the ids that end its texts besides the end of a document. The embedding may have
    fewer `rows` than there are ids: a text with another one is refused.
    """
    del ends, rows
    return self  # of bytes

  @functools.cached_property
  def fingerprint(self) -> str:
    """Return a short hash of the content. Tokenizers of the same ids for texts have the same."""
    content = self.to_json()
    return _hash({key: content[key] for key in ('kind', 'tokenizer') if key in content})

  @functools.cached_property
  def document_fingerprint(self) -> str:
    """Return `fingerprint`, or if a folder says how documents begin or end, a hash with that."""
    is_usual = not self.opening and self.end_of_document == self._usual_end
    return (
      self.fingerprint
      if is_usual
      else _hash((self.fingerprint, [*self.opening, self.end_of_document]))
    )

  @property
  def spelled_ends(self) -> list[str]:
    """Return texts that spell the end of a document, for this tokenizer or for others."""
    own = self.decode([self.end_of_document]).strip()
    return sorted({*_ENDS_OF_DOCUMENT, own} - {'', _INVALID})

  @property
  def spells_boundary(self) -> bool:
    """Return whether text that spells `boundary` is encoded as it."""
    spelled = self.decode([self.boundary])
    return spelled != _INVALID and self.boundary in self.encode(spelled)

  @property
  def _usual_end(self) -> int | None:
    return self.end_of_document


class ByteTokenizer(Tokenizer):
  """A tokenizer whose ids are UTF-8 bytes. The end of document is 0xFF, which UTF-8 never uses."""

  size = 256
  end_of_document = 0xFF
  begin = ends = (end_of_document,)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

  def encode_chats(self, chats: Sequence[tuple[str, Spans]]) -> list[np.ndarray]:
    def pieces(text: str, spans: Spans) -> Iterator[np.ndarray]:
      end = 0
      for start, stop in spans:
        yield marks.flip(self.encode(text[end:start]))
        yield self.encode(text[start:stop])
        end = stop
      yield marks.flip(self.encode(text[end:]))

    return [np.concatenate([*pieces(*chat)]) for chat in chats]

  def decode(self, ids: Iterable[int]) -> str:
    return bytes(_known(ids, self.size)).decode('utf-8', errors='replace')

  def to_json(self) -> dict[str, Any]:
    return {'kind': 'bytes'}


class HuggingFaceTokenizer(Tokenizer):
  """A tokenizer of the `tokenizers` library that encodes text as plain text.

  Encoding adds no special tokens, and text that spells out a special token is encoded as ordinary
  text (Unigram and WordLevel models may still know the spelling as an ordinary piece). Truncation
  and padding from the file are switched off.
  """

  def __init__(
    self,
    tokenizer: hf.Tokenizer,
    name: str = 'the tokenizer',
    *,
    named: Mapping[str, str] = {},
    begin: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    rows: int | None = None,
  ):
    """Take a tokenizer, and what a folder says about it.

    `named` are special tokens by name. For `begin` and `ends` see `Tokenizer`; None: the end of a
    document. `rows` are those of the embedding, if they are fewer than the ids.
    """
    self._tokenizer = tokenizer
    ids = {name: tokenizer.token_to_id(token) for name, token in named.items()}
    self.special_ids = {name: id_ for name, id_ in ids.items() if id_ is not None}
    self._named = {name: named[name] for name in self.special_ids}
    end_of_document = self.special_ids.get('eos_token', self._usual_end)
    if end_of_document is None:
      raise UserError(
        f'{name} has no token that ends a document; name it as eos_token in a '
        f'tokenizer_config.json in its folder, or add one of {", ".join(_ENDS_OF_DOCUMENT)}'
      )
    added = tokenizer.get_added_tokens_decoder()
    parting = (added.get(self.special_ids.get(name, -1)) for name in ('bos_token', 'eos_token'))
    for token in parting:
      if token and not token.special:  # It would be found in text that spells it.
        tokenizer.add_special_tokens([hf.AddedToken(token.content, special=True, normalized=False)])
    tokenizer.encode_special_tokens = True
    self.end_of_document = end_of_document
    self.begin = (end_of_document,) if begin is None else tuple(begin)
    self.ends = tuple(dict.fromkeys((end_of_document, *(ends or ()))))
    # The largest id, not the number of entries: some vocabularies have gaps.
    ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    self.size = min(ids, rows or ids)
    self._rows = rows if self.size < ids else None
    self._check((self.end_of_document, *self.begin))

  @property
  def _usual_end(self) -> int | None:
    known = map(self._tokenizer.token_to_id, _ENDS_OF_DOCUMENT)
    return next((end for end in known if end is not None), None)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [self._check(encoding.ids) for encoding in encodings]

  def encode_chats(self, chats: Sequence[tuple[str, Spans]]) -> list[np.ndarray]:
    texts = [text for text, _ in chats]
    encodings = self._with_special_tokens.encode_batch(texts, add_special_tokens=False)
    result = []
    for encoding, (_, spans) in zip(encodings, chats, strict=True):
      start_N, stop_N = np.array(encoding.offsets, np.int32).reshape(-1, 2).T
      carries = np.zeros(len(start_N), bool)
      for start, stop in spans:  # A token at both sides of an end is in the span.
        carries |= (start_N < stop) & (np.maximum(stop_N, start_N + 1) > start)
      ids = self._check(encoding.ids)
      result.append(np.where(carries, ids, marks.flip(ids)))
    return result

  def _check(self, ids: Sequence[int]) -> np.ndarray:
    """Return the ids of a text as an array, of which the embedding has them all."""
    known = np.array(ids, np.int32)
    if self._rows and len(missing := known[known >= self._rows]):
      raise UserError(
        f'a text has the token {self._tokenizer.id_to_token(missing[0])!r} of the id {missing[0]}, '
        f'and the embedding of the model has {self._rows} rows; leave that token out'
      )
    return known

  @functools.cached_property
  def _with_special_tokens(self) -> hf.Tokenizer:
    tokenizer = hf.Tokenizer.from_str(self._tokenizer.to_str())
    tokenizer.encode_special_tokens = False
    return tokenizer

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode(list(_known(ids, self.size)), skip_special_tokens=False)

  def to_json(self) -> dict[str, Any]:
    values: dict[str, Any] = {
      'kind': 'huggingface',
      'tokenizer': json.loads(self._tokenizer.to_str()),
    }
    if self.special_ids:
      values['special_tokens'] = self._named
    if self.begin != (self.end_of_document,):
      values['begin'] = list(self.begin)
    if self.ends != (self.end_of_document,):
      values['ends'] = list(self.ends)
    if self._rows:
      values['rows'] = self._rows
    return values

  def of_folder(self, ends: Sequence[int], rows: int) -> 'HuggingFaceTokenizer':
    begin, named = _added_before(self._tokenizer), self._named
    return HuggingFaceTokenizer(self._tokenizer, named=named, begin=begin, ends=ends, rows=rows)


def _added_before(tokenizer: hf.Tokenizer) -> list[int]:
  """Return the ids that a tokenizer adds before a text."""
  try:
    encoding = tokenizer.encode('a')
  except Exception:  # A vocabulary of words that lacks this one, and a token for others.
    return []
  special = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
  return [id_ for id_, _ in itertools.takewhile(lambda pair: pair[1], special)]


def _known(ids: Iterable[int], size: int) -> Iterator[int]:
  return (int(i) for i in ids if 0 <= i < size)


def from_json(values: dict[str, Any]) -> Tokenizer:
  """Build the tokenizer that `to_json` described."""
  if values['kind'] == 'bytes':
    return ByteTokenizer()
  name, named = 'the stored tokenizer', values.get('special_tokens', {})
  tokenizer = _parse(json.dumps(values['tokenizer']), name)
  given = {key: values[key] for key in ('begin', 'ends', 'rows') if key in values}
  return HuggingFaceTokenizer(tokenizer, name, named=named, **given)


def load(spec: str, *, extended: bool = True, key: str = 'config.data.tokenizer') -> Tokenizer:
  """Return the tokenizer `bytes`, or load the `tokenizer.json` file at the path `spec`.

  Other files of its folder name its special tokens, and so how a document ends; `extended` by the
  tokens that they add. A document begins with what the tokenizer adds before a text. `key` names
  the spec in messages.
  """
  if spec == 'bytes':
    return ByteTokenizer()
  path = Path(spec).expanduser()
  if not path.is_file():
    raise UserError(
      f'{key} is {spec!r}, which is not a file; it must be bytes, bpe:SIZE or the '
      f'path of a tokenizer.json ({WHERE_TO_GET})'
    )
  try:
    content = path.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'{key} is {spec!r}, which cannot be read: {error}') from error
  name = f'{key}={spec}'
  tokenizer, tokens = _parse(content, name), special_tokens.read(path.parent)
  named = tokens.named
  if extended:
    special_tokens.extend(tokenizer, tokens)
  if tokenizer.token_to_id(named.get('eos_token', '')) is None:
    known = [*map(tokenizer.id_to_token, tokens.end_ids)]
    # Of several, which end turns as well, the one with a usual name ends documents.
    ends = (token for token in (*_ENDS_OF_DOCUMENT, *known) if token and token in known)
    named['eos_token'] = next(ends, '')
  begin = _added_before(tokenizer) or None
  return HuggingFaceTokenizer(tokenizer, name, named=named, begin=begin)


def load_unless_bpe(spec: str) -> Tokenizer | None:
  """Return the tokenizer that `load` does; None for `bpe:SIZE`, which a text trains."""
  return None if bpe_size(spec) else load(spec)


def _parse(content: str, name: str) -> hf.Tokenizer:
  try:
    tokenizer = hf.Tokenizer.from_str(content)
  except Exception as error:  # The library raises bare exceptions.
    raise UserError(
      f'{name} is not a tokenizer.json that tokenizers {hf.__version__} can load ({error})'
    ) from error
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _hash(content: Any) -> str:
  return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def bpe_size(spec: str) -> int | None:
  """Return SIZE if `spec` is `bpe:SIZE`, a tokenizer to train on the corpus; else None."""
  form, _, size = spec.partition(':')
  if form != 'bpe':
    return None
  if not (size.isdecimal() and int(size) in BPE_SIZES):
    raise UserError(
      f'config.data.tokenizer is {spec!r}; the SIZE of bpe:SIZE must be a number from '
      f'{BPE_SIZES[0]} to {BPE_SIZES[-1]}'
    )
  return int(size)


def names_same(spec: str, trained_spec: str, trained: Tokenizer) -> bool:
  """Return whether a spec names the tokenizer that a model was trained with: see `check_same`."""
  if spec == 'bytes':
    return isinstance(trained, ByteTokenizer)
  gone = not Path(spec).expanduser().is_file()
  if spec == trained_spec and gone:  # a trained BPE, or a file that was removed since
    return True
  if bpe_size(spec):
    return False
  own = (load(spec, extended=extended) for extended in (True, False))  # False: runs of before
  return any(one.fingerprint == trained.fingerprint for one in own)


def check_same(spec: str, trained_spec: str, trained: Tokenizer, where: str) -> None:
  """Check that a spec names the tokenizer that a model was trained with.

  `spec` is `config.data.tokenizer`, and `trained_spec` the same key in the config of the model's
  checkpoint, which messages call `where`. `bpe:SIZE` matches if both have the same value; the
  corpus may differ. A `tokenizer.json` file may be gone, because the checkpoint holds its content.
  """
  if names_same(spec, trained_spec, trained):
    return
  ours = None if bpe_size(spec) else load(spec).fingerprint
  fingerprint = f'fingerprint {trained.fingerprint}' + (f', here {ours}' if ours else '')
  advice = f"set config.data.tokenizer={trained_spec} to keep the checkpoint's tokenizer"
  if spec == trained_spec:
    advice = "move the file away to use the checkpoint's own copy"
  raise UserError(
    f'config.data.tokenizer is {spec!r}, but {where} was trained with another tokenizer '
    f'({trained_spec!r}, {fingerprint}), whose ids stand for other text; {advice}, or train a new '
    f'model in another {arg.workdir}'
  )


def train_bpe(texts: Iterable[str], size: int) -> HuggingFaceTokenizer:
  """Train a byte-level BPE of at most `size` ids on the first `BPE_TRAINING_BYTES` of the texts.

  Id 0 is the end of document `<|endoftext|>`. The same texts give the same tokenizer.
  """
  byte_level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer = hf.Tokenizer(hf.models.BPE())
  tokenizer.pre_tokenizer = byte_level
  tokenizer.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[END_OF_DOCUMENT],
    initial_alphabet=sorted(byte_level.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(_first_bytes(texts, BPE_TRAINING_BYTES), trainer)
  return HuggingFaceTokenizer(tokenizer)


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
  for text in texts:
    yield text
    limit -= len(text.encode())
    if limit <= 0:
      return
