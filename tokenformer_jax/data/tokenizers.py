"""Tokenizers: bytes, or any `tokenizer.json` of Hugging Face's `tokenizers`.

A tokenizer turns into JSON and back (`to_json`, `from_json`), so that a token store or a checkpoint
that contains it needs no other file.
"""

import abc
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as hf

from tokenformer_jax.errors import UserError

BPE_SIZES = range(257, 65537)  # 256 bytes and the end of document; at most 16 bits
BPE_TRAINING_BYTES = 64 * 2**20  # more text barely changes the merges, but costs time and memory

# Of a tokenizer.json that is not there.
WHERE_TO_GET = (
  'the released models and the Pile configs have that of GPT-NeoX-20B; another model has its own, '
  'beside its weights on the page that offers them for download'
)

_END_OF_DOCUMENT = '<|endoftext|>'
_ENDS_OF_DOCUMENT = (_END_OF_DOCUMENT, '</s>', '<|end_of_text|>', '<eos>', '[SEP]')


class Tokenizer(abc.ABC):
  """Turns text into ids and back.

  Attributes:
    size: ids are smaller than this.
    end_of_document: the id that ends a document; encoding never adds it.
  """

  size: int
  end_of_document: int

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, int32, without an end of document."""

  @abc.abstractmethod
  def decode(self, ids: Iterable[int]) -> str:
    """The text of any ids; what is no valid UTF-8 or no known id is replaced or left out."""

  @abc.abstractmethod
  def to_json(self) -> dict[str, Any]:
    """Everything that `from_json` needs, as values that JSON can hold."""

  def encode(self, text: str) -> np.ndarray:
    """The ids of one text, int32."""
    return self.encode_batch([text])[0]

  @functools.cached_property
  def fingerprint(self) -> str:
    """A short hash of the content, equal for tokenizers that encode alike."""
    content = json.dumps(self.to_json(), sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


class ByteTokenizer(Tokenizer):
  """The bytes of the UTF-8 text. The end of document is 0xFF, a byte that UTF-8 never uses."""

  size = 256
  end_of_document = 0xFF

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    return bytes(_known(ids, self.size)).decode('utf-8', errors='replace')

  def to_json(self) -> dict[str, Any]:
    return {'kind': 'bytes'}


class HuggingFaceTokenizer(Tokenizer):
  """A tokenizer of the `tokenizers` library, encoding text as nothing but text.

  No special token is added, and text that spells a special token out is encoded as ordinary text
  (Unigram and WordLevel models may still know the spelling as an ordinary piece). Truncation and
  padding that the file may ask for are switched off.

  Raises:
    UserError: none of the usual end-of-document tokens is in the vocabulary.
  """

  def __init__(self, tokenizer: hf.Tokenizer, name: str = 'the tokenizer'):
    ends = (tokenizer.token_to_id(token) for token in _ENDS_OF_DOCUMENT)
    end_of_document = next((end for end in ends if end is not None), None)
    if end_of_document is None:
      raise UserError(
        f'{name} has no token that ends a document; add one of {", ".join(_ENDS_OF_DOCUMENT)}'
      )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    self._tokenizer = tokenizer
    self.end_of_document = end_of_document
    # Not the number of entries: some vocabularies have gaps.
    self.size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode(list(_known(ids, self.size)), skip_special_tokens=False)

  def to_json(self) -> dict[str, Any]:
    return {'kind': 'huggingface', 'tokenizer': json.loads(self._tokenizer.to_str())}


def _known(ids: Iterable[int], size: int) -> Iterator[int]:
  return (int(i) for i in ids if 0 <= i < size)


def from_json(values: dict[str, Any]) -> Tokenizer:
  """Rebuilds the tokenizer that `to_json` described."""
  match values.get('kind'):
    case 'bytes':
      return ByteTokenizer()
    case 'huggingface':
      return _from_string(json.dumps(values['tokenizer']), 'the stored tokenizer')
    case kind:
      raise UserError(f'the stored tokenizer is of kind {kind!r}; it must be bytes or huggingface')


def load(spec: str) -> Tokenizer:
  """The tokenizer `bytes`, or the one in the `tokenizer.json` file at the path `spec`.

  Raises:
    UserError: there is no such file, or it is not a tokenizer.
  """
  if spec == 'bytes':
    return ByteTokenizer()
  path = Path(spec).expanduser()
  if not path.is_file():
    raise UserError(
      f'config.data.tokenizer is {spec!r}, which is not a file; it must be bytes, bpe:SIZE or the '
      f'path of a tokenizer.json ({WHERE_TO_GET})'
    )
  try:
    content = path.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'config.data.tokenizer is {spec!r}, which cannot be read: {error}') from error
  return _from_string(content, f'config.data.tokenizer={spec}')


def _from_string(content: str, name: str) -> HuggingFaceTokenizer:
  try:
    tokenizer = hf.Tokenizer.from_str(content)
  except Exception as error:  # The library raises bare exceptions.
    raise UserError(
      f'{name} is not a tokenizer.json that tokenizers {hf.__version__} can load ({error})'
    ) from error
  return HuggingFaceTokenizer(tokenizer, name)


def bpe_size(spec: str) -> int | None:
  """SIZE if `spec` is `bpe:SIZE`, a tokenizer to be trained on the corpus; else None.

  Raises:
    UserError: SIZE is not a number in `BPE_SIZES`.
  """
  kind, _, size = spec.partition(':')
  if kind != 'bpe':
    return None
  if not (size.isdecimal() and int(size) in BPE_SIZES):
    raise UserError(
      f'config.data.tokenizer is {spec!r}; the SIZE of bpe:SIZE must be a number from '
      f'{BPE_SIZES[0]} to {BPE_SIZES[-1]}'
    )
  return int(size)


def check_same(spec: str, trained_spec: str, trained: Tokenizer, where: str) -> None:
  """Checks that a spec names the tokenizer that a model was trained with.

  `bpe:SIZE` does if the model's own config says the same, whatever the corpus is now. The file of a
  `tokenizer.json` need not be there any more, because the checkpoint holds it.

  Args:
    spec: `config.data.tokenizer`.
    trained_spec: the same in the config of the model's checkpoint.
    trained: the tokenizer that the checkpoint holds.
    where: how to name that checkpoint.

  Raises:
    UserError: the spec names another one.
  """
  gone = spec != 'bytes' and not Path(spec).expanduser().is_file()
  if spec == trained_spec and gone:  # a trained BPE, or a file that was there
    return
  ours = None if bpe_size(spec) else load(spec).fingerprint
  if ours == trained.fingerprint:
    return
  fingerprint = f'fingerprint {trained.fingerprint}' + (f', and here it is {ours}' if ours else '')
  advice = f'set config.data.tokenizer={trained_spec}, which keeps that one'
  if spec == trained_spec:
    advice = 'move the file away, and the one that the checkpoint holds is used'
  raise UserError(
    f'config.data.tokenizer is {spec!r}, but {where} was trained with another tokenizer '
    f'({trained_spec!r}, {fingerprint}), and its ids mean nothing in this one; {advice}, or train '
    'a new model in another --workdir'
  )


def size_of(spec: str) -> int:
  """How many token ids a tokenizer has at most, without building a token store."""
  return bpe_size(spec) or load(spec).size


def train_bpe(texts: Iterable[str], size: int) -> HuggingFaceTokenizer:
  """Trains a byte-level BPE of at most `size` ids on the first `BPE_TRAINING_BYTES` of the texts.

  Id 0 is the end of document `<|endoftext|>`. The same texts give the same tokenizer.
  """
  byte_level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer = hf.Tokenizer(hf.models.BPE())
  tokenizer.pre_tokenizer = byte_level
  tokenizer.decoder = hf.decoders.ByteLevel()
  trainer = hf.trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[_END_OF_DOCUMENT],
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
