"""Say which tokens carry loss: by the sign of an id in arrays, by a bit in the files of a store.

Text has no marks: all of its tokens carry loss. In a store of conversations, only those of answers
do. An array has the token `id` without loss as −2 − id (−1 is no token), which keeps a window one
array and a batch of text what it was. A file has ids with loss with their highest bit set,
and all bits set where a row of packed conversations has no token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

NO_TOKEN = -1


def flip(ids: Any) -> Any:
  """Return ids with loss as ids without, and ids without loss as ids with."""
  return -2 - ids


def plain(ids: np.ndarray) -> np.ndarray:
  """Return ids without marks."""
  return np.where(ids < -1, flip(ids), ids)


def after(begin: Sequence[int], ids: np.ndarray) -> np.ndarray:
  """Return marked ids after those that begin a text, without loss, unless they begin with them."""
  opening = np.array(begin, np.int32)
  if np.array_equal(plain(ids)[: len(opening)], opening):
    return ids
  return np.concatenate([flip(opening), ids])


def pack(ids: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Return marked ids, int32, as they are in a file."""
  return (plain(ids).astype(np.int64) + (ids >= 0) * _bit(dtype)).astype(dtype)


def unpack(stored: np.ndarray, *, padded: bool = False) -> np.ndarray:
  """Return marked ids, int32, from a file, which may be `padded`."""
  bit = stored.dtype.type(_bit(stored.dtype))
  ids = (stored & ~bit).astype(np.int32)
  ids = np.where(stored & bit, ids, flip(ids))
  return np.where(padded & (stored == np.iinfo(stored.dtype).max), NO_TOKEN, ids)


def _bit(dtype: np.dtype) -> int:
  return 2 ** (8 * dtype.itemsize - 1)
