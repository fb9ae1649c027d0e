"""Define sources of text: documents in a fixed order, with a fingerprint of their content."""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from tokenformer_jax.data import chat_rows, preference_rows
from tokenformer_jax.errors import UserError, nearest

Bad = Callable[[UserError], None]  # called with what is wrong with a document


def refuse(error: UserError) -> NoReturn:
  """Raise the UserError that names the document."""
  raise error


def ignore(error: UserError) -> None:
  """Leave out a document that cannot be read."""
  del error


class Source(abc.ABC):
  """Documents in a fixed order, which a `separator` in a text parts as well."""

  separator: str = ''

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
      elif self.separator:
        parts = (part.strip('\r\n') for part in text.split(self.separator))
        yield from (part for part in parts if part)
      elif text:
        yield text

  def parted(self, separator: str) -> 'Source':
    """Return the source with a separator of documents."""
    source: Any = self
    return dataclasses.replace(source, separator=separator)

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

  def lone_file(self) -> str:
    """Return the path of a source that is one text file, else ''."""
    return ''


CHAT = '\0chat'  # instead of a field's name: each row is a conversation
PAIRS = '\0pairs'  # or two of them
# What makes a document of such a row.
ROWS = {CHAT: chat_rows, PAIRS: preference_rows}
_CHAT_FIELDS = {'messages', 'prompt', 'conversations', 'conversation'}


def columns(names: Iterable[str], text_field: str, label: str) -> list[str]:
  """Return the columns of a table that `document` needs; `label` names the table in messages."""
  names = list(names)
  if text_field in ROWS:  # A row may have none that is lost.
    return names
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
    if text_field in ROWS:
      return ROWS[text_field].conversation(values, label)
    return field(values, text_field, label)
  except UserError as error:
    return error
  except RecursionError:
    return UserError(f'{label} is nested too deeply; leave it out')


# What else a file named as text may be, by its first bytes, and what to do with it.
_OTHER_FORMATS = {
  b'\xff\xfe': 'UTF-16; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW',
  b'\xfe\xff': 'UTF-16; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW',
  b'%PDF-': 'a PDF; take its text out, for example with pdftotext',
  b'{\\rtf': 'RTF; save it as plain text',
  b'PK\x03\x04': 'a ZIP archive, as .docx, .odt and .epub are; unpack it, or save it as plain text',
  b'\x1f\x8b': 'packed by gzip; give its name the ending .gz',
  b'\x28\xb5\x2f\xfd': 'packed by zstd; give its name the ending .zst',
  b'PAR1\x15': 'a Parquet table; name it as parquet:GLOB',
}


def _check_format(data: bytes | bytearray, label: str, offset: int) -> None:
  """Refuse the first bytes of a text that is in another format."""
  for start, format_ in _OTHER_FORMATS.items():
    if offset == 0 and data.startswith(start):
      raise UserError(f'{label} is {format_}, or leave it out of the source')


def decode(data: bytes | bytearray, label: str, offset: int = 0) -> str:
  """Decode UTF-8 that begins at byte `offset` of a text. Drop a byte order mark only at 0."""
  try:
    return data.decode('utf-8' if offset else 'utf-8-sig')
  except UnicodeDecodeError as error:
    _check_format(data, label, offset)
    raise UserError(
      f'{label} is not UTF-8 (byte {offset + error.start} is 0x{data[error.start]:02x}); convert '
      'it, or leave it out of the source'
    ) from error


def decode_text(data: bytes | bytearray, label: str, offset: int = 0) -> str:
  """Decode UTF-8 as `decode` does, and refuse the bytes that a crash or a full disk can leave."""
  _check_format(data, label, offset)
  if (nul := data.find(b'\0')) >= 0:
    raise UserError(
      f'{label} is not text: its byte {offset + nul} is NUL; copy it again if a crash or a full '
      'disk left it, convert UTF-16 to UTF-8, or leave it out of the source'
    )
  return decode(data, label, offset)
