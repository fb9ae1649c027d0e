"""Read text from files: `files:GLOB` or `files:DIR`, on disks and in buckets."""

import dataclasses
import glob
import json
import os
from collections.abc import Iterator

from tokenformer_jax.data import formats, packed
from tokenformer_jax.data.text import Bad, LoneText, Source, decode, digest, field, refuse
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import retried


def open_files(pattern: str, text_field: str, setting: str, splits: tuple[str, ...]) -> 'Files':
  """Return the source `files:PATTERN`; see `text.SOURCES`."""
  del splits
  return Files(_matches(pattern, setting), text_field)


@dataclasses.dataclass(frozen=True)
class Files(Source):
  """Text files (one document each) and .jsonl files (one document a line), plain, .gz or .zst."""

  paths: tuple[str, ...]
  text_field: str = 'text'

  def fingerprint(self) -> str:
    """Return a hash of the names, sizes and modification times (in a bucket: the objects' tags)."""
    return digest([packed.identity(path) for path in self.paths])

  def parts(self, size: int) -> Iterator[tuple[Source, int]]:
    for path in self.paths:
      yield dataclasses.replace(self, paths=(path,)), packed.size(path)

  def lone(self, bad: Bad = refuse) -> LoneText | None:
    if len(self.paths) > 1 or formats.has_document_a_line(self.paths[0]):
      return super().lone(bad)
    return LoneText(self.paths[0], lambda: _text_chunks(self.paths[0]))

  def _texts(self) -> Iterator[str | UserError]:
    for path in self.paths:
      if formats.has_document_a_line(path):
        yield from _json_lines(path, self.text_field)
      else:
        yield _document(path)


def _matches(pattern: str, setting: str) -> tuple[str, ...]:
  """Return the files that match a pattern; a folder matches all files below it but hidden ones."""
  if paths.in_bucket(pattern):
    found, where = _objects(pattern), ''
    if not found and not glob.has_magic(pattern):
      folder = pattern.rstrip('/')
      found = [path for path in _objects(f'{folder}/**') if '/.' not in path[len(folder) :]]
  else:
    expanded = os.path.expanduser(pattern)
    where = '' if os.path.isabs(expanded) else f' below {os.getcwd()}'
    if os.path.isdir(expanded):
      expanded = os.path.join(glob.escape(expanded), '**')
    matches = glob.glob(expanded, recursive=True)  # glob leaves out hidden files.
    found = sorted({os.path.abspath(path) for path in matches if os.path.isfile(path)})
  if not found:
    raise UserError(
      f'{setting} is files:{pattern}, which matches no file{where}; '
      'check the path, and use ** to match files in subfolders'
    )
  for path in found:
    formats.check_name(path)
  return tuple(found)


def _objects(pattern: str) -> list[str]:
  with packed.reading(pattern):
    return retried(lambda: sorted(paths.files(pattern)), f'listing {pattern}')


def _text_chunks(path: str) -> Iterator[bytes]:
  """Yield the unpacked content of a file; raise a UserError if it is not text."""
  return formats.checked(path, packed.chunks(path))


def _whole(path: str) -> bytearray:
  content, most = bytearray(), packed.held_at_most(path)
  for chunk in _text_chunks(path):
    content += chunk
    if len(content) > most:
      raise _too_long(path, most)
  return content


def _lines(path: str) -> Iterator[bytes]:
  """Yield the lines of a file without line ends. Join the pieces of a long line only once."""
  pieces, length, most = [], 0, packed.held_at_most(path)
  for chunk in _text_chunks(path):
    first, *others = chunk.split(b'\n')
    pieces.append(first)
    length += len(first)
    if length > most:
      raise _too_long(path, most)
    for other in others:
      yield b''.join(pieces)
      pieces, length = [other], len(other)
  yield b''.join(pieces)


def _too_long(path: str, most: int) -> UserError:
  share = '' if most == packed.LONGEST_DOCUMENT else ' in a packed file of its size'
  return UserError(
    f'{path} has a document of more than {most >> 20} MiB, the limit for one document{share}, '
    'because a document is held in memory; split the text into lines of a .jsonl file, or make it '
    'the only file of config.data.source, which is read in pieces'
  )


def _document(path: str) -> str | UserError:
  """Return the text of a file, or what is wrong with it."""
  try:
    return decode(_whole(path), path)
  except UserError as error:
    return error


def _json_lines(path: str, text_field: str) -> Iterator[str | UserError]:
  """Yield the documents of a file, and for a line without one what is wrong with it."""
  for number, line in enumerate(_lines(path), start=1):
    if line.strip():
      try:
        yield _row(line, f'{path}, line {number},', text_field)
      except UserError as error:
        yield error


def _row(line: bytes, place: str, text_field: str) -> str:
  try:
    values = json.loads(decode(line, place))
  except (ValueError, RecursionError) as error:
    raise UserError(f'{place} is not valid JSON ({error})') from error
  if not isinstance(values, dict):
    raise UserError(f'{place} is a JSON {type(values).__name__}; it must be an object')
  return field(values, text_field, place)
