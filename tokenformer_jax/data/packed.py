"""The bytes of a file, unpacked piece by piece, so that no file asks for more memory than it holds.

A packed file of a few kilobytes can hold gigabytes, and can ask for a window of 2 GiB to unpack
them with. Text is not packed a hundredfold; so nothing of a packed file that stays in memory, a
document or a window, may be larger than `held_at_most` allows.
"""

import contextlib
import gzip
import shlex
import zlib
from collections.abc import Iterator
from typing import IO, Protocol

import zstandard

from tokenformer_jax import paths
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.retry import retried

LONGEST_DOCUMENT = 2**30  # bytes, which are in memory up to four times while they are decoded

_CHUNK_BYTES = 128 * 2**10
_SUFFIXES = ('.gz', '.zst')
_RATIO = 100  # of a document or a window to the packed file that it is in
_ALWAYS_HELD = 64 * 2**20  # bytes that any packed file may ask for
_ZSTD_WINDOW = 2**31  # bytes: what `zstd --long=31` needs
_ZSTD_HEADER_BYTES = 18  # of a frame, at most
# A block of four bytes holds up to 128 KiB, so this much of a file at most 32 MiB.
_ZSTD_SLICE_BYTES = 2**10


class _Readable(Protocol):
  def read(self, size: int = -1, /) -> bytes: ...


def chunks(path: str) -> Iterator[bytes]:
  """Yield the content of a file, unpacked, in pieces of 32 MiB at most, most of them far smaller.

  Raises:
    UserError: the file cannot be read, is damaged, or asks for more memory than it needs.
    TransientError: it could not be read for minutes, though it is there.
  """
  with reading(path):
    file = _Steady(path)
    try:
      if path.endswith('.zst'):
        yield from _zstd_chunks(file, path)
        return
      content = gzip.GzipFile(fileobj=file) if path.endswith('.gz') else file
      while chunk := content.read(_CHUNK_BYTES):
        yield chunk
    finally:
      file.close()


def held_at_most(path: str) -> int:
  """Return how many bytes of a file's content may be in memory at once."""
  if not path.endswith(_SUFFIXES):
    return LONGEST_DOCUMENT
  return min(LONGEST_DOCUMENT, _largest_window(path))


def _largest_window(path: str) -> int:
  return max(_ALWAYS_HELD, _RATIO * size(path))


def size(path: str) -> int:
  """Return the bytes of a file, as it is packed."""
  return identity(path)[1]


def identity(path: str) -> tuple[str, int, int | str]:
  """Return name, size, and time of change of a file; in a bucket the object's tag for the time."""
  with reading(path):
    return retried(lambda: paths.identity(path), f'looking at {path}')


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Turn the errors of reading a file into sentences."""
  try:
    yield
  except (UserError, TransientError):
    raise
  except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
    raise UserError(f'{path} is damaged or cut short ({error}); copy or pack it again') from error
  except paths.errors(path) as error:
    raise UserError(f'{path} cannot be read: {paths.reason(error)}') from error


class _Steady:
  """A file that is opened again where it was, after an error that may pass."""

  def __init__(self, path: str):
    self._path, self._position = path, 0
    self._file: IO[bytes] | None = None

  def read(self, size: int = -1) -> bytes:
    return retried(lambda: self._read(size), f'reading {self._path}')

  def _read(self, size: int) -> bytes:
    try:
      if self._file is None:
        self._file = paths.open_to_read(self._path)
        self._file.seek(self._position)
      data = self._file.read(size)
    except Exception:
      self.close()
      raise
    self._position += len(data)
    return data

  def close(self) -> None:
    if self._file is not None:
      with contextlib.suppress(Exception):  # Of many kinds, and nothing was written.
        self._file.close()
    self._file = None


def _zstd_chunks(file: _Readable, path: str) -> Iterator[bytes]:
  """Yield the content of a zstd file of any number of frames.

  The library's own stream reader ends silently where a frame is cut short. A window takes memory
  only as it is filled, so a short text whose frame announces a wide window, as a pipe into
  `zstd --long=31` makes it, is read.
  """
  decompressor, most = (
    zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW),
    _largest_window(path),
  )
  frame, window, unpacked, waiting = None, 0, 0, b''
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
      if min(window, unpacked) > most:
        raise UserError(
          f'{path} asks for a window of {window >> 20} MiB, and a file of its size may have '
          f'{most >> 20} MiB; pack it again with a smaller one: '
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
