"""Read the only text file of a source in pieces, and divide it where lines end."""

import dataclasses
import itertools
from collections.abc import Iterator

from tokenformer_jax.data import reading
from tokenformer_jax.data.text import decode_text

_PIECE_BYTES = 2**20  # bytes that are tokenized together


@dataclasses.dataclass(frozen=True)
class LoneText:
  """A text file of any length, which is the only document of a source."""

  path: str

  def pieces(self, start: int, stop: int) -> Iterator[str]:
    """Yield the text between two byte positions, in pieces that end at line ends.

    A piece has at most `_PIECE_BYTES`. A piece without a line end ends after a whole character.
    """
    data = b''
    with reading.opened(self.path, start) as file:
      while start < stop:
        data += file.read(min(_PIECE_BYTES + 1, stop - start) - len(data))
        end = len(data)
        if end > _PIECE_BYTES:
          end = _last_line_end(data, 0, _PIECE_BYTES) or _character_start(data, _PIECE_BYTES)
        if not end:
          return  # The file has become shorter.
        yield decode_text(data[:end], self.path, start)
        data, start = data[end:], start + end

  def size(self) -> int:
    """Return the length of the text in bytes; a packed file is read for it."""
    if not reading.is_packed(self.path):
      return reading.identity(self.path)[1]
    with reading.opened(self.path) as file:
      return sum(map(len, iter(lambda: file.read(_PIECE_BYTES), b'')))

  def cut(self, fraction: float, total: int) -> int:
    """Return the first byte of the last `fraction` of the text, which has `total` bytes.

    The start is the last line end shortly before the exact position, else a character boundary.
    """
    exact = max(0, min(total - 1, max(1, total - round(total * fraction))))
    return self._boundary(exact, min(exact, total - exact))

  def divided(self, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of about `size` bytes that make up a range; one, if the file is packed.

    They begin where lines do, as far as possible.
    """
    inner = () if reading.is_packed(self.path) else range(start + size, stop - size // 2, size)
    bounds = [start, *(self._boundary(exact, size) for exact in inner), stop]
    yield from itertools.pairwise(bounds)

  def _boundary(self, exact: int, room: int) -> int:
    """Return the last line end at most `room` / 2 before a position, or a character's start."""
    near = min(room, _PIECE_BYTES) // 2
    start = max(0, exact - max(near, 3))  # UTF-8 characters have up to four bytes.
    with reading.opened(self.path, start) as file:
      around = file.read(exact + 1 - start)
    line_end = _last_line_end(around, exact - near - start, exact - start)
    return start + (line_end or _character_start(around, exact - start))


def _last_line_end(data: bytes, start: int, stop: int) -> int:
  """Return the position after the last line end within a range, or 0."""
  return data.rfind(b'\n', start, stop) + 1


def _character_start(data: bytes, position: int) -> int:
  """Return the start of the character at a position."""
  for at in range(position, max(position - 4, 0), -1):
    if at >= len(data) or data[at] & 0xC0 != 0x80:
      return at
  return 0 if position < 4 else position  # More than three such bytes are not UTF-8.
