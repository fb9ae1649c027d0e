"""Unpack files piece by piece, with a limit on memory that follows the size of the file.

A packed file of a few kilobytes can hold gigabytes, and can request a window of 2 GiB. Text does
not compress a hundredfold. So the parts of a packed file that stay in memory, a document or a
window, must not exceed the limit of `held_at_most`.
"""

import contextlib
import functools
import gzip
import io
import os
import shlex
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, Protocol

import zstandard

from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import retried

LONGEST_DOCUMENT = 2**30  # bytes; decoding holds up to four copies in memory

_BUFFER_BYTES = 2**20
_CHUNK_BYTES = 128 * 2**10
_SUFFIXES = ('.gz', '.zst')
_RATIO = 100  # largest size of a document or window, relative to its packed file
_ALWAYS_HELD = 64 * 2**20  # bytes that any packed file may request
_ZSTD_WINDOW = 2**31  # bytes, as `zstd --long=31` needs
_ZSTD_HEADER_BYTES = 18  # largest size of a frame header
# A block of four bytes unpacks to at most 128 KiB, so this slice unpacks to at most 32 MiB.
_ZSTD_SLICE_BYTES = 2**10


class _Readable(Protocol):
  def read(self, size: int = -1, /) -> bytes: ...


def is_packed(path: str) -> bool:
  """Return whether a file must be unpacked from its start."""
  return path.endswith(_SUFFIXES)


def chunks(path: str, start: int = 0) -> Iterator[bytes]:
  """Yield the unpacked content of a file in pieces of at most 32 MiB, mostly far smaller.

  A file that is not packed may be read from a byte `start` on.

  Raises:
    UserError: the file cannot be read, is damaged, or requests too much memory.
    TransientError: the file exists, but the storage did not return it for minutes.
  """
  with reading(path):
    file = Steady(path, start)
    try:
      if path.endswith('.zst'):
        yield from _zstd_chunks(file, path)
        return
      content: _Readable = file
      if path.endswith('.gz'):  # gzip reads a few bytes at a time: in a bucket, each is a call.
        content = gzip.GzipFile(fileobj=io.BufferedReader(_Raw(file), _BUFFER_BYTES))
      while chunk := content.read(_CHUNK_BYTES):
        yield chunk
    finally:
      file.close()


class Limit:
  """The limit of `held_at_most`.

  The size of the file is looked up once, and for long content only: in a bucket this is a call.
  """

  def __init__(self, path: str):
    self._path = path

  def allows(self, length: int) -> bool:
    """Return whether `length` bytes of the content may be in memory at once."""
    return length <= min(_ALWAYS_HELD, LONGEST_DOCUMENT) or length <= self._most

  @functools.cached_property
  def _most(self) -> int:
    return held_at_most(self._path)


def held_at_most(path: str) -> int:
  """Return the number of bytes of a file's content that may be in memory at once."""
  if not is_packed(path):
    return LONGEST_DOCUMENT
  return min(LONGEST_DOCUMENT, _largest_window(path))


def lines(path: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
  """Yield the lines of a file without line ends. Join the pieces of a long line only once."""
  pieces, length, limit = [], 0, Limit(path)
  for chunk in chunks:
    first, *others = chunk.split(b'\n')
    pieces.append(first)
    length += len(first)
    if not limit.allows(length):
      raise too_long(path)
    for other in others:
      joined = [b''.join(pieces)]
      pieces.clear()
      yield joined.pop()  # Only the caller has the line.
      pieces, length = [other], len(other)
  yield b''.join(pieces)


def too_long(path: str) -> UserError:
  """Return the error for a document of more bytes than may be in memory."""
  most = held_at_most(path)
  share = '' if most == LONGEST_DOCUMENT else ' in a packed file of its size'
  return UserError(
    f'{path} has a document of more than {most >> 20} MiB, the limit for one document{share}, '
    'because a document is held in memory; split the text into lines of a .jsonl file, or make it '
    'the only file of the source, which is read in pieces'
  )


def _largest_window(path: str) -> int:
  return max(_ALWAYS_HELD, _RATIO * size(path))


def size(path: str) -> int:
  """Return the packed size of a file in bytes."""
  return identity(path)[1]


def identity(path: str) -> tuple[str, int, int | str]:
  """Return name, size and modification time of a file (in a bucket: the object's tag)."""
  with reading(path):
    return retried(lambda: paths.identity(path), f'looking at {path}')


def file_key(path: str) -> Any:
  """Return a value that is equal for all names of a file; an object in a bucket has one name."""
  if paths.in_bucket(path):
    return path
  with reading(path):
    stat = retried(lambda: os.stat(path), f'looking at {path}')
  return stat.st_dev, stat.st_ino


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


class Steady:
  """A file that is reopened at its position after a transient error."""

  def __init__(self, path: str, position: int = 0):
    self._path, self.position = path, position
    self._file: IO[bytes] | None = None

  def read(self, size: int = -1) -> bytes:
    return retried(lambda: self._read(size), f'reading {self._path}')

  def _read(self, size: int) -> bytes:
    try:
      if self._file is None:
        self._file = paths.open_to_read(self._path)
      self._file.seek(self.position)
      data = self._file.read(size)
    except Exception:
      self.close()
      raise
    self.position += len(data)
    return data

  def close(self) -> None:
    if self._file is not None:
      with contextlib.suppress(Exception):  # Nothing was written, so no error matters here.
        self._file.close()
    self._file = None


class _Raw(io.RawIOBase):
  """A file as io.BufferedReader takes one."""

  def __init__(self, file: Steady):
    self._file = file

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: memoryview) -> int:
    data = self._file.read(len(buffer))
    buffer[: len(data)] = data
    return len(data)


def _zstd_chunks(file: _Readable, path: str) -> Iterator[bytes]:
  """Yield the content of a zstd file of any number of frames.

  The library's own stream reader ends silently at a frame that is cut short. A window takes memory
  only as it fills, so a short text whose frame announces a wide window, which a pipe into
  `zstd --long=31` produces, can be read.
  """
  decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
  most, frame, window, unpacked, waiting = 0, None, 0, 0, b''
  while waiting := waiting or file.read(_CHUNK_BYTES):
    if frame is None:
      if len(waiting) < _ZSTD_HEADER_BYTES:
        waiting += file.read(_CHUNK_BYTES)
      window = zstandard.get_frame_parameters(waiting[:_ZSTD_HEADER_BYTES]).window_size
      frame, unpacked = decompressor.decompressobj(write_size=_CHUNK_BYTES), 0
    rest = b''
    for start in range(0, len(waiting), _ZSTD_SLICE_BYTES):
      content = frame.decompress(waiting[start : start + _ZSTD_SLICE_BYTES])
      unpacked += len(content)
      if (held := min(window, unpacked)) > _ALWAYS_HELD:
        most = most or _largest_window(path)
      if held > max(most, _ALWAYS_HELD):
        raise UserError(
          f'{path} requests a window of {window >> 20} MiB, but a file of its size may have '
          f'{most >> 20} MiB at most; pack it again with a smaller window: '
          f'zstd -dc --long=31 {shlex.quote(path)} | zstd > FILE.zst'
        )
      if content:
        yield content
      if frame.eof:
        rest = frame.unused_data + waiting[start + _ZSTD_SLICE_BYTES :]
        frame = None
        break
    waiting = rest
  if frame:
    raise EOFError('the last zstd frame has no end')
