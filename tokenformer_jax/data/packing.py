"""Pack conversations into sequences: whole, each into the one that it leaves the least room in.

This is best fit decreasing, as in Ding et al. 2024 (arXiv 2404.10830), in blocks of documents that
follow each other, which bound the memory. A sequence is a row of T + 1 tokens. It begins with the
end of a document, unless documents have a beginning, and ends with padding. A longer document is
cut into rows: each begins with the last token of the row before it, and the rest of the last one is
filled up. So the tokens of a store are rows, and `order` is a function of the step as ever.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from tokenformer_jax.data import marks

_BLOCK_TOKENS = 2**20
_BLOCK_ROWS = 64  # at least


class Packer:
  """A writer of rows of `size` tokens, which packs the documents that `add` takes."""

  def __init__(self, size: int, lead: np.ndarray, write: Callable[[np.ndarray], None]):
    """Write rows by `write`; `lead` are the tokens before a document at the start of a row."""
    self._size, self._lead, self._write = size, lead, write
    self._documents: list[np.ndarray] = []
    self._waiting = 0  # tokens

  def add(self, ids: np.ndarray) -> None:
    """Add a document."""
    self._documents.append(ids)
    self._waiting += len(ids)
    if self._waiting >= max(_BLOCK_TOKENS, _BLOCK_ROWS * self._size):
      self.flush()

  def flush(self) -> None:
    """Write the rows of the documents that wait."""
    for row in pack(self._documents, self._size, self._lead):
      self._write(row)
    self._documents, self._waiting = [], 0


def pack(documents: Iterable[np.ndarray], size: int, lead: np.ndarray) -> Iterator[np.ndarray]:
  """Yield rows of `size` tokens with all documents; for `lead` see `Packer`."""
  rows: list[list[np.ndarray]] = []
  whole: list[np.ndarray] = []
  for document in documents:
    led = np.concatenate([lead, document])
    if len(led) <= size:
      whole.append(document)
    else:
      rows += [[led[i : i + size]] for i in range(0, len(led) - 1, size - 1)]
  rooms = sorted((size - len(start), row) for row, (start,) in enumerate(rows))
  for document in sorted(whole, key=len, reverse=True):
    found = bisect.bisect_left(rooms, (len(document), 0))
    if found == len(rooms):
      rooms.append((size - len(lead), len(rows)))
      rows.append([lead])
    room, row = rooms.pop(found)
    rows[row].append(document)
    bisect.insort(rooms, (room - len(document), row))
  for row in map(np.concatenate, rows):
    yield np.append(row, np.full(size - len(row), marks.NO_TOKEN, np.int32))
