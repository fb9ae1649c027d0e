"""Open files of text: read again after errors that pass, and unpack .gz and .zst piece by piece.

A document is held in memory, so it has a limit. A packed file of a few kilobytes can hold
gigabytes, so it is unpacked in chunks of at most 32 MiB, and reading ends at the same limit.
"""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import retried

LONGEST_DOCUMENT = 2**30  # bytes; decoding holds up to four copies in memory

_BUFFER_BYTES = 2**20
_CHUNK_BYTES = 128 * 2**10
_ZSTD_WINDOW = 2**31  # bytes, as `zstd --long=31` needs
_MOST_JSON_BYTES = 2**24  # more than files of settings have
# A block of four bytes unpacks to at most 128 KiB, so these unpack to at most 32 MiB.
_ZSTD_READ_BYTES = 2**10


class SteadyFile(io.RawIOBase):
  """A file that is reopened at its position after a transient error.

  `size` is needed for positions that count from the end.
  """

  def __init__(self, path: str, position: int = 0, size: int = 0):
    super().__init__()
    self._path, self._position, self._size = path, position, size
    self._file: IO[bytes] | None = None

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def seek(self, offset: int, whence: int = 0, /) -> int:
    self._position = offset + (0, self._position, self._size)[whence]
    return self._position

  def tell(self) -> int:
    return self._position

  def readinto(self, buffer: Any, /) -> int:
    with reading(self._path):
      data = retried(lambda: self._read(len(buffer)), f'reading {self._path}')
    buffer[: len(data)] = data
    return len(data)

  def _read(self, size: int) -> bytes:
    try:
      if self._file is None:
        self._file = paths.open_to_read(self._path)
      self._file.seek(self._position)
      data = self._file.read(size)
    except Exception:
      self._close()
      raise
    self._position += len(data)
    return data

  def _close(self) -> None:
    if self._file is not None:
      with contextlib.suppress(Exception):  # Nothing was written, so no error matters here.
        self._file.close()
    self._file = None

  def close(self) -> None:
    self._close()
    super().close()


def is_packed(path: str) -> bool:
  """Return whether a file must be unpacked from its start."""
  return path.endswith(('.gz', '.zst'))


@contextlib.contextmanager
def opened(path: str, start: int = 0) -> Iterator[io.BufferedReader]:
  """Open the unpacked content of a file from byte `start` on, to read it forwards.

  Inside, errors of reading are UserErrors, or TransientErrors if the storage failed for minutes.
  """
  with reading(path), SteadyFile(path, 0 if is_packed(path) else start) as raw:
    if not is_packed(path):
      yield io.BufferedReader(raw, _CHUNK_BYTES)
      return
    packed = io.BufferedReader(raw, _BUFFER_BYTES)  # In a bucket each read is a call.
    content: Any = gzip.GzipFile(fileobj=packed) if path.endswith('.gz') else _ZstdFile(packed)
    file = io.BufferedReader(content, _CHUNK_BYTES)
    while start and (skipped := len(file.read(min(start, _CHUNK_BYTES)))):
      start -= skipped
    yield file


def _zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
  """Yield the content of a zstd file of any number of frames.

  The library's own stream reader ends silently at a frame that is cut short.
  """
  decompressor, frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW), None
  while waiting := file.read(_ZSTD_READ_BYTES):
    while waiting:
      frame = frame or decompressor.decompressobj(write_size=_CHUNK_BYTES)
      if content := frame.decompress(waiting):
        yield content
      waiting = frame.unused_data
      if frame.eof:
        frame = None
  if frame:
    raise EOFError('the last zstd frame has no end')


def lines(path: str, file: IO[bytes]) -> Iterator[bytes]:
  """Yield the lines of a file, with their line ends."""
  while line := file.readline(LONGEST_DOCUMENT + 1):
    if len(line) > LONGEST_DOCUMENT:
      raise TooLongError(path)
    yield line


def parts(path: str, file: IO[bytes], separator: bytes) -> Iterator[bytes]:
  """Yield a file in parts, each of which but the last one ends with a separator."""
  waiting, searched, chunk = bytearray(), 0, b'-'
  while chunk:
    chunk = file.read(_CHUNK_BYTES)
    waiting += chunk
    while (start := waiting.find(separator, searched)) >= 0:
      yield bytes(waiting[: start + len(separator)])
      del waiting[: start + len(separator)]
      searched = 0
    searched = max(0, len(waiting) - len(separator) + 1)
    if len(waiting) > LONGEST_DOCUMENT:
      raise TooLongError(path)
  if waiting:
    yield bytes(waiting)


def whole(path: str, file: IO[bytes]) -> bytearray:
  """Return the content of a file that is one document."""
  content = bytearray()
  while chunk := file.read(_CHUNK_BYTES):
    content += chunk
    if len(content) > LONGEST_DOCUMENT:
      raise TooLongError(path)
  return content


class TooLongError(UserError):
  """A document of a file has more bytes than may be in memory."""

  def __init__(self, path: str):
    super().__init__(
      f'{path} has a document of more than {LONGEST_DOCUMENT >> 20} MiB, the limit for one '
      'document, because a document is held in memory; split the text into lines of a .jsonl file, '
      'or make it the only file of the source, which is read in pieces'
    )


class _ZstdFile(io.RawIOBase):
  def __init__(self, packed: IO[bytes]):
    super().__init__()
    self._chunks, self._waiting = _zstd_chunks(packed), memoryview(b'')

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any, /) -> int:
    if not self._waiting:
      self._waiting = memoryview(next(self._chunks, b''))
    count = min(len(buffer), len(self._waiting))
    buffer[:count] = self._waiting[:count]
    self._waiting = self._waiting[count:]
    return count


def identity(path: str) -> tuple[Any, ...]:
  """Return name, size and modification time of a file (in a bucket: the object's tag)."""
  with reading(path):
    return retried(lambda: paths.identity(path), f'looking at {path}')


def read_json(file: Path) -> dict[str, Any]:
  """Return the object in a JSON file of a model's folder."""
  try:
    if file.stat().st_size > _MOST_JSON_BYTES:
      raise ValueError(f'more than {_MOST_JSON_BYTES:,} bytes')
    return parse_object(file.read_bytes(), str(file))
  except (OSError, ValueError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(f'{file} cannot be read ({reason}); download it again') from error


def parse_object(content: bytes, name: str) -> dict[str, Any]:
  """Return the JSON object in the content of a file, which errors call `name`."""
  try:
    values = json.loads(content.decode())
  except (ValueError, RecursionError) as error:
    raise UserError(f'{name} is not valid JSON ({error!s:.80}); download it again') from error
  if not isinstance(values, dict):
    raise UserError(
      f'{name} holds a JSON {type(values).__name__}, not an object; download it again'
    )
  return values


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Turn errors of reading a file into UserErrors."""
  try:
    yield
  except (UserError, TransientError):
    raise
  except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
    raise UserError(f'{path} is damaged or cut short ({error}); copy or pack it again') from error
  except paths.errors(path) as error:
    raise UserError(f'{path} cannot be read: {paths.reason(error)}') from error
