"""Read text from files: `files:GLOB` or `files:DIR`, on disks and in buckets."""

import csv
import dataclasses
import functools
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from tokenformer_jax.data import formats, reading
from tokenformer_jax.data.text import (
  CHAT,
  Bad,
  LoneText,
  Source,
  columns,
  decode,
  digest,
  document,
  refuse,
  with_errors,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import retried

csv.field_size_limit(reading.LONGEST_DOCUMENT)  # The default, 128 KiB, is less than documents have.


def open_files(pattern: str, text_field: str, setting: str, splits: tuple[str, ...]) -> 'Files':
  """Return the source `files:PATTERN`; see `sources.SOURCES`."""
  del splits
  identities = find_files('files', pattern, setting)
  for path in identities:
    formats.check_name(path)
  listed = {path: identity for path, identity in identities.items() if identity}
  return Files(tuple(identities), text_field, listed)


@dataclasses.dataclass(frozen=True)
class Files(Source):
  """Text files (one document each) and files of rows (one each), plain, .gz or .zst.

  Attributes:
    listed: the `paths.identity` of files of which a listing had it, by path.
    span: for a chunk of a single file of JSON lines, the bytes in which its lines begin.
  """

  paths: tuple[str, ...]
  text_field: str = 'text'
  listed: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict, compare=False)
  span: tuple[int, int] | None = None

  def fingerprint(self) -> str:
    """Return a hash of the names, sizes and modification times (in a bucket: the objects' tags)."""
    identities = [self.listed.get(path) or reading.identity(path) for path in self.paths]
    return digest((identities, self.span) if self.span else identities)

  def files(self) -> tuple[str, ...]:
    return self.paths

  def divide(self, size: int) -> Iterator[tuple[Source, int]]:
    for path in self.paths:
      identity = self.listed.get(path) or reading.identity(path)
      one, total = dataclasses.replace(self, paths=(path,), listed={path: identity}), identity[1]
      if total <= size or self.span or not _can_be_divided(path):
        yield one, total
        continue
      for start in range(0, total, size):
        stop = min(start + size, total)
        yield dataclasses.replace(one, span=(start, stop)), stop - start

  def lone(self, bad: Bad = refuse) -> LoneText | None:
    path = self.paths[0]
    if len(self.paths) > 1 or self.span or _layout(path) != 'text':
      return super().lone(bad)
    chunks = functools.partial(text_chunks, path)
    return LoneText(path, chunks, is_seekable=not reading.is_packed(path))

  def _texts(self) -> Iterator[str | UserError]:
    for path in self.paths:
      yield from with_errors(_documents(path, self.text_field, self.span))


def find_files(form: str, pattern: str, setting: str) -> dict[str, tuple[Any, ...]]:
  """Return the sorted files that match the pattern of a source `FORM:PATTERN`.

  A folder matches all files below it but hidden ones. For a file in a bucket, the value is its
  `paths.identity`, which the listing has; for others it is empty.
  """
  files: dict[str, tuple[Any, ...]]
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
    files = {os.path.abspath(path): () for path in matches if os.path.isfile(path)}
  if not files:
    raise UserError(
      f'{setting} is {form}:{pattern}, which matches no file{where}; '
      'check the path, and use ** to match files in subfolders'
    )
  return {path: files[path] for path in sorted(files)}


def _objects(pattern: str) -> dict[str, tuple[Any, ...]]:
  with reading.reading(pattern):
    return retried(lambda: paths.objects(pattern), f'listing {pattern}')


def text_chunks(path: str, start: int = 0) -> Iterator[bytes]:
  """Yield the unpacked content of a file from a byte on; raise a UserError if it is not text."""
  return formats.checked(path, reading.chunks(path, start), start)


def _layout(path: str) -> formats.Layout:
  return formats.layout(path, next(text_chunks(path), b''))


def _can_be_divided(path: str) -> bool:
  try:
    return not reading.is_packed(path) and _layout(path) == 'lines'
  except UserError:  # Reading the documents reports it, and may leave them out.
    return False


def _documents(
  path: str, text_field: str, span: tuple[int, int] | None
) -> Iterator[str | UserError]:
  """Yield the documents of a file, and for a row that cannot be read what is wrong with it."""
  if span:
    yield from _lines_of_span(path, text_field, *span)
    return
  chunks = text_chunks(path)
  head = next(chunks, b'')
  chunks = itertools.chain([head], chunks)
  match formats.layout(path, head):
    case 'lines':
      for number, line in enumerate(reading.lines(path, chunks), start=1):
        yield _json_row(line, f'{path}, line {number},', text_field)
    case 'table':
      yield from _table_rows(path, chunks, text_field)
    case 'array':
      yield from _array_rows(path, chunks, text_field)
    case 'text':
      if text_field == CHAT:
        raise UserError(
          f'{path} is one text, and config.data.rows=chat needs rows; name JSON lines (.jsonl) or '
          'a JSON array, or leave it out of the source'
        )
      yield decode(reading.whole(path, chunks), path)


def _lines_of_span(path: str, text_field: str, start: int, stop: int) -> Iterator[str | UserError]:
  """Yield the documents of the JSON lines that begin in a range of bytes."""
  position = max(0, start - 1)  # The byte before the range may end a line.
  for line in reading.lines(path, text_chunks(path, position)):
    if position >= stop:
      return
    if position >= start:
      yield _json_row(line, f'{path}, the line at byte {position:,},', text_field)
    position += len(line)


def _json_row(line: bytes, label: str, text_field: str) -> str | UserError:
  """Return the document of a line of JSON; '' if the line is blank."""
  try:
    content = decode(line, label).strip()
    return document(json.loads(content), text_field, label) if content else ''
  except UserError as error:
    return error
  except (ValueError, RecursionError) as error:
    return UserError(f'{label} is not valid JSON ({error})')


def _array_rows(path: str, chunks: Iterable[bytes], text_field: str) -> Iterator[str | UserError]:
  """Yield the documents of the objects in a file that is one JSON array, which is read whole."""
  try:
    content = decode(reading.whole(path, chunks), path)
  except reading.TooLongError as error:
    command = f'{formats.unpack_command(path)} | jq -c ".[]" > FILE.jsonl'
    raise UserError(
      f'{path} is a JSON array of more than {reading.LONGEST_DOCUMENT >> 20} MiB, and an array is '
      f'read whole; make lines of it: {command}'
    ) from error
  try:
    rows = json.loads(content)
  except (ValueError, RecursionError) as error:
    raise UserError(f'{path} is not valid JSON ({error})') from error
  for number, row in enumerate(rows, start=1):
    yield document(row, text_field, f'{path}, element {number},')


def _table_rows(path: str, chunks: Iterable[bytes], text_field: str) -> Iterator[str | UserError]:
  """Yield the documents of a CSV or TSV file, whose first row has the names of columns.

  For a row with other fields than the header, yield what is wrong with it.
  """
  delimiter = formats.delimiter(path)
  rows = csv.reader(_decoded_lines(path, chunks), delimiter=delimiter, strict=True)
  header: list[str] = []
  while True:
    try:
      row = next(rows, None)
    except csv.Error as error:
      if 'field larger' in str(error):
        raise reading.too_long(path) from error
      raise UserError(f'{path}, line {rows.line_num}, is not valid CSV ({error})') from error
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
      yield document(values, text_field, f'{path}, line {rows.line_num},')


def _decoded_lines(path: str, chunks: Iterable[bytes]) -> Iterator[str]:
  position = 0
  for line in reading.lines(path, chunks):
    yield decode(line, path, position)
    position += len(line)
