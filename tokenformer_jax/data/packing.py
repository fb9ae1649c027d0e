"""Pack conversations into rows of T tokens: whole, each where it leaves the least room.

This is best fit decreasing, as in Ding et al. 2024 (arXiv 2404.10830). A row begins with the end of
a document, if documents have no beginning, and is filled up with ends, which carry no loss. A
document longer than a row is cut at the ends of rows that follow each other, and the last of them
is filled up. So rows are the windows of `order`: their last target, the first token of the next
row, carries loss only if it goes on with the document.
"""

import bisect
from collections.abc import Iterable, Iterator

import numpy as np

from tokenformer_jax.data import marks
from tokenformer_jax.data.tokenizers import Tokenizer

BLOCK = 2**20  # tokens of documents that are packed together


def pack(documents: Iterable[np.ndarray], size: int, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
  """Yield rows of `size` tokens with the marked ids of documents, which all end with an end."""
  end = np.array([marks.flip(tokenizer.end_of_document)], np.int32)
  lead = end[: not tokenizer.opening]
  rows: list[list[np.ndarray]] = []
  whole: list[np.ndarray] = []
  for ids in documents:
    led = np.concatenate([lead, ids])
    if len(led) <= size:
      whole.append(ids)
    else:
      rows += [[piece] for piece in np.split(led, range(size, len(led), size))]
  rooms = sorted((size - len(piece), row) for row, (piece,) in enumerate(rows))
  for ids in sorted(whole, key=len, reverse=True):
    found = bisect.bisect_left(rooms, (len(ids), 0))
    if found == len(rooms):
      rooms.append((size - len(lead), len(rows)))
      rows.append([lead])
    room, row = rooms.pop(found)
    rows[row].append(ids)
    bisect.insort(rooms, (room - len(ids), row))
  for row in rows:
    ids = np.concatenate(row)
    yield np.append(ids, np.repeat(end, size - len(ids)))
