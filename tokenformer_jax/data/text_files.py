"""Read text from files: `files:GLOB` or `files:DIR`, on disks and in buckets; and `stdlib`."""

import codecs
import csv
import dataclasses
import glob
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from typing import IO, Any

from tokenformer_jax.data import reading
from tokenformer_jax.data.text import (
  ROWS,
  Source,
  columns,
  decode,
  decode_text,
  digest,
  document,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import retried

_DELIMITERS = {'.csv': ',', '.tsv': '\t'}
_NOT_LIBRARY = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}

csv.field_size_limit(reading.LONGEST_DOCUMENT)  # The default, 128 KiB, is less than documents have.


def open_files(pattern: str, text_field: str, setting: str, splits: tuple[str, ...]) -> 'Files':
  """Return the source `files:PATTERN`; see `sources.SOURCES`."""
  del splits
  return Files(find_files('files', pattern, setting), text_field)


@dataclasses.dataclass(frozen=True)
class Files(Source):
  """Text files (one document each) and files of rows (one each), plain, .gz or .zst.

  Attributes:
    identities: the `paths.identity` of each file by its path, in their order.
    span: for a chunk of a single file, what to read: the bytes in which its lines begin, or the
      documents that a separator parts.
  """

  identities: dict[str, tuple[Any, ...]]
  text_field: str = 'text'
  span: tuple[int, int] | None = None
  separator: str = ''

  def fingerprint(self) -> str:
    """Return a hash of the names, sizes and modification times (in a bucket: the objects' tags)."""
    return digest(([*self.identities.values()], self.span))

  def files(self) -> tuple[str, ...]:
    return tuple(self.identities)

  def divide(self, size: int) -> Iterator[tuple[Source, int]]:
    for path, identity in self.identities.items():
      one = dataclasses.replace(self, identities={path: identity})
      if identity[1] <= size or self.span:
        yield one, identity[1]
        continue
      for span, span_size in self._spans(path, size):
        yield dataclasses.replace(one, span=span), span_size

  def _spans(self, path: str, size: int) -> Iterator[tuple[tuple[int, int] | None, int]]:
    """Yield the spans of a file and their bytes; None is the whole file."""
    total = self.identities[path][1]
    if reading.is_packed(path) or not (_has_lines(path) or self._is_parted(path)):
      yield None, total
      return
    for start in range(0, total, size):
      stop = min(start + size, total)
      yield (start, stop), stop - start

  def lone_file(self) -> str:
    path, *others = self.identities
    return '' if others or self.span or self.separator or has_rows(path) else path

  def _is_parted(self, path: str) -> bool:
    return bool(self.separator) and not has_rows(path)

  def _texts(self) -> Iterator[str | UserError]:
    for path in self.identities:
      try:
        yield from self._file_texts(path)
      except UserError as error:  # The rest of the file cannot be read.
        yield error

  def _file_texts(self, path: str) -> Iterator[str | UserError]:
    """Yield the documents of a file, and for a row that cannot be read what is wrong with it."""
    if self._is_parted(path):
      whole = 0, sys.maxsize
      for position, part in _in_span(path, self.separator.encode(), *(self.span or whole)):
        yield decode_text(part, path, position)
      return
    if self.span:
      for position, line in _in_span(path, b'\n', *self.span):
        yield _json_row(line, f'{path}, the line at byte {position:,},', self.text_field)
      return
    with reading.opened(path) as file:
      match _layout(path, file.peek()):
        case 'lines':
          for number, line in enumerate(reading.lines(path, file), start=1):
            yield _json_row(line, f'{path}, line {number},', self.text_field)
        case 'table':
          yield from _table_rows(path, file, self.text_field)
        case 'array':
          yield from _array_rows(path, file, self.text_field)
        case 'text':
          if self.text_field in ROWS:
            raise UserError(
              f'{path} is one text, and config.data.rows=chat needs rows; name JSON lines (.jsonl) '
              'or a JSON array, or leave it out of the source'
            )
          yield decode_text(reading.whole(path, file), path)


class PythonFiles(Files):
  """Python source files in their declared encodings (PEP 263). Undecodable files are skipped."""

  def _texts(self) -> Iterator[str]:
    for path in self.identities:
      try:
        with reading.reading(path), tokenize.open(path) as file:
          text = file.read()
      except (UnicodeDecodeError, SyntaxError):  # SyntaxError: the declared encoding is unknown.
        continue
      yield text


def open_stdlib(name: str, text_field: str, setting: str, splits: tuple[str, ...]) -> PythonFiles:
  """Return the standard library of the running interpreter without its tests, about 12 MB."""
  del name, text_field, splits
  root = sysconfig.get_path('stdlib')
  paths = []
  for folder, folders, names in os.walk(root):
    folders[:] = set(folders) - _NOT_LIBRARY
    paths += [os.path.join(folder, name) for name in names if name.endswith('.py')]
  if not paths:
    raise UserError(
      f'{setting} is stdlib, but this Python has no .py files in {root}; use files:GLOB'
    )
  return PythonFiles({path: reading.identity(path) for path in sorted(paths)})


def find_files(form: str, pattern: str, setting: str) -> dict[str, tuple[Any, ...]]:
  """Return the sorted files that match the pattern of a source `FORM:PATTERN`.

  A folder matches all files below it but hidden ones. The values are the `paths.identity` of files.
  """
  if paths.in_bucket(pattern):
    files, where = _objects(pattern), ''
    if not files and not glob.has_magic(pattern):
      folder = pattern.rstrip('/')
      below = _objects(f'{folder}/**')
      files = {path: below[path] for path in below if '/.' not in path[len(folder) :]}
  else:
    expanded = os.path.expanduser(pattern)
    where = '' if os.path.isabs(expanded) else f' below {os.getcwd()}'
    if os.path.isdir(expanded):
      expanded = os.path.join(glob.escape(expanded), '**')
    matches = glob.glob(expanded, recursive=True)  # glob leaves out hidden files.
    absolute = sorted(os.path.abspath(path) for path in matches if os.path.isfile(path))
    files = {path: reading.identity(path) for path in absolute}
  if not files:
    raise UserError(
      f'{setting} is {form}:{pattern}, which matches no file{where}; '
      'check the path, and use ** to match files in subfolders'
    )
  return {path: files[path] for path in sorted(files)}


def _objects(pattern: str) -> dict[str, tuple[Any, ...]]:
  with reading.reading(pattern):
    return retried(lambda: paths.objects(pattern), f'listing {pattern}')


def field_delimiter(path: str) -> str:
  """Return what is between the fields of a CSV or TSV file, or '' for other names."""
  return _DELIMITERS.get(_unpacked_name(path)[-4:], '')


def has_rows(path: str) -> bool:
  """Return whether a file has the name of JSON or of a table, so that documents are its rows."""
  return bool(field_delimiter(path)) or _unpacked_name(path).endswith(
    ('.jsonl', '.ndjson', '.json')
  )


def _unpacked_name(path: str) -> str:
  return path.lower().removesuffix('.gz').removesuffix('.zst')


def _layout(path: str, head: bytes) -> str:
  """Return how documents are in a file with this name and this start of its content.

  'lines': each line is a JSON object with a document. 'array': each element of a JSON array is.
  'table': each row of a CSV or TSV file has one. 'text': the file is one document.
  """
  if field_delimiter(path):
    return 'table'
  if not has_rows(path):
    return 'text'
  first, _, others = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b'\n')
  is_row = first.rstrip().endswith(b']') and others.strip()  # a list in each line
  return 'array' if first.startswith(b'[') and not is_row else 'lines'


def _has_lines(path: str) -> bool:
  """Return whether a file has JSON lines that can be read from a byte on."""
  if reading.is_packed(path) or not has_rows(path):
    return False
  try:
    with reading.opened(path) as file:
      return _layout(path, file.peek()) == 'lines'
  except UserError:  # Reading the documents reports it, and may leave them out.
    return False


def _in_span(path: str, end: bytes, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
  """Yield the lines, or what has another end, that begin in a range of bytes, and where."""
  position = max(0, start - len(end))  # The bytes before the range may end a line.
  with reading.opened(path, position) as file:
    pieces = reading.lines(path, file) if end == b'\n' else reading.parts(path, file, end)
    for line in pieces:
      if position >= stop:
        return
      if position >= start:
        yield position, line
      position += len(line)


def _json_row(line: bytes, label: str, text_field: str) -> str | UserError:
  """Return the document of a line of JSON; '' if the line is blank."""
  try:
    content = decode(line, label).strip()
    return document(json.loads(content), text_field, label) if content else ''
  except UserError as error:
    return error
  except (ValueError, RecursionError) as error:
    return UserError(f'{label} is not valid JSON ({error}); a line must be a JSON object')


def _array_rows(path: str, file: IO[bytes], text_field: str) -> Iterator[str | UserError]:
  """Yield the documents of the objects in a file that is one JSON array, which is read whole."""
  try:
    content = decode(reading.whole(path, file), path)
  except reading.TooLongError as error:
    raise UserError(
      f'{path} is a JSON array of more than {reading.LONGEST_DOCUMENT >> 20} MiB, and an array is '
      "read whole; unpack it, and make lines of it: jq -c '.[]' FILE > FILE.jsonl"
    ) from error
  try:
    rows = json.loads(content)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not valid JSON ({error})') from error
  for number, row in enumerate(rows, start=1):
    yield document(row, text_field, f'{path}, element {number},')


def _table_rows(path: str, file: IO[bytes], text_field: str) -> Iterator[str | UserError]:
  """Yield the documents of a CSV or TSV file, whose first row has the names of columns.

  For a row with other fields than the header, yield what is wrong with it.
  """
  delimiter = field_delimiter(path)
  rows = csv.reader(_decoded_lines(path, file), delimiter=delimiter, strict=True)
  header: list[str] = []
  try:
    for row in rows:
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
        yield document(values, text_field, f'{path}, line {rows.line_num},')
  except csv.Error as error:
    if 'field larger' in str(error):
      raise reading.TooLongError(path) from error
    raise UserError(f'{path}, line {rows.line_num}, is not valid CSV ({error})') from error


def _decoded_lines(path: str, file: IO[bytes]) -> Iterator[str]:
  position = 0
  for line in reading.lines(path, file):
    yield decode_text(line, path, position)
    position += len(line)
