"""Sources of text: the standard library of Python, files, and TFDS datasets.

A source yields its documents, always in the same order, and has a fingerprint that changes when its
content changes.
"""

import abc
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenformer_jax.data import formats, packed, records
from tokenformer_jax.errors import TransientError, UserError, nearest
from tokenformer_jax.storage import paths
from tokenformer_jax.storage.retry import retried

_PIECE_BYTES = 2**20  # bytes of a lone text that are tokenized together
_NOT_LIBRARY = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}


class Source(abc.ABC):
  """Documents in a fixed order."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Return a hash that identifies the content, without reading all of it."""

  @abc.abstractmethod
  def _texts(self) -> Iterator[str]:
    """Yield every document, empty ones included."""

  def documents(self) -> Iterator[str]:
    """Yield the documents that are not empty.

    Raises:
      UserError: a file cannot be read, is not text, or is too large for one document.
    """
    return (text for text in self._texts() if text)

  def lone(self) -> 'LoneText | None':
    """Return the document of a source that has exactly one, else None."""
    first = list(itertools.islice(self.documents(), 2))
    if len(first) != 1:
      return None
    content = first[0].encode()
    return LoneText('the only document of config.data.source', lambda: iter([content]))


@dataclasses.dataclass(frozen=True)
class LoneText:
  """The only document of a source, of any length. It is read in pieces, as often as needed.

  Attributes:
    place: the location of the text, for messages.
    chunks: returns the UTF-8 bytes of the text from the start.
  """

  place: str
  chunks: Callable[[], Iterable[bytes]]

  def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the text between two byte positions, in pieces that end at line ends.

    A piece has at most `_PIECE_BYTES`. A piece without a line end ends after a whole character.
    """
    waiting, done = bytearray(), start
    for chunk in _between(self.chunks(), start, stop):
      waiting += chunk
      while len(waiting) > _PIECE_BYTES:
        end = _last_line_end(waiting, 0, _PIECE_BYTES) or _character_start(waiting, _PIECE_BYTES)
        yield _decode(waiting[:end], self.place, done)
        del waiting[:end]
        done += end
    if waiting:
      yield _decode(waiting, self.place, done)

  def cut(self, fraction: float) -> tuple[int, int]:
    """Return the start of the last `fraction` of the text, and the text's length, both in bytes.

    The start is the last line end shortly before the exact position, else a character boundary.
    """
    total = sum(map(len, self.chunks()))
    exact = max(0, min(total - 1, max(1, total - round(total * fraction))))
    near = min(exact, total - exact, _PIECE_BYTES) // 2
    start = max(0, exact - max(near, 3))  # UTF-8 characters have up to four bytes.
    around = b''.join(_between(self.chunks(), start, exact + 1))
    line_end = _last_line_end(around, exact - near - start, exact - start)
    return start + (line_end or _character_start(around, exact - start)), total


def _between(chunks: Iterable[bytes], start: int, stop: int | None) -> Iterator[bytes]:
  """Yield the bytes of a stream between two positions. `stop` None means the end."""
  position = 0
  for chunk in chunks:
    if stop is not None and position >= stop:
      return
    part = chunk[max(0, start - position) : None if stop is None else stop - position]
    position += len(chunk)
    if part:
      yield part


def _last_line_end(data: bytes | bytearray, start: int, stop: int) -> int:
  """Return the position after the last line end within a range, or 0."""
  return data.rfind(b'\n', start, stop) + 1


def _character_start(data: bytes | bytearray, position: int) -> int:
  """Return the start of the character at a position."""
  for at in range(position, max(position - 4, 0), -1):
    if at >= len(data) or data[at] & 0xC0 != 0x80:
      return at
  return 0 if position < 4 else position  # More than three such bytes are not UTF-8.


def open_source(
  spec: str,
  text_field: str,
  setting: str = 'config.data.source',
  splits: tuple[str, ...] = ('train',),
) -> Source:
  """Open the source that `config.data.source`, or another setting, names.

  Args:
    spec: `stdlib`, `files:GLOB`, `files:DIR` or `tfds:NAME`, where NAME may be
      `NAME/CONFIG:VERSION`.
    text_field: the field of a jsonl line or a TFDS example that holds the document.
    setting: the name of the setting, for error messages.
    splits: names of TFDS splits in order of preference; the first existing one is read.

  Raises:
    UserError: the spec has another form, matches nothing, or matches a table or an archive.
  """
  kind, _, name = spec.partition(':')
  if spec == 'stdlib':
    return _standard_library()
  if kind == 'files' and name:
    return Files(_matches(name, setting), text_field)
  if kind == 'tfds' and name:
    return Tfds(name, text_field, splits)
  raise UserError(f'{setting} is {spec!r}; it must be stdlib, files:GLOB or tfds:NAME')


@dataclasses.dataclass(frozen=True)
class Files(Source):
  """Text files (one document each) and .jsonl files (one document a line), plain, .gz or .zst."""

  paths: tuple[str, ...]
  text_field: str = 'text'

  def fingerprint(self) -> str:
    """Return a hash of the names, sizes and modification times (in a bucket: the objects' tags)."""
    return _digest([packed.identity(path) for path in self.paths])

  def lone(self) -> LoneText | None:
    if len(self.paths) > 1 or formats.has_document_a_line(self.paths[0]):
      return super().lone()
    return LoneText(self.paths[0], lambda: _text_chunks(self.paths[0]))

  def _texts(self) -> Iterator[str]:
    for path in self.paths:
      if formats.has_document_a_line(path):
        yield from _json_lines(path, self.text_field)
      else:
        yield _decode(_whole(path), path)


class PythonFiles(Files):
  """Python source files in their declared encodings (PEP 263). Undecodable files are skipped."""

  def _texts(self) -> Iterator[str]:
    for path in self.paths:
      try:
        with packed.reading(path), tokenize.open(path) as file:
          text = file.read()
      except (UnicodeDecodeError, SyntaxError):  # SyntaxError: the declared encoding is unknown.
        continue
      yield text


def _standard_library() -> PythonFiles:
  """Return the standard library of the running interpreter without its tests, about 12 MB."""
  root = sysconfig.get_path('stdlib')
  paths = []
  for folder, folders, names in os.walk(root):
    folders[:] = set(folders) - _NOT_LIBRARY
    paths += [os.path.join(folder, name) for name in names if name.endswith('.py')]
  if not paths:
    raise UserError(
      f'config.data.source is stdlib, but this Python has no .py files in {root}; use files:GLOB'
    )
  return PythonFiles(tuple(sorted(paths)))


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


def _digest(value: Any) -> str:
  return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


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


def _json_lines(path: str, text_field: str) -> Iterator[str]:
  for number, line in enumerate(_lines(path), start=1):
    place = f'{path}, line {number},'
    if not line.strip():
      continue
    try:
      values = json.loads(_decode(line, place))
    except (ValueError, RecursionError) as error:
      raise UserError(f'{place} is not valid JSON ({error})') from error
    if not isinstance(values, dict):
      raise UserError(f'{place} is a JSON {type(values).__name__}; it must be an object')
    yield _field(values, text_field, place)


def _field(values: dict[str, Any], text_field: str, place: str) -> str:
  if text_field not in values:
    raise UserError(
      f'{place} has no field {text_field!r} (config.data.text_field)'
      f'{nearest(text_field, values) if values else ""}'
    )
  text = values[text_field]
  if isinstance(text, bytes):
    return _decode(text, f'{place} field {text_field!r},')
  if not isinstance(text, str):
    raise UserError(
      f'{place} has a {type(text).__name__} in the field {text_field!r} (config.data.text_field); '
      'it must be text'
    )
  # JSON can hold lone surrogates, and UTF-8 cannot encode them.
  return text.encode('utf-8', errors='replace').decode()


def _decode(data: bytes | bytearray, place: str, offset: int = 0) -> str:
  """Decode UTF-8 that begins at byte `offset` of a text. Drop a byte order mark only at 0."""
  try:
    return data.decode('utf-8' if offset else 'utf-8-sig')
  except UnicodeDecodeError as error:
    raise UserError(
      f'{place} is not UTF-8 (byte {offset + error.start} is 0x{data[error.start]:02x}); convert '
      'it, or leave it out of config.data.source'
    ) from error


@dataclasses.dataclass(frozen=True)
class Tfds(Source):
  """A split of a prepared TFDS dataset, read without TensorFlow."""

  name: str
  text_field: str = 'text'
  splits: tuple[str, ...] = ('train',)  # in order of preference; the first existing one is read

  @functools.cached_property
  def _examples(self) -> Any:
    import tensorflow_datasets as tfds  # noqa: PLC0415 (slow, and only needed here)

    def open_split() -> Any:
      builder = tfds.builder(self.name, file_format='array_record')
      split = next((one for one in self.splits if one in builder.info.splits), self.splits[0])
      return builder.as_data_source(split)

    try:
      return retried(open_split, f'opening tfds:{self.name}')
    except TransientError:
      raise
    except Exception as error:  # TFDS raises exceptions of many types.
      raise records.opening_error(self.name, error) from error

  def fingerprint(self) -> str:
    """Return a hash of the name, the configuration, the version, and the sizes."""
    info = self._examples.dataset_info
    split = info.splits[self._examples.split]
    return _digest((info.full_name, split.num_bytes, tuple(split.shard_lengths)))

  def _texts(self) -> Iterator[str]:
    for i in range(len(self._examples)):
      place = f'tfds:{self.name}, example {i},'
      try:
        example = retried(lambda i=i: records.read(self._examples, i), f'reading tfds:{self.name}')
      except TransientError:
        raise
      except Exception as error:  # array_record raises exceptions of many types.
        raise UserError(f'{place} cannot be read: {error}') from error
      yield _field(example, self.text_field, place)
