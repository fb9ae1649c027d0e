"""Read text from files: `files:GLOB` or `files:DIR`, on disks and in buckets."""

import dataclasses
import functools
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from tokenformer_jax.data import formats, packed, text_tables
from tokenformer_jax.data.text import (
  CHAT,
  Bad,
  LoneText,
  Source,
  decode,
  digest,
  document,
  refuse,
  with_errors,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import retried


def open_files(pattern: str, text_field: str, setting: str, splits: tuple[str, ...]) -> 'Files':
  """Return the source `files:PATTERN`; see `text.SOURCES`."""
  del splits
  found = find_files('files', pattern, setting)
  for path in found:
    formats.check_name(path)
  listed = {path: identity for path, identity in found.items() if identity}
  return Files(tuple(found), text_field, listed)


@dataclasses.dataclass(frozen=True)
class Files(Source):
  """Text files (one document each) and files of rows (one each), plain, .gz or .zst.

  Attributes:
    listed: the `paths.identity` of files of which a listing had it, by path.
    span: for a part of a single file of JSON lines, the bytes in which its lines begin.
  """

  paths: tuple[str, ...]
  text_field: str = 'text'
  listed: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict, compare=False)
  span: tuple[int, int] | None = None

  def fingerprint(self) -> str:
    """Return a hash of the names, sizes and modification times (in a bucket: the objects' tags)."""
    found = [self.listed.get(path) or packed.identity(path) for path in self.paths]
    return digest((found, self.span) if self.span else found)

  def files(self) -> tuple[str, ...]:
    return self.paths

  def parts(self, size: int) -> Iterator[tuple[Source, int]]:
    for path in self.paths:
      identity = self.listed.get(path) or packed.identity(path)
      part, total = dataclasses.replace(self, paths=(path,), listed={path: identity}), identity[1]
      if total <= size or self.span or not _can_be_divided(path):
        yield part, total
        continue
      for start in range(0, total, size):
        stop = min(start + size, total)
        yield dataclasses.replace(part, span=(start, stop)), stop - start

  def lone(self, bad: Bad = refuse) -> LoneText | None:
    path = self.paths[0]
    if len(self.paths) > 1 or self.span or _layout(path) != 'text':
      return super().lone(bad)
    chunks = functools.partial(text_chunks, path)
    return LoneText(path, chunks, None if packed.is_packed(path) else chunks)

  def _texts(self) -> Iterator[str | UserError]:
    if self.span:
      yield from with_errors(_lines_of_span(self.paths[0], self.text_field, *self.span))
      return
    for path in self.paths:
      yield from with_errors(_documents(path, self.text_field))


def find_files(form: str, pattern: str, setting: str) -> dict[str, tuple[Any, ...]]:
  """Return the sorted files that match the pattern of a source `FORM:PATTERN`.

  A folder matches all files below it but hidden ones. For a file in a bucket, the value is its
  `paths.identity`, which the listing has; for others it is empty.

  Raises:
    UserError: no file matches, or the bucket cannot be listed.
  """
  if paths.in_bucket(pattern):
    found, where = _objects(pattern), ''
    if not found and not glob.has_magic(pattern):
      folder = pattern.rstrip('/')
      below = _objects(f'{folder}/**')
      found = {path: below[path] for path in below if '/.' not in path[len(folder) :]}
  else:
    expanded = os.path.expanduser(pattern)
    where = '' if os.path.isabs(expanded) else f' below {os.getcwd()}'
    if os.path.isdir(expanded):
      expanded = os.path.join(glob.escape(expanded), '**')
    matches = glob.glob(expanded, recursive=True)  # glob leaves out hidden files.
    found = {os.path.abspath(path): () for path in matches if os.path.isfile(path)}
  if not found:
    raise UserError(
      f'{setting} is {form}:{pattern}, which matches no file{where}; '
      'check the path, and use ** to match files in subfolders'
    )
  return {path: found[path] for path in sorted(found)}


def _objects(pattern: str) -> dict[str, tuple[Any, ...]]:
  with packed.reading(pattern):
    return retried(lambda: paths.objects(pattern), f'listing {pattern}')


def text_chunks(path: str, start: int = 0) -> Iterator[bytes]:
  """Yield the unpacked content of a file from a byte on; raise a UserError if it is not text."""
  return formats.checked(path, packed.chunks(path, start), start)


def _layout(path: str) -> str:
  return formats.layout(path, next(text_chunks(path), b''))


def _can_be_divided(path: str) -> bool:
  try:
    return not packed.is_packed(path) and _layout(path) == 'lines'
  except UserError:  # It is said when the documents are read, and may be left out.
    return False


def _whole(path: str, chunks: Iterable[bytes]) -> bytearray:
  content, limit = bytearray(), packed.Limit(path)
  for chunk in chunks:
    content += chunk
    if not limit.allows(len(content)):
      raise packed.too_long(path)
  return content


def _documents(path: str, text_field: str) -> Iterator[str | UserError]:
  """Yield the documents of a file, and for a row that cannot be read what is wrong with it."""
  chunks = text_chunks(path)
  head = next(chunks, b'')
  chunks = itertools.chain([head], chunks)
  layout = formats.layout(path, head)
  if layout == 'text' and text_field == CHAT:
    raise UserError(
      f'{path} is one text, and config.data.rows=chat needs rows; name JSON lines (.jsonl) or a '
      'JSON array, or leave it out of the source'
    )
  if layout == 'text':
    yield decode(_whole(path, chunks), path)
  elif layout == 'lines':
    yield from _json_lines(path, chunks, text_field)
  elif layout == 'array':
    yield from text_tables.array_documents(path, chunks, text_field)
  else:
    yield from text_tables.table_documents(path, chunks, text_field)


def _json_lines(path: str, chunks: Iterable[bytes], text_field: str) -> Iterator[str | UserError]:
  number = 0
  for line in packed.lines(path, chunks):  # `enumerate` would keep a line beside the next one.
    number += 1  # noqa: SIM113 (see above)
    found = _row(line, f'{path}, line {number},', text_field) if not _is_blank(line) else ''
    del line
    yield found
    del found


def _lines_of_span(path: str, text_field: str, start: int, stop: int) -> Iterator[str | UserError]:
  """Yield the documents of the JSON lines that begin in a range of bytes."""
  position = max(0, start - 1)  # The byte before the range may end a line.
  skip = start > 0
  for line in packed.lines(path, text_chunks(path, position)):
    if position >= stop:
      return
    place = f'{path}, the line at byte {position:,},'
    position += len(line) + 1
    found = _row(line, place, text_field) if not (skip or _is_blank(line)) else ''
    skip = False
    del line
    yield found
    del found


def _is_blank(line: bytes) -> bool:
  return not line or line.isspace()


def _row(line: bytes, place: str, text_field: str) -> str | UserError:
  try:
    return document(json.loads(decode(line, place)), text_field, place)
  except UserError as error:
    return error
  except (ValueError, RecursionError) as error:
    return UserError(f'{place} is not valid JSON ({error})')
