"""Read the tokens of a store in a bucket by range, through a cache on a disk of this host.

A process asks for the windows of a batch at once, so a batch waits about as long as one request.
The cache is one file without a name in a folder, so nothing of it is left when the process ends,
however it ends. In a random order no window is needed sooner than another one, so what came first
stays in the cache: the share of reads that it saves is the share of the tokens that it holds. What
it cannot hold is read without anything around it.
"""

import concurrent.futures
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tokenformer_jax.data.tokens import Tokens
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import paths, retry

_REQUESTS = 32  # at the same time
_PIECE = 64 * 2**10  # bytes that the cache holds or does not hold


class BucketTokens(Tokens):
  """The tokens of a split in a bucket.

  Args:
    files, counts, dtype, marked: as of `Tokens`; `files` are URLs.
    folder: the folder for the cache, if it has a size.
    cache_bytes: the largest size of the cache; a copy in another process has its own.
  """

  def __init__(
    self,
    files: Sequence[str],
    counts: Sequence[int],
    dtype: str,
    folder: Path | None,
    cache_bytes: int,
    *,
    marked: bool = False,
  ):
    super().__init__(files, counts, dtype, marked=marked)
    self._folder, self._most = folder, cache_bytes // _PIECE
    pieces = [-(-count * self.dtype.itemsize // _PIECE) for count in counts]
    self._first_piece = np.concatenate([[0], np.cumsum(pieces, dtype=np.int64)])
    self._begin()

  def _begin(self) -> None:
    self._cache: int | None = None  # the file descriptor
    self._cached = np.zeros(0, bool)
    self._held = 0
    self._lock = threading.Lock()
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None

  def __getstate__(self) -> dict[str, Any]:
    own = ('_cache', '_cached', '_held', '_lock', '_pool')
    return {name: value for name, value in super().__getstate__().items() if name not in own}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._begin()

  def __del__(self) -> None:
    if getattr(self, '_cache', None) is not None:
      os.close(self._cache)

  def gather(self, ranges: Sequence[tuple[int, int]]) -> Iterable[np.ndarray]:
    with self._lock:
      if self._pool is None:
        self._pool = concurrent.futures.ThreadPoolExecutor(_REQUESTS, 'tokens')
    return self._pool.map(lambda span: self[span[0] : span[1]], ranges)

  def _read(self, shard: int, start: int, stop: int) -> np.ndarray:
    width = self.dtype.itemsize
    data = self._bytes(shard, start * width, stop * width)
    return np.frombuffer(data, self.dtype)

  def _bytes(self, shard: int, start: int, stop: int) -> bytes:
    """Return a range of the bytes of a shard."""
    first, last = start // _PIECE, -(-stop // _PIECE)
    at = int(self._first_piece[shard])
    pieces = slice(at + first, at + last)
    with self._lock:
      self._open_cache()
      cached = self._cached[pieces]
      missing = len(cached) - int(cached.sum())
      keeps = self._held + missing <= self._most
    if not missing:
      return os.pread(self._cache, stop - start, at * _PIECE + start)
    if not keeps:
      return self._fetch(shard, start, stop)
    width = self.dtype.itemsize
    size = int(self._starts[shard + 1] - self._starts[shard]) * width
    begin, end = first * _PIECE, min(last * _PIECE, size)
    data = self._fetch(shard, begin, end)
    self._keep(pieces, data)
    return data[start - begin : stop - begin]

  def _fetch(self, shard: int, start: int, stop: int) -> bytes:
    file = self._files[shard]
    try:
      data = retry.retried(lambda: paths.read_range(file, start, stop), f'reading {file}')
    except TransientError:
      raise
    except Exception as error:  # Storage libraries raise exceptions of many types.
      raise UserError(
        f'the shard {file} cannot be read ({paths.reason(error)}); check it with `tokenformer '
        'verify --store=…`, and make the token store again if it is gone'
      ) from error
    if len(data) != stop - start:
      raise UserError(
        f'the shard {file} ends before byte {stop:,}, so it has changed since it was written; make '
        'the token store again'
      )
    return data

  def _open_cache(self) -> None:
    if self._cache is None and self._most:
      self._folder.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=self._folder) as file:
        self._cache = os.dup(file.fileno())
    if not len(self._cached):
      self._cached = np.zeros(int(self._first_piece[-1]), bool)

  def _keep(self, pieces: slice, data: bytes) -> None:
    """Write whole pieces into the cache; a disk that is full ends its growth."""
    try:
      written = os.pwrite(self._cache, data, pieces.start * _PIECE)
    except OSError as error:
      written = 0
      logging.warning('the cache in %s stays as it is (%s)', self._folder, paths.reason(error))
    with self._lock:
      if written < len(data):
        self._most = 0
        return
      self._held += len(self._cached[pieces]) - int(self._cached[pieces].sum())
      self._cached[pieces] = True
