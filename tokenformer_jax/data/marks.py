"""Say which tokens carry loss, and which begin a document, by marks of their ids.

Text has no marks: all of its tokens carry loss. In a store of conversations, only those of answers
do. An array has the token `id` without loss as −2 − id (−1 is no token), which keeps a window one
array and a batch of text what it was. A file has ids with loss with their highest bit set,
and all bits set where a row of packed conversations has no token. The next bit says that a
document begins.

In a batch whose documents are told apart, `BEGINS` is added to the id of the first token of each,
and to the first id of each row, by which a row says that it has such marks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

NO_TOKEN = -1
BEGINS = 2**30  # more than any id


def flip(ids: Any) -> Any:
  """Return ids with loss as ids without, and ids without loss as ids with."""
  return -2 - ids


def plain(ids: np.ndarray) -> np.ndarray:
  """Return ids without marks."""
  return ids_alone(np.where(ids < -1, flip(ids), ids))


def after(begin: Sequence[int], ids: np.ndarray) -> np.ndarray:
  """Return marked ids after those that begin a text, without loss, unless they begin with them."""
  opening = np.array(begin, np.int32)
  if np.array_equal(plain(ids)[: len(opening)], opening):
    return ids
  return np.concatenate([flip(opening), ids])


def begin(ids: np.ndarray, is_first: np.ndarray) -> np.ndarray:
  """Return ids, int32, with marks where a document begins."""
  return ids + np.where(is_first, np.where(ids < 0, -BEGINS, BEGINS), 0).astype(np.int32)


def begins(ids: Any, first: int) -> Any:
  """Return which ids of rows [B, T] begin a document; `first` does in a row without such marks."""
  marked = ids >= BEGINS
  return marked | (ids == first) & ~marked[:, :1]


def ids_alone(ids: Any) -> Any:
  """Return ids without the marks of beginnings, where all that begin a document carry loss."""
  return ids - BEGINS * (ids >= BEGINS).astype(np.int32)


def pack(ids: np.ndarray, dtype: np.dtype, *, bounds: bool = False) -> np.ndarray:
  """Return marked ids, int32, as they are in a file, which may say where documents begin."""
  bit = _bit(dtype)
  first = bounds * bit // 2 * (np.maximum(ids, flip(ids)) >= BEGINS)
  return (plain(ids).astype(np.int64) + (ids >= 0) * bit + first).astype(dtype)


def unpack(stored: np.ndarray, *, padded: bool = False, bounds: bool = False) -> np.ndarray:
  """Return ids, int32, marked by loss, from a file: see `pack`; it may be `padded`."""
  bit = _bit(stored.dtype)
  ids = (stored & (bit // (1 + bounds) - 1)).astype(np.int32)
  ids = np.where(stored & bit, ids, flip(ids))
  return np.where(padded & (stored == np.iinfo(stored.dtype).max), NO_TOKEN, ids)


def firsts(stored: np.ndarray) -> np.ndarray:
  """Return which tokens begin a document, bool, by a file that says it."""
  return (stored & _bit(stored.dtype) // 2 > 0) & (stored != np.iinfo(stored.dtype).max)


def _bit(dtype: np.dtype) -> int:
  return 2 ** (8 * dtype.itemsize - 1)
