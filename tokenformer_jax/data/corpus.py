"""Divide the text of a run into the training and the validation split.

If validation has its own source, each source is one split. Otherwise a hash of a document's text
selects the split, so adding or moving documents moves no other document. If that leaves a split
empty or short of text, it gets the documents with the nearest hashes. A source of one document is
cut at the start of a line, and its end is the validation split.

A long text comes in pieces, because a BPE needs 160 times the memory of the text that it encodes.
"""

import dataclasses
import fractions
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data import preference_rows, text
from tokenformer_jax.data.chat_rows import parse_document
from tokenformer_jax.data.chat_template import OURS, Template, find_template
from tokenformer_jax.data.lone_text import LoneText
from tokenformer_jax.data.sources import PLUS, open_source
from tokenformer_jax.data.tokenizers import Spans
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel.messages import say

SPLITS = ('train', 'validation')

UNIT_BYTES = 128 * 2**20  # of text, tokenized into one shard

_LONGEST_WHOLE = 16 * 2**20  # characters; a longer document is encoded in pieces
_PIECE_CHARACTERS = 2**20
_HASHES = 2**64
_LONG = 2**16  # characters of held-out text, enough for sequences of any length
_MANY = 10_000  # documents, of which a hash holds out a fraction
_HELD_OUT = ('validation', 'test', 'train')  # TFDS splits in order of preference
_T = TypeVar('_T')


class Range(NamedTuple):
  """A range of bytes of a text, all in one split."""

  split: str
  start: int
  stop: int
  begins: bool  # whether the text of the split begins here
  ends: bool  # and ends here


class Piece(NamedTuple):
  """A document, or a piece of a long document."""

  split: str
  text: str
  begins: bool = True  # whether the document begins here, with the ids that begin texts
  ends: bool = True  # and ends here
  answers: Spans | None = None  # of a conversation: the characters that carry loss
  label: str = ''  # of a conversation: names its row in errors


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The sources that `data.source` and `data.validation_source` name."""

  source: text.Source
  validation: text.Source | None
  fraction: float  # the share of `source` for validation if `validation` is None
  bad: text.Bad = text.refuse  # called for a document that cannot be read, to plan without it
  template: Template | None = None  # makes text of documents that are conversations
  known: tuple[text.Source, ...] | None = None  # text that others hold out; None: repeats stay

  @functools.cached_property
  def fingerprint(self) -> Any:
    """A value that changes when the text of a source changes."""
    texts: Any = self.source.fingerprint()
    if self.validation is not None:
      texts = texts, self.validation.fingerprint()
    if self.known is not None:
      texts = texts, 'unique', [source.fingerprint() for source in self.known]
    # The number is a version: stores of before lack what columns of their rows say.
    return (texts, 'chat', 2, self.template.fingerprint) if self.template else texts

  def pieces(self) -> Iterator[Piece]:
    """Yield the text of both splits, always in the same order."""
    for unit in self.units:
      yield from unit.pieces(self.bad)

  @functools.cached_property
  def units(self) -> 'list[Unit]':
    """Units of about `UNIT_BYTES` of text each; the corpus is their text in this order."""
    known = self.known or ()
    if self.validation is None:
      return self._units(self.source, '', known)
    return [
      *self._units(self.source, 'train', (self.validation, *known)),
      *self._units(self.validation, 'validation', ()),
    ]

  def _units(self, source: text.Source, split: str, known: tuple[text.Source, ...]) -> 'list[Unit]':
    """Return the units of a source that is of one split, or is divided: ''."""
    if not self.template and (path := source.lone_file()):
      lone = LoneText(path)
      total = lone.size()
      cut = total if split else lone.cut(self.fraction, total)
      ranges = [*_ranges(lone, split or 'train', 0, cut), *_ranges(lone, 'validation', cut, total)]
      sized = [(one, one.stop - one.start) for one in ranges]
      return [Unit((source,), ranges=group) for group in _groups(sized, UNIT_BYTES)]
    share = 0.0 if split else self._share
    groups = _groups(source.divide(UNIT_BYTES), UNIT_BYTES)
    units = [Unit(group, split, share, template=self.template) for group in groups]
    if self.known is None:
      return units
    documents = (unit.documents(text.ignore) for unit in units)
    repeated = _find_repeated(documents, known, f'the {split} text' if split else 'the text')
    return [dataclasses.replace(one, repeated=r) for one, r in zip(units, repeated, strict=True)]

  @functools.cached_property
  def _share(self) -> float | fractions.Fraction:
    """The share of all hashes, from the smallest on, that is held out; it leaves no split empty.

    Documents are read until both splits have one, and they are many or much is held out. If all are
    read, and those below the fraction have less than half of it of the text, the next ones are held
    out too, until they have all of it.
    """
    bound = self.fraction * _HASHES
    characters: dict[int, int] = {}  # of the documents, by hash
    held_out, trained_on = 0, False
    for document in self.source.documents(self.bad):
      if self.template and not [*_rendered(document, '', self.template, self.bad)]:
        continue
      number = _hash(document)
      characters[number] = characters.get(number, 0) + len(document)
      held_out += len(document) * (number < bound)
      trained_on |= number >= bound
      is_enough = held_out >= _LONG or len(characters) >= _MANY
      if trained_on and held_out and is_enough:
        return self.fraction
    hashes = sorted(characters)
    if len(hashes) < 2:  # No fraction divides one document.
      return self.fraction
    setting = f'config.data.validation_fraction={self.fraction} holds out'
    if not trained_on:
      say(f'{setting} every document by its hash, so the one with the largest hash is trained on')
      return fractions.Fraction(hashes[-1], _HASHES)
    share = self.fraction * sum(characters.values())
    if held_out >= share / 2:
      return self.fraction
    lengths = itertools.accumulate(characters[number] for number in hashes[:-2])
    count = 1 + sum(length < share for length in lengths)
    say(
      f'{setting} {counted(held_out, "character")} by their hashes, so the '
      f'{counted(count, "document")} with the smallest hashes, that fraction of the text, '
      f'{"is" if count == 1 else "are"} held out'
    )
    return fractions.Fraction(hashes[count - 1] + 1, _HASHES)


@dataclasses.dataclass(frozen=True)
class Unit:
  """Text that one process tokenizes into one shard: sources, and what divides them into splits.

  Attributes:
    split: the split of all of the text, or ''.
    share: if `split` is empty, the share of all hashes for validation.
    ranges: if the source is one document in all, the ranges of it to read, piece by piece.
    template: makes text of documents that are conversations; None: they are text.
    repeated: the numbers of documents that repeat an earlier one, and are left out.
  """

  sources: tuple[text.Source, ...]
  split: str = ''
  share: float | fractions.Fraction = 0.0
  ranges: tuple[Range, ...] = ()
  template: Template | None = None
  repeated: tuple[int, ...] = ()

  def fingerprint(self) -> str:
    """Return a hash of what the pieces depend on."""
    sources = [source.fingerprint() for source in self.sources]
    chat = (self.template.fingerprint,) if self.template else ()
    return text.digest((sources, self.split, self.share, self.ranges, self.repeated, *chat))

  def documents(self, bad: text.Bad) -> Iterator[str]:
    """Yield the documents of the sources; `bad` is called for each that cannot be read."""
    for source in self.sources:
      yield from source.documents(bad)

  def pieces(self, bad: text.Bad = text.refuse) -> Iterator[Piece]:
    """Yield the text of the unit; `bad` is called for each document that cannot be read."""
    if self.ranges:
      for one in self.ranges:
        yield from _range_pieces(LoneText(self.sources[0].lone_file()), one)
      return
    repeated = frozenset(self.repeated)
    for number, document in enumerate(self.documents(bad)):
      if number in repeated:
        continue
      split = self.split or SPLITS[_hash(document) < self.share * _HASHES]
      if self.template:
        yield from _rendered(document, split, self.template, bad)
      else:
        yield from _in_pieces(document, split)


def open_corpus(config: TextConfig) -> Corpus:
  """Open the text sources of a run, without reading them."""
  template = None if config.rows == 'text' else find_template(config)
  source = _open(config.source, config, config.rows, config.setting('source'), ('train',))
  name, held_out = config.setting('validation_source'), None
  if config.validation_source:
    held_out = _open(config.validation_source, config, config.rows, name)
  corpus = Corpus(
    source, held_out, 0.0 if held_out else config.validation_fraction, template=template
  )
  check_apart([(config, corpus)])
  if not config.deduplicate:
    return corpus
  known = tuple(
    _open(one.validation_source, config, one.rows, f'config.data.mixture.{other}.validation_source')
    for other, one in config.mixture.items()
    if one.validation_source
  )
  return dataclasses.replace(corpus, known=known)


def _open(
  spec: str, config: TextConfig, rows: str, setting: str, splits: tuple[str, ...] = _HELD_OUT
) -> text.Source:
  text_field = {'chat': text.CHAT, 'preference': text.PAIRS}.get(rows, config.text_field)
  source = open_source(spec, text_field, setting, splits)
  return source.parted(config.document_separator) if config.document_separator else source


def check_apart(texts: Sequence[tuple[TextConfig, Corpus | None]]) -> None:
  """Check that a run names each text once, so that no text is held out and trained on.

  A text is a file, whatever its name there and the form of the source. `texts` are the sources of
  the run and what they name; None: a token store is read instead.
  """
  named = []  # the setting, a source of it, and the files of that
  for config, corpus in texts:
    opened = (corpus.source, corpus.validation) if corpus else (None, None)
    for key, source in zip(('source', 'validation_source'), opened, strict=True):
      setting = f'{config.setting(key)}={getattr(config, key)}'
      specs = [spec.strip() for spec in getattr(config, key).split(PLUS) if spec]
      members = source.members() if source else [None] * len(specs)
      named += [(setting, *one) for one in zip(specs, members, strict=True)]
  if len(named) < 2:
    return
  known: dict[Any, str] = {}
  for setting, spec, source in named:
    files = source.files() if source else ()
    keys = {os.path.realpath(path): path for path in files} | {spec: spec}
    for key, name in keys.items():
      if other := known.get(key):
        where = 'twice' if other == setting else f'and {other} has it as well'
        raise UserError(
          f'{setting} has {name} {where}; leave it out of one of them, because a text is trained '
          'on once, or held out'
        )
    known |= dict.fromkeys(keys, setting)


def _hash(document: str) -> int:
  digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little')


def _ranges(lone: LoneText, split: str, start: int, stop: int) -> Iterator[Range]:
  """Yield ranges of about `UNIT_BYTES` of a split of the only text."""
  for begin, end in lone.divided(start, stop, UNIT_BYTES):
    if begin < end:
      yield Range(split, begin, end, begin == start, end == stop)


def _groups(sized: Iterable[tuple[_T, int]], size: int) -> Iterator[tuple[_T, ...]]:
  """Yield items, each given with its bytes, in groups of about `size` bytes."""
  group, filled = [], 0
  for item, item_size in sized:
    if group and filled + item_size > size:
      yield tuple(group)
      group, filled = [], 0
    group.append(item)
    filled += item_size
  yield tuple(group)


def _find_repeated(
  units: Iterable[Iterable[str]], known: Iterable[text.Source], name: str
) -> list[tuple[int, ...]]:
  """Return the numbers of the repeated documents of each unit, ascending; the first one stays.

  All documents are read once to find them, so that processes can then read the text in units. The
  hashes take some 100 bytes a document.
  Documents of the `known` sources count as earlier ones. Messages call the units `name`.
  """
  say(f'looking for documents of {name} that repeat an earlier one')
  hashes = {digest for source in known for digest in _digests(source)}
  held_out, total, repeated = bool(hashes), 0, []
  for documents in units:
    numbers = []
    for number, document in enumerate(documents):
      total += 1
      if (digest := _digest([document])) in hashes:
        numbers.append(number)
      hashes.add(digest)
    repeated.append(tuple(numbers))
  say(
    f'{sum(map(len, repeated))} of {counted(total, "document")} of {name} repeat an earlier one '
    f'and are left out{" (of the validation text as well)" if held_out else ""}'
  )
  return repeated


def _digests(source: text.Source) -> Iterable[bytes]:
  """Yield the hashes of the documents of a source that can be read."""
  for member in source.members():
    if path := member.lone_file():
      lone = LoneText(path)
      yield _digest(lone.pieces(0, lone.size()))
    else:
      yield from (_digest([document]) for document in member.documents(text.ignore))


def _digest(pieces: Iterable[str]) -> bytes:
  hashed = hashlib.blake2b(digest_size=16)
  for piece in pieces:
    hashed.update(piece.encode())
  return hashed.digest()


def _rendered(document: str, split: str, template: Template, bad: text.Bad) -> Iterator[Piece]:
  """Yield the text of a conversation, or both of a pair; `bad` is called if they have none."""
  label = getattr(document, 'label', '')
  try:
    if isinstance(document, preference_rows.Pair):
      texts = preference_rows.render(document, template)
    else:
      texts = [template.render(*parse_document(document), label=label)]
  except UserError as error:
    bad(error)
  else:
    # Other templates write what begins a text.
    begins = template.source == OURS or document.startswith(preference_rows.PLAIN)
    for one in texts:
      yield Piece(split, one.text, begins, one is texts[-1], one.answers, label)


def _in_pieces(document: str, split: str) -> Iterator[Piece]:
  """Yield a document; in pieces that end at line ends if it is very long."""
  if len(document) <= _LONGEST_WHOLE:
    yield Piece(split, document)
    return
  start = 0
  while start < len(document):
    limit = start + _PIECE_CHARACTERS
    stop = document.rfind('\n', start, limit) + 1 or limit
    yield Piece(split, document[start:stop], begins=not start, ends=stop >= len(document))
    start = stop


def _range_pieces(lone: LoneText, span: Range) -> Iterator[Piece]:
  waiting, begins = '', span.begins
  for piece in lone.pieces(span.start, span.stop):
    if waiting:
      yield Piece(span.split, waiting, begins, ends=False)
      begins = False
    waiting = piece
  if waiting:
    yield Piece(span.split, waiting, begins, span.ends)
