"""Read the documents of tables: CSV and TSV files with a header, and JSON arrays of objects.

A file is read piece by piece. What is in memory is one row, which may be as long as a document.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenformer_jax.data import formats, packed
from tokenformer_jax.data.text import columns, decode, document
from tokenformer_jax.errors import UserError

csv.field_size_limit(packed.LONGEST_DOCUMENT)  # The default, 128 KiB, is less than many documents.

_SPACE = re.compile(r'[ \t\r\n]*')
_LONGEST_DONE = 2**20  # characters that stay in memory although they are decoded
_LONGEST_TOKEN = 16  # characters of JSON's literals and escapes, which the end of a piece may cut


def table_documents(
  path: str, chunks: Iterable[bytes], text_field: str
) -> Iterator[str | UserError]:
  """Yield the column `text_field` of a CSV or TSV file, whose first row has the names of columns.

  For a row with other fields than the header, yield what is wrong with it.

  Raises:
    UserError: there is no such column, a quote has no end, or a row is too large.
  """
  delimiter = formats.delimiter(path)
  feed = _Feed(path, chunks)
  rows = csv.reader(feed, delimiter=delimiter, strict=True)
  header: list[str] = []
  while True:
    try:
      row = next(rows, None)
    except csv.Error as error:
      raise UserError(f'{path}, line {rows.line_num}, is not valid CSV ({error})') from error
    feed.held = 0
    if row is None:
      return
    if not row:  # The line is blank.
      continue
    if not header:
      header = row
      columns(header, text_field, path)
    elif len(row) != len(header):
      yield UserError(
        f'{path}, line {rows.line_num}, has {len(row)} fields, but the header has {len(header)}; '
        f'put text that has a {delimiter!r} or a line end in double quotes'
      )
    else:
      values = dict(zip(header, row, strict=True))
      found = document(values, text_field, f'{path}, line {rows.line_num},')
      del row, values  # The text would be in memory beside the next one.
      yield found
      del found


class _Feed:
  """The decoded lines of a file, for csv.reader. It refuses a row that is too large.

  Attributes:
    held: the bytes of the row so far; whoever takes a row sets it to 0.
  """

  def __init__(self, path: str, chunks: Iterable[bytes]):
    self.held = 0
    self._path, self._position = path, 0
    self._lines = packed.lines(path, chunks)
    self._limit = packed.Limit(path)

  def __iter__(self) -> Iterator[str]:
    return self

  def __next__(self) -> str:
    line = next(self._lines)
    self.held += len(line) + 1
    if not self._limit.allows(self.held):
      raise packed.too_long(self._path)
    decoded = decode(line, self._path, self._position)
    self._position += len(line) + 1
    return f'{decoded}\n'


def array_documents(
  path: str, chunks: Iterable[bytes], text_field: str
) -> Iterator[str | UserError]:
  """Yield the field `text_field` of the objects in a file that is one JSON array.

  For an element that is no object with this field, yield what is wrong with it.

  Raises:
    UserError: the file is not valid JSON.
  """
  number = 0
  for element in _Array(path, chunks).elements():  # `enumerate` would keep one beside the next.
    number += 1  # noqa: SIM113 (see above)
    found = document(element, text_field, f'{path}, element {number},')
    del element
    yield found
    del found


class _Array:
  """A JSON array that is decoded element by element."""

  def __init__(self, path: str, chunks: Iterable[bytes]):
    self._path = path
    self._characters = _characters(path, chunks)
    self._waiting, self._position, self._ended = '', 0, False
    self._limit = packed.Limit(path)
    self._decoder = json.JSONDecoder()

  def elements(self) -> Iterator[Any]:
    self._position = self._next_position() + 1  # after the [, which the file begins with
    if self._character() == ']':
      return
    number = 1
    while True:
      yield self._element(number)
      if (character := self._character()) == ']':
        break
      if character != ',':
        if not character:
          raise UserError(f'{self._path} is not valid JSON: it ends after element {number}')
        raise UserError(
          f'{self._path} is not valid JSON: a comma or ] is missing after element {number}'
        )
      self._position += 1
      number += 1
    self._position += 1
    if rest := self._character():
      raise UserError(f'{self._path} is not valid JSON: {rest!r} follows the end of the array')

  def _element(self, number: int) -> Any:
    start = self._next_position()
    while True:
      try:
        value, self._position = self._decoder.raw_decode(self._waiting, start)
        if self._position > _LONGEST_DONE:
          self._waiting, self._position = self._waiting[self._position :], 0
        return value
      except (ValueError, RecursionError) as error:
        if self._ended or not _is_cut(error, self._waiting):
          place = f'{self._path}, element {number},'
          raise UserError(f'{place} is not valid JSON ({error})') from error
      self._read(2 * (len(self._waiting) - start))
      start = self._position

  def _character(self) -> str:
    """Return the next character that is no space, or '' at the end."""
    position = self._next_position()
    return self._waiting[position : position + 1]

  def _next_position(self) -> int:
    """Move to the next character that is no space, and return its position."""
    while True:
      self._position = _SPACE.match(self._waiting, self._position).end()
      if self._position < len(self._waiting) or self._ended:
        return self._position
      self._read(1)

  def _read(self, least: int) -> None:
    """Drop what is done, and read until at least so many characters wait, if there are so many."""
    pieces, length = [self._waiting[self._position :]], len(self._waiting) - self._position
    self._waiting, self._position = '', 0
    while length < least and not self._ended:
      piece = next(self._characters, None)
      if piece is None:
        self._ended = True
      else:
        pieces.append(piece)
        length += len(piece)
      if not self._limit.allows(length):
        raise packed.too_long(self._path)
    self._waiting = ''.join(pieces)


def _is_cut(error: Exception, text: str) -> bool:
  """Return whether JSON is not valid only because more of the text follows."""
  if not isinstance(error, json.JSONDecodeError):
    return False
  near_end = len(text.rstrip()) - _LONGEST_TOKEN
  return error.msg.startswith('Unterminated string') or error.pos >= near_end


def _characters(path: str, chunks: Iterable[bytes]) -> Iterator[str]:
  decoder, position = codecs.getincrementaldecoder('utf-8-sig')(), 0
  for chunk in chunks:
    try:
      yield decoder.decode(chunk)
    except UnicodeDecodeError as error:
      waiting = len(error.object) - len(chunk)
      yield decode(error.object, path, position - waiting)
    position += len(chunk)
  rest = decoder.getstate()[0]
  yield decode(rest, path, position - len(rest))
