"""Divide the text of a run into the training and the validation split.

If validation has its own source, each source is one split. Otherwise a hash of a document's text
selects the split, so adding or moving documents moves no other document. If that leaves a split
empty, it gets the document with the nearest hash. A source of one document is cut at the start of a
line, and its last part is the validation split.

A long text comes in pieces, because a BPE needs 160 times the memory of the text that it encodes.
"""

import dataclasses
import fractions
import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import text
from tokenformer_jax.data.text_files import Files
from tokenformer_jax.errors import UserError

SPLITS = ('train', 'validation')

_LONGEST_WHOLE = 16 * 2**20  # characters; a longer document is encoded in pieces
_SETTINGS = {'train': 'config.data.source', 'validation': 'config.data.validation_source'}
_HASHES = 2**64
_HELD_OUT = ('validation', 'test', 'train')  # TFDS splits in order of preference


class Piece(NamedTuple):
  """A document, or a part of a long document."""

  split: str
  text: str
  ends: bool  # whether the document ends here


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The sources that `data.source` and `data.validation_source` name."""

  source: text.Source
  validation: text.Source | None
  fraction: float  # the part of `source` for validation if `validation` is None

  def fingerprint(self) -> str | tuple[str, str]:
    """Return a value that changes when the text of a source changes."""
    if self.validation is None:
      return self.source.fingerprint()
    return self.source.fingerprint(), self.validation.fingerprint()

  def pieces(self) -> Iterator[Piece]:
    """Yield the text of both splits, always in the same order.

    Raises:
      UserError: a file cannot be read or is not text.
    """
    if self.validation is not None:
      for split, source in zip(SPLITS, (self.source, self.validation), strict=True):
        yield from _whole(source, split)
    elif lone := self.source.lone():
      cut, total = lone.cut(self.fraction)
      yield from _part(lone, 'train', 0, cut)
      yield from _part(lone, 'validation', cut, total)
    else:
      for document in self.source.documents():
        yield from _in_pieces(document, SPLITS[is_validation(document, self._share)])

  def exception(self) -> str:
    """Return a sentence about a document that is not in the split of its hash, or ''.

    Only a source of few documents, for its `fraction`, has such a document.
    """
    if self.validation is not None or self._share == self.fraction or self.source.lone():
      return ''
    more = self._share > self.fraction
    which, end, use = ('no', 'smallest', 'held out') if more else ('every', 'largest', 'trained on')
    return (
      f'config.data.validation_fraction={self.fraction} holds out {which} document by its hash, so '
      f'the one with the {end} hash is {use}'
    )

  @functools.cached_property
  def _share(self) -> float | fractions.Fraction:
    """The share of all hashes, from the smallest on, that is held out; it leaves no split empty.

    Documents are read until both splits have one.
    """
    lowest, highest = _HASHES, -1
    for document in self.source.documents():
      number = _hash(document)
      lowest, highest = min(lowest, number), max(highest, number)
      if lowest < self.fraction * _HASHES <= highest:
        break
    else:
      if lowest < highest:
        is_empty = lowest >= self.fraction * _HASHES
        return fractions.Fraction(lowest + 1 if is_empty else highest, _HASHES)
    return self.fraction


def open_corpus(config: DataConfig) -> Corpus:
  """Open the text sources of a run, without reading them.

  Raises:
    UserError: a source has another form or matches nothing, or both sources share a text.
  """
  source = text.open_source(config.source, config.text_field)
  if not config.validation_source:
    return Corpus(source, None, config.validation_fraction)
  validation = text.open_source(
    config.validation_source, config.text_field, _SETTINGS['validation'], _HELD_OUT
  )
  if isinstance(source, Files) and isinstance(validation, Files):
    common = sorted(set(source.paths) & set(validation.paths))
    same = common[0] if common else ''
  else:
    same = config.source if source.fingerprint() == validation.fingerprint() else ''
  if same:
    raise UserError(
      f'config.data.validation_source is {config.validation_source}, and {same} is also in '
      f'config.data.source={config.source}; leave it out of one of them, because validation text '
      'must not be trained on'
    )
  return Corpus(source, validation, 0.0)


def is_validation(document: str, fraction: float | fractions.Fraction) -> bool:
  """Return whether a document belongs to the validation split, by its text alone."""
  return _hash(document) < fraction * _HASHES


def _hash(document: str) -> int:
  digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little')


def _whole(source: text.Source, split: str) -> Iterator[Piece]:
  if lone := source.lone():
    yield from _part(lone, split, 0, None)
  else:
    for document in source.documents():
      yield from _in_pieces(document, split)


def _in_pieces(document: str, split: str) -> Iterator[Piece]:
  if len(document) <= _LONGEST_WHOLE:
    yield Piece(split, document, ends=True)
    return
  content = document.encode()
  yield from _part(text.LoneText('a document', lambda: [content]), split, 0, None)


def _part(lone: text.LoneText, split: str, start: int, stop: int | None) -> Iterator[Piece]:
  waiting = ''
  for piece in lone.pieces(start, stop):
    if waiting:
      yield Piece(split, waiting, ends=False)
    waiting = piece
  if waiting:
    yield Piece(split, waiting, ends=True)
