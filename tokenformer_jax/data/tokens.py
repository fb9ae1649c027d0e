"""Keep token ids in zarr3 arrays, which TensorStore writes once and reads in windows.

An array has files of `_FILE_TOKENS` tokens. A file has blocks of `_BLOCK_TOKENS`, each with a
checksum, and an index of its blocks. A read takes whole blocks, so a changed byte is an error, and
so is a file that is missing: without `fill_missing_data_reads` it would read as zeros.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from tokenformer_jax.data import marks
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths, retry

_FILE_TOKENS = 2**22
_BLOCK_TOKENS = 2**12
_CACHE_BYTES = 10**8  # of blocks, and of the indexes of files, in the memory of a process


class ArraySlice(NamedTuple):
  """Some tokens of an array: `length` from `start` on, of the `total` in the folder."""

  folder: paths.Path
  start: int
  length: int
  total: int


def write(folder: Path, tokens: np.ndarray) -> None:
  """Write an array into a new folder of this host. The same tokens give the same bytes."""
  try:
    array = ts.open(_spec(folder, len(tokens), tokens.dtype), create=True).result()
    for start in range(0, len(tokens), _FILE_TOKENS):
      stop = min(start + _FILE_TOKENS, len(tokens))
      array[start:stop].write(tokens[start:stop]).result()
  except ValueError as error:
    if system_error := _system_error(error):
      raise system_error from error
    raise


def _system_error(error: ValueError) -> OSError | None:
  """Return the error of the system that TensorStore reports in the text of its own, if any."""
  if match := re.search(r"os_error_code='(\d+)'", str(error)):
    return OSError(int(match[1]), os.strerror(int(match[1])))
  return None


class DamagedError(UserError):
  """A shard that is not as it was written."""

  folder: paths.Path


class Tokens:
  """The tokens of a split, over all shards: `len(x)`, and `x[a:b]` as an array of ids.

  Positions are Python's integers and 64 bits wide, so they are exact for any store. Pickling copies
  no tokens. If they are `marked`, the ids say which of them carry loss: see `marks`. If they are
  `packed`, they are rows: see `shard_writer.Packer`. With `bounds` the files say where documents
  begin.

  `repair` is called with the folder of a shard that is damaged, to write it again.
  """

  def __init__(
    self,
    slices: Sequence[ArraySlice],
    dtype: str,
    *,
    marked: bool = False,
    packed: bool = False,
    bounds: bool = False,
  ):
    self.dtype, self._marked, self.packed = np.dtype(dtype), marked, packed
    self._bounds, self._first, self._after_end = bounds, -1, False
    self.repair: Callable[[paths.Path], None] | None = None
    self._repaired: set[paths.Path] = set()
    self._slices = tuple(slices)
    lengths = [one.length for one in slices]
    self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    self._arrays: dict[int, ts.TensorStore] = {}

  def __len__(self) -> int:
    return int(self._starts[-1])

  def begin_as(self, tokenizer: Tokenizer) -> None:
    """Set how documents begin: without bounds with one id.

    Conversations begin with the end of the one before if the tokenizer begins all texts so.
    """
    self._first = tokenizer.boundary
    self._after_end = self._marked and tokenizer.begin == (tokenizer.end_of_document,)

  def __getitem__(self, key: slice) -> np.ndarray:
    """Return the tokens of a range `a:b`; as for a list, it is cut at the ends."""
    start, stop, step = key.indices(len(self))
    if step != 1:
      raise IndexError(f'the step of a range of tokens is {step}; it must be 1')
    return self.gather([(start, stop)])[0]

  def gather(self, ranges: Sequence[tuple[int, int]], *, bounds: bool = False) -> list[np.ndarray]:
    """Return the tokens of each range; all are read at the same time.

    With `bounds` they are marked where documents begin: see `marks`.
    """

    def once() -> list[np.ndarray]:
      reads = [[self._start_read(*span) for span in self._spans(*one)] for one in ranges]
      nothing = np.empty(0, self.dtype)
      return [np.concatenate([nothing, *(self._result(*r) for r in window)]) for window in reads]

    try:
      stored = retry.retried(once, 'reading tokens')
    except DamagedError as error:
      if self.repair is None or error.folder in self._repaired:
        raise
      self.repair(error.folder)
      self._repaired.add(error.folder)
      self._arrays = {}
      return self.gather(ranges, bounds=bounds)
    windows = stored
    if self._marked or self._bounds:
      unpack = functools.partial(marks.unpack, padded=self.packed, bounds=self._bounds)
      windows = [*map(unpack, stored)]
    return [*map(self._with_bounds, windows, stored)] if bounds else windows

  def _with_bounds(self, ids: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Mark the ids of a range that begin documents, and the first of all."""
    ids = ids.astype(np.int32)
    is_first = by_id = marks.plain(ids) == self._first
    if self._bounds:
      is_first = marks.firsts(stored)
      if self._after_end:  # unless a conversation has this end itself
        is_first = is_first & by_id | np.append(is_first[1:], False)
    is_first[:1] = True
    return marks.begin(ids, is_first)

  def __getstate__(self) -> dict[str, Any]:
    return self.__dict__ | {'_arrays': {}}

  def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield the shards of a range, each with the range's first and last position in it."""
    shard = int(np.searchsorted(self._starts, start, 'right')) - 1
    while start < stop:
      begin, end = int(self._starts[shard]), int(self._starts[shard + 1])
      if start < end:
        yield shard, start - begin, min(stop, end) - begin
        start = end
      shard += 1

  def _start_read(self, shard: int, start: int, stop: int) -> tuple[paths.Path, Any]:
    (folder, first, _, total), arrays = self._slices[shard], self._arrays
    if shard not in arrays:
      # A complete store never changes, but another one may replace it at its address.
      spec = _spec(folder, total, self.dtype) | {'recheck_cached_data': 'open'}
      array = ts.open(spec, open=True, assume_metadata=True, context=_context())
      arrays[shard] = array.result()
    return folder, arrays[shard][first + start : first + stop].read()

  def _result(self, folder: paths.Path, read: Any) -> np.ndarray:
    try:
      return read.result()
    except ValueError as error:  # TensorStore raises it with its status.
      if retry.is_transient(error):
        raise
      if system_error := _system_error(error):
        raise UserError(f'the tokens in {folder} cannot be read ({system_error})') from error
      damaged = DamagedError(
        f'the tokens in {folder} are not as they were written ({retry.one_line(error)}); remove '
        f'{folder.parent} and make the token store again'
      )
      damaged.folder = folder
      raise damaged from error


@functools.cache
def _context() -> ts.Context:
  return ts.Context({'cache_pool': {'total_bytes_limit': _CACHE_BYTES}})


def _spec(folder: paths.Path, count: int, dtype: np.dtype) -> dict[str, Any]:
  path = f'{os.fspath(folder)}/'
  kvstore: dict[str, str] = {'driver': 'file', 'path': path}
  if paths.in_bucket(path):
    bucket, _, name = path.removeprefix('gs://').partition('/')
    kvstore = {'driver': 'gcs', 'bucket': bucket, 'path': name}
  codecs = [{'name': 'bytes', 'configuration': {'endian': 'little'}}, {'name': 'crc32c'}]
  sharding = {'chunk_shape': [_BLOCK_TOKENS], 'codecs': codecs, 'index_codecs': codecs}
  return {
    'driver': 'zarr3',
    'kvstore': kvstore,
    'store_data_equal_to_fill_value': True,
    'fill_missing_data_reads': False,
    'metadata': {
      'shape': [count],
      'data_type': dtype.name,
      'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': [_FILE_TOKENS]}},
      'codecs': [{'name': 'sharding_indexed', 'configuration': sharding}],
    },
  }
