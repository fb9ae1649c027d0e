"""Compute digests of files and their blocks, to detect changes in parts of a file or all of it."""

import hashlib
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

SIZE = 4 * 2**20  # bytes of a block, so 2 TB of tokens have 8 MB of digests


class Digests:
  """The digests of a file and of its blocks, computed while the file is read or written."""

  def __init__(self) -> None:
    self._whole = hashlib.blake2b(digest_size=16)
    self._block, self._filled = _empty(), 0
    self._done: list[str] = []

  def update(self, data: bytes) -> None:
    """Add the next bytes of the file."""
    self._whole.update(data)
    view = memoryview(data)
    while view:
      part = view[: SIZE - self._filled]
      self._block.update(part)
      self._filled += len(part)
      view = view[len(part) :]
      if self._filled == SIZE:
        self._done.append(self._block.hexdigest())
        self._block, self._filled = _empty(), 0

  def whole(self) -> bytes:
    """Return the digest of all bytes."""
    return self._whole.digest()

  def blocks(self) -> list[str]:
    """Return the digest of every block. The last block may be shorter."""
    return [*self._done, self._block.hexdigest()] if self._filled else self._done


def read(path: Path) -> Iterator[bytes]:
  """Yield the content of a file, one block at a time."""
  with open(path, 'rb') as file:
    while data := file.read(SIZE):
      yield data


def digest_file(path: Path) -> Digests:
  """Return the digests of a file's content."""
  digests = Digests()
  for data in read(path):
    digests.update(data)
  return digests


def find_changed(files: Mapping[Path, list[str]], seconds: float) -> str | None:
  """Check blocks of files in random order for some seconds, at least one block of each file.

  `files` has the recorded digest of every block of each file. Return a description of the first
  changed block found, or None. The next call checks other blocks.
  """
  until = time.monotonic() + seconds
  order = [(path, i) for path, digests in files.items() for i in range(len(digests))]
  first = [(path, random.randrange(len(digests))) for path, digests in files.items() if digests]
  chosen = random.Random().sample(order, min(len(order), 1000))  # far more than the time allows
  for number, (path, i) in enumerate([*first, *chosen]):
    if number >= len(first) and time.monotonic() > until:
      break
    with open(path, 'rb') as file:
      file.seek(i * SIZE)
      data = file.read(SIZE)
    if _digest(data) != files[path][i]:
      return describe(path, i)
  return None


def describe(path: Path, block: int) -> str:
  """Return the description of a block for messages."""
  return f'block {block} of {path} ({SIZE // 2**20} MiB from byte {block * SIZE:,})'


def _empty() -> 'hashlib.blake2b':
  return hashlib.blake2b(digest_size=8)


def _digest(data: bytes) -> str:
  return hashlib.blake2b(data, digest_size=8).hexdigest()
