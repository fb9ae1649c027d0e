"""Find documents that repeat an earlier one exactly (`data.deduplicate`).

All documents are read once to find the repeated ones, whose numbers are kept, so that processes can
then read the text in units. The first of equal documents stays. The hashes take 16 bytes a document
while the text is read, and about 50 bytes a document while they are compared.
"""

import hashlib
import itertools
from collections.abc import Iterable

import numpy as np

from tokenformer_jax.data.lone_text import LoneText
from tokenformer_jax.data.text import Source, ignore
from tokenformer_jax.errors import counted
from tokenformer_jax.parallel.messages import say

_DIGEST_BYTES = 16


def find_repeated(
  units: Iterable[Iterable[str]], known: Iterable[Source], name: str
) -> list[tuple[int, ...]]:
  """Return the numbers of the repeated documents of each unit, ascending.

  Documents of the `known` sources count as earlier ones. Messages call the units `name`.
  """
  say(f'looking for documents of {name} that repeat an earlier one')
  digests, ends = bytearray(), []
  for source in itertools.chain(*(source.members() for source in known)):
    if path := source.lone_file():
      lone = LoneText(path)
      digests += _digest(piece.encode() for piece in lone.pieces(0, lone.size()))
    else:
      _add(digests, source.documents(ignore))
  first = len(digests) // _DIGEST_BYTES
  for documents in units:
    ends.append(_add(digests, documents))
  repeated = _repeated_numbers(digests)
  bounds = np.searchsorted(repeated, [first, *ends])
  say(
    f'{len(repeated) - bounds[0]} of {counted(ends[-1] - first, "document")} of {name} repeat an '
    f'earlier one and are left out{" (of the validation text as well)" if first else ""}'
  )
  return [
    tuple((repeated[low:high] - start).tolist())
    for low, high, start in zip(bounds[:-1], bounds[1:], [first, *ends[:-1]], strict=True)
  ]


def _add(digests: bytearray, documents: Iterable[str]) -> int:
  """Append the digests of documents, and return the number of all digests."""
  for document in documents:
    digests += _digest([document.encode()])
  return len(digests) // _DIGEST_BYTES


def _digest(pieces: Iterable[bytes]) -> bytes:
  hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  for piece in pieces:
    hashed.update(piece)
  return hashed.digest()


def _repeated_numbers(digests: bytearray) -> np.ndarray:
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
