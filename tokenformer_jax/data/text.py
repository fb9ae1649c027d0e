"""Define sources of text: documents in a fixed order, with a fingerprint of their content."""

import abc
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from tokenformer_jax.data import chat_rows
from tokenformer_jax.errors import UserError, nearest

_PIECE_BYTES = 2**20  # bytes of a lone text that are tokenized together


Bad = Callable[[UserError], None]  # called with what is wrong with a document


def refuse(error: UserError) -> NoReturn:
  """Raise what is wrong with a document."""
  raise error


def ignore(error: UserError) -> None:
  """Leave out a document that cannot be read."""
  del error


def with_errors(texts: Iterator[str | UserError]) -> Iterator[str | UserError]:
  """Yield the documents of a file; if the rest cannot be read, what is wrong with it comes last."""
  try:
    yield from texts
  except UserError as error:
    yield error


class Source(abc.ABC):
  """Documents in a fixed order."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Return a hash that identifies the content, without reading all of it."""

  @abc.abstractmethod
  def _texts(self) -> Iterator[str | UserError]:
    """Yield every document, empty ones included.

    For a document that cannot be read, what is wrong with it, if others can be read after it.
    """

  def documents(self, bad: Bad = refuse) -> Iterator[str]:
    """Yield the documents that are not empty.

    `bad` is called with what is wrong with a document, which is left out if it returns.
    """
    for text in self._texts():
      if isinstance(text, UserError):
        bad(text)
      elif text:
        yield text

  def divide(self, size: int) -> 'Iterator[tuple[Source, int]]':
    """Yield sources that have these documents one after another, each with its bytes, about.

    Each has at most `size` bytes, where a source can be divided. Processes can read them at the
    same time.
    """
    del size
    yield self, 0

  @abc.abstractmethod
  def files(self) -> Iterable[str]:
    """Return the paths of the files that have the documents, in a file system or in a bucket."""

  def members(self) -> 'tuple[Source, ...]':
    """Return the sources of a list, or the source itself."""
    return (self,)

  def lone(self, bad: Bad = refuse) -> 'LoneText | None':
    """Return the document of a source that has exactly one, else None."""
    first = list(itertools.islice(self.documents(bad), 2))
    if len(first) != 1:
      return None
    content = first[0].encode()
    return LoneText('the only document of the source', lambda start: iter([content[start:]]))


@dataclasses.dataclass(frozen=True)
class LoneText:
  """The only document of a source, of any length. It is read in pieces, as often as needed.

  Attributes:
    name: of the text, for messages.
    chunks: returns the UTF-8 bytes of the text from a position on.
    is_seekable: whether the text can be read from a position without reading what is before.
  """

  name: str
  chunks: Callable[[int], Iterable[bytes]]
  is_seekable: bool = False

  def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the text between two byte positions, in pieces that end at line ends.

    A piece has at most `_PIECE_BYTES`. A piece without a line end ends after a whole character.
    """
    waiting, done = bytearray(), start
    for chunk in self._between(start, stop):
      waiting += chunk
      while len(waiting) > _PIECE_BYTES:
        end = _last_line_end(waiting, 0, _PIECE_BYTES) or _character_start(waiting, _PIECE_BYTES)
        yield decode(waiting[:end], self.name, done)
        del waiting[:end]
        done += end
    if waiting:
      yield decode(waiting, self.name, done)

  def size(self) -> int:
    """Return the length of the text in bytes, for which it is read."""
    return sum(map(len, self.chunks(0)))

  def cut(self, fraction: float, total: int) -> int:
    """Return the first byte of the last `fraction` of the text, which has `total` bytes.

    The start is the last line end shortly before the exact position, else a character boundary.
    """
    exact = max(0, min(total - 1, max(1, total - round(total * fraction))))
    return self._boundary(exact, min(exact, total - exact))

  def divided(self, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of about `size` bytes that make up a range; one, if it is not seekable.

    They begin where lines do, as far as possible.
    """
    inner = range(start + size, stop - size // 2, size) if self.is_seekable else ()
    bounds = [start, *(self._boundary(exact, size) for exact in inner), stop]
    yield from itertools.pairwise(bounds)

  def _boundary(self, exact: int, room: int) -> int:
    """Return the last line end at most `room` / 2 before a position, or a character's start."""
    near = min(room, _PIECE_BYTES) // 2
    start = max(0, exact - max(near, 3))  # UTF-8 characters have up to four bytes.
    around = b''.join(self._between(start, exact + 1))
    line_end = _last_line_end(around, exact - near - start, exact - start)
    return start + (line_end or _character_start(around, exact - start))

  def _between(self, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the bytes between two positions. `stop` None means the end."""
    position = start
    for chunk in self.chunks(start):
      if stop is not None and position + len(chunk) >= stop:
        yield chunk[: stop - position]
        return
      yield chunk
      position += len(chunk)


def _last_line_end(data: bytes | bytearray, start: int, stop: int) -> int:
  """Return the position after the last line end within a range, or 0."""
  return data.rfind(b'\n', start, stop) + 1


def _character_start(data: bytes | bytearray, position: int) -> int:
  """Return the start of the character at a position."""
  for at in range(position, max(position - 4, 0), -1):
    if at >= len(data) or data[at] & 0xC0 != 0x80:
      return at
  return 0 if position < 4 else position  # More than three such bytes are not UTF-8.


CHAT = '\0chat'  # instead of a field's name: each row is a conversation
_CHAT_FIELDS = {'messages', 'prompt', 'conversations', 'conversation'}


def columns(names: Iterable[str], text_field: str, label: str) -> list[str]:
  """Return the columns of a table that `document` needs; `label` names the table in messages."""
  names = list(names)
  if text_field == CHAT:
    return chat_rows.columns(names, label)
  outer = text_field.partition('.')[0]
  if text_field not in names and outer in names:
    return [outer]
  field(dict.fromkeys(names, ''), text_field, label)
  return [text_field]


def digest(value: Any) -> str:
  """Return a hash of a value's `repr`, for fingerprints."""
  return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def field(values: dict[str, Any], text_field: str, label: str) -> str:
  """Return the document in a field of a row; `label` names the row in messages.

  A field inside another one is OUTER.INNER.
  """
  chat = '; for conversations set config.data.rows=chat' if _CHAT_FIELDS & {*values} else ''
  text: Any = values
  for key in [text_field] if text_field in values else text_field.split('.'):
    if not isinstance(text, dict) or key not in text:
      near = nearest(text_field, values) if values else ''
      raise UserError(f'{label} has no field {text_field!r} (config.data.text_field){chat or near}')
    text = text[key]
  if isinstance(text, bytes):
    return decode(text, f'{label} field {text_field!r},')
  if not isinstance(text, str):
    raise UserError(
      f'{label} has a {type(text).__name__} in the field {text_field!r} (config.data.text_field); '
      f'it must be text{chat}'
    )
  try:
    if not text.isascii():
      text.encode()
  except UnicodeEncodeError:  # JSON can hold lone surrogates, and UTF-8 cannot encode them.
    return text.encode('utf-8', errors='replace').decode()
  return text


def document(values: Any, text_field: str, label: str) -> str | UserError:
  """Return the document of a row, in a field or a conversation, or what is wrong with the row."""
  if not isinstance(values, dict):
    return UserError(f'{label} is a JSON {type(values).__name__}; it must be an object')
  try:
    if text_field == CHAT:
      return chat_rows.conversation(values, label)
    return field(values, text_field, label)
  except UserError as error:
    return error


def decode(data: bytes | bytearray, label: str, offset: int = 0) -> str:
  """Decode UTF-8 that begins at byte `offset` of a text. Drop a byte order mark only at 0."""
  try:
    return data.decode('utf-8' if offset else 'utf-8-sig')
  except UnicodeDecodeError as error:
    raise UserError(
      f'{label} is not UTF-8 (byte {offset + error.start} is 0x{data[error.start]:02x}); convert '
      'it, or leave it out of the source'
    ) from error
