"""Read the tokens of a split from the files of its shards."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.data import marks
from tokenformer_jax.storage import retry


class Tokens:
  """The tokens of a split, over all shards: `len(x)`, and `x[a:b]` as an array of ids.

  A range in one local shard is a part of a file that is mapped into memory. Positions are Python's
  integers and 64 bits wide, so they are exact for any store. Pickling copies no tokens. If they are
  `marked`, the ids say which of them carry loss: see `marks`.
  """

  def __init__(
    self, files: Sequence[str], counts: Sequence[int], dtype: str, *, marked: bool = False
  ):
    self.dtype, self._marked = np.dtype(dtype), marked
    self._files = tuple(files)
    self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    self._opened: dict[int, np.ndarray] = {}

  def __len__(self) -> int:
    return int(self._starts[-1])

  def __getitem__(self, key: slice) -> np.ndarray:
    """Return the tokens of a range `a:b`, read-only; as for a list, it is cut at the ends."""
    start, stop, step = key.indices(len(self))
    if step != 1:
      raise IndexError(f'the step of a range of tokens is {step}; it must be 1')
    pieces = [self._read(*span) for span in self._spans(start, stop)]
    match pieces:
      case []:
        found = np.empty(0, self.dtype)
      case [piece]:
        found = piece
      case _:
        found = np.concatenate(pieces)
    if not self._marked:
      return found
    return marks.unpack(found)

  def gather(self, ranges: Sequence[tuple[int, int]]) -> Iterable[np.ndarray]:
    """Return the tokens of each range; where reading waits for a server, all are asked at once."""
    return (self[start:stop] for start, stop in ranges)

  def __getstate__(self) -> dict[str, Any]:
    return self.__dict__ | {'_opened': {}}

  def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the shards of a range, each with the range's first and last position in it."""
    shard = int(np.searchsorted(self._starts, start, 'right')) - 1
    while start < stop:
      begin, end = int(self._starts[shard]), int(self._starts[shard + 1])
      if start < end:
        yield shard, start - begin, min(stop, end) - begin
        start = end
      shard += 1

  def _read(self, shard: int, start: int, stop: int) -> np.ndarray:
    if shard not in self._opened:
      file = self._files[shard]
      self._opened[shard] = retry.retried(
        lambda: np.memmap(file, self.dtype, mode='r'), f'opening {file}'
      )
    return self._opened[shard][start:stop]
