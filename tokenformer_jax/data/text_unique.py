"""Leave out documents that repeat an earlier one exactly (`data.deduplicate`).

All documents are read once to find the repeated ones, whose numbers are kept, so that processes can
then read a source in shards. The first of equal documents stays. The hashes take 16
bytes a document while the text is read, and about 50 bytes a document while they are compared.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from tokenformer_jax.data.lone_text import LoneText
from tokenformer_jax.data.text import Source, digest, ignore
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel.messages import say

_DIGEST_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Unique(Source):
  """A source without the documents that repeat an earlier one.

  Attributes:
    name: of the source, for messages.
    known: sources whose documents count as earlier ones.
    size: of the shards in which the documents are numbered, in bytes.
  """

  source: Source
  name: str
  known: tuple[Source, ...]
  size: int

  def members(self) -> tuple[Source, ...]:
    return self.source.members()

  def files(self) -> Iterable[str]:
    return self.source.files()

  def fingerprint(self) -> str:
    known = [source.fingerprint() for source in self.known]
    return digest(('unique', self.source.fingerprint(), known))

  def lone_file(self) -> str:
    return self.source.lone_file()

  def divide(self, size: int) -> Iterator[tuple[Source, int]]:
    """Yield shards of at most `self.size` bytes, because documents are numbered in these."""
    del size
    shards = self.source.divide(self.size)
    for (shard, shard_size), repeated in zip(shards, self._repeated, strict=True):
      yield _Without(shard, repeated), shard_size

  def _texts(self) -> Iterator[str | UserError]:
    for shard, _ in self.divide(self.size):
      yield from shard._texts()

  @functools.cached_property
  def _repeated(self) -> list[tuple[int, ...]]:
    """The numbers of the repeated documents of each shard, ascending."""
    say(f'looking for documents of {self.name} that repeat an earlier one')
    digests, ends = bytearray(), []
    for known in itertools.chain(*(source.members() for source in self.known)):
      if path := known.lone_file():
        lone = LoneText(path)
        digests += _digest(piece.encode() for piece in lone.pieces(0, lone.size()))
      else:
        _add(digests, known)
    first = len(digests) // _DIGEST_BYTES
    for shard, _ in self.source.divide(self.size):
      ends.append(_add(digests, shard))
    repeated = _find_repeated(digests)
    repeated = repeated[np.searchsorted(repeated, first) :]
    documents = len(digests) // _DIGEST_BYTES - first
    say(
      f'{len(repeated)} of {counted(documents, "document")} of {self.name} repeat an earlier one '
      f'and are left out{" (of the validation text as well)" if self.known else ""}'
    )
    starts = [first, *ends[:-1]]
    bounds = np.searchsorted(repeated, [first, *ends])
    return [
      tuple((repeated[low:high] - start).tolist())
      for low, high, start in zip(bounds[:-1], bounds[1:], starts, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Without(Source):
  """A source without some of its documents, which are given by their numbers."""

  source: Source
  repeated: tuple[int, ...]

  def fingerprint(self) -> str:
    return digest((self.source.fingerprint(), self.repeated))

  def files(self) -> Iterable[str]:
    return self.source.files()

  def _texts(self) -> Iterator[str | UserError]:
    repeated, number = frozenset(self.repeated), 0
    for text in self.source._texts():
      if not text or isinstance(text, UserError):
        yield text
        continue
      if number not in repeated:
        yield text
      number += 1


def _add(digests: bytearray, source: Source) -> int:
  """Append the digests of a source's documents, and return the number of all digests."""
  for document in source.documents(ignore):
    digests += _digest([document.encode()])
  return len(digests) // _DIGEST_BYTES


def _digest(pieces: Iterable[bytes]) -> bytes:
  hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  for piece in pieces:
    hashed.update(piece)
  return hashed.digest()


def _find_repeated(digests: bytearray) -> np.ndarray:
  """Return the ascending numbers of the digests that repeat an earlier one."""
  if not digests:
    return np.zeros(0, np.int64)
  halves = np.frombuffer(digests, np.uint64).reshape(-1, 2)
  order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: the first of equal ones comes first
  equal = np.ones(len(order) - 1, bool)
  for i in (0, 1):
    ordered = halves[order, i]
    equal &= ordered[1:] == ordered[:-1]
  return np.sort(order[1:][equal])
