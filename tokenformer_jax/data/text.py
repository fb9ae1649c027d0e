"""Sources of text: the standard library of Python, files, and TFDS datasets.

A source yields documents, one after the other and always in the same order, and has a fingerprint
that changes when its content does.
"""

import abc
import contextlib
import dataclasses
import functools
import glob
import gzip
import hashlib
import io
import json
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from typing import Any

import zstandard

from tokenformer_jax import paths
from tokenformer_jax.data.records import cannot_be_opened
from tokenformer_jax.errors import UserError, nearest

_CHUNK_BYTES = 128 * 2**10
_ZSTD_WINDOW_BYTES = 2**31  # what `zstd --long=31` needs
_NOT_LIBRARY = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test', '__pycache__'}


class Source(abc.ABC):
  """Documents, in an order that is always the same."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """A hash of what identifies the content without reading it all."""

  @abc.abstractmethod
  def _texts(self) -> Iterator[str]:
    """Every document, empty ones included."""

  def documents(self) -> Iterator[str]:
    """The documents that are not empty.

    Raises:
      UserError: something cannot be read, or is not text.
    """
    return (text for text in self._texts() if text)


def open_source(spec: str, text_field: str, setting: str = 'config.data.source') -> Source:
  """The source that `config.data.source`, or another setting, names.

  Args:
    spec: `stdlib`, `files:GLOB` or `tfds:NAME`, where NAME may be `NAME/CONFIG:VERSION`.
    text_field: the field of a jsonl line or a TFDS example that is the document.
    setting: what the messages of errors call the spec.

  Raises:
    UserError: the spec is of another form, or there is nothing that it names.
  """
  kind, _, name = spec.partition(':')
  if spec == 'stdlib':
    return _standard_library()
  if kind == 'files' and name:
    return Files(_matches(name, setting), text_field)
  if kind == 'tfds' and name:
    return Tfds(name, text_field)
  raise UserError(f'{setting} is {spec!r}; it must be stdlib, files:GLOB or tfds:NAME')


@dataclasses.dataclass(frozen=True)
class Files(Source):
  """Text files, one document each, and .jsonl files, one document a line; also .gz and .zst."""

  paths: tuple[str, ...]
  text_field: str = 'text'

  def fingerprint(self) -> str:
    """A hash of the names, sizes and modification times; in a bucket, of the objects' tags."""
    found = []
    for path in self.paths:
      with _reading(path):
        found.append(paths.identity(path))
    return _digest(found)

  def _texts(self) -> Iterator[str]:
    for path in self.paths:
      name = path.removesuffix('.gz').removesuffix('.zst')
      if name.endswith('.jsonl'):
        yield from _json_lines(path, self.text_field)
      else:
        yield _decode(b''.join(_chunks(path)), path)


class PythonFiles(Files):
  """Python source files in the encodings that they declare (PEP 263); others are skipped."""

  def _texts(self) -> Iterator[str]:
    for path in self.paths:
      try:
        with _reading(path), tokenize.open(path) as file:
          text = file.read()
      except (UnicodeDecodeError, SyntaxError):  # SyntaxError: an encoding that does not exist
        continue
      yield text


def _standard_library() -> PythonFiles:
  """The standard library of the running interpreter without its tests, about 12 MB."""
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
  if paths.in_bucket(pattern):
    found, where = sorted(paths.files(pattern)), ''
  else:
    matches = glob.glob(os.path.expanduser(pattern), recursive=True)
    found = sorted({os.path.abspath(path) for path in matches if os.path.isfile(path)})
    where = f' below {os.getcwd()}'
  if not found:
    raise UserError(
      f'{setting} is files:{pattern}, which matches no file{where}; '
      'check the path, and use ** to reach into folders'
    )
  return tuple(found)


def _digest(value: Any) -> str:
  return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
  """Turns the errors of reading a file into sentences."""
  try:
    yield
  except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
    raise UserError(f'{path} is damaged or cut short ({error}); copy or pack it again') from error
  except paths.errors(path) as error:
    raise UserError(f'{path} cannot be read: {paths.reason(error)}') from error


def _chunks(path: str) -> Iterator[bytes]:
  """The content of a file, unpacked, piece by piece."""
  with _reading(path), paths.open_to_read(path) as file:
    if path.endswith('.zst'):
      yield from _zstd_chunks(file)
    else:
      content = gzip.GzipFile(fileobj=file) if path.endswith('.gz') else file
      while chunk := content.read(_CHUNK_BYTES):
        yield chunk


def _zstd_chunks(file: io.BufferedIOBase) -> Iterator[bytes]:
  """The content of a zstd file of any number of frames.

  The library's own stream reader ends silently where a frame is cut short.
  """
  decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
  frame = None
  while packed := file.read(_CHUNK_BYTES):
    while packed:
      frame = frame or decompressor.decompressobj()
      yield frame.decompress(packed)
      packed = frame.unused_data
      if frame.eof:
        frame = None
  if frame:
    raise EOFError('the last zstd frame has no end')


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
  """Lines, without their ends. The pieces of a long line are joined once."""
  pieces = []
  for chunk in chunks:
    first, *others = chunk.split(b'\n')
    pieces.append(first)
    for other in others:
      yield b''.join(pieces)
      pieces = [other]
  yield b''.join(pieces)


def _json_lines(path: str, text_field: str) -> Iterator[str]:
  for number, line in enumerate(_lines(_chunks(path)), start=1):
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
  # JSON can spell halves of surrogate pairs, which UTF-8 cannot.
  return text.encode('utf-8', errors='replace').decode()


def _decode(data: bytes, place: str) -> str:
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    raise UserError(
      f'{place} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it, or '
      'leave it out of config.data.source'
    ) from error


@dataclasses.dataclass(frozen=True)
class Tfds(Source):
  """The train split of a prepared TFDS dataset, read without TensorFlow."""

  name: str
  text_field: str = 'text'

  @functools.cached_property
  def _examples(self) -> Any:
    import tensorflow_datasets as tfds  # noqa: PLC0415 (slow, and only needed here)

    try:
      return tfds.data_source(self.name, split='train', download=False)
    except Exception as error:  # TFDS raises many kinds.
      raise cannot_be_opened(self.name, error) from error

  def fingerprint(self) -> str:
    """A hash of the name, the configuration, the version, and the sizes."""
    info = self._examples.dataset_info
    split = info.splits['train']
    return _digest((info.full_name, split.num_bytes, tuple(split.shard_lengths)))

  def _texts(self) -> Iterator[str]:
    for i in range(len(self._examples)):
      place = f'tfds:{self.name}, example {i},'
      try:
        example = self._examples[i]
      except Exception as error:  # array_record raises many kinds.
        raise UserError(f'{place} cannot be read: {error}') from error
      yield _field(example, self.text_field, place)
