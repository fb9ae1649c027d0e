"""Detect the layout of a text file, and files that are not text, with advice for each.

The file name decides if the content cannot: text with commas is text, unless the file is called
.csv. Otherwise the content decides.
"""

import codecs
import itertools
import json
import shlex
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tokenformer_jax.data import reading
from tokenformer_jax.errors import UserError

Layout = Literal['text', 'lines', 'array', 'table']

_HEAD_BYTES = 64 * 2**10  # bytes at the start of the content that the detection reads
_DELIMITERS = {'.csv': ',', '.tsv': '\t'}
_NOT_IN_TEXT = bytes({*range(32)} - {*b'\b\t\n\v\f\r\x1b'})


class _Form(NamedTuple):
  """A form of files that are not UTF-8 text: its name, endings, first bytes, and what to do."""

  name: str
  endings: tuple[str, ...]
  starts: tuple[bytes, ...]
  advice: str  # {path} is the file's name, {quoted} that for a shell


_TO_LINES = (
  'convert it to a .jsonl file, one row a line, and name the text column in '
  'config.data.text_field: python -c "{}" {{quoted}} > FILE.jsonl'
)
_FEATHER = _TO_LINES.format(
  'import pandas, sys; '
  "print(pandas.read_feather(sys.argv[1]).to_json(orient='records', lines=True))"
)
_ARROW = _TO_LINES.format(
  'import datasets, sys; datasets.Dataset.from_file(sys.argv[1]).to_json(sys.stdout.buffer)'
)
_LEAVE_OUT = 'leave it out of the source'
_UTF_16 = 'convert it to UTF-8: iconv -f UTF-16 -t UTF-8 {quoted} > FILE.txt'
_FORMS = (
  _Form('a Parquet table, not text', ('.parquet',), (b'PAR1',), 'name it as parquet:{path}'),
  _Form('an Arrow table, not text', ('.arrow',), (b'ARROW1',), _ARROW),
  _Form('a Feather table, not text', ('.feather',), (), _FEATHER),
  _Form('packed with zip', ('.zip',), (b'PK\x03\x04',), 'unpack it: unzip {quoted}'),
  _Form('packed with tar', ('.tar', '.tgz'), (), 'unpack it: tar -xf {quoted}'),
  _Form('packed with bzip2', ('.bz2',), (b'BZh',), 'unpack it: bunzip2 {quoted}'),
  _Form('packed with xz', ('.xz',), (b'\xfd7zXZ\x00',), 'unpack it: unxz {quoted}'),
  _Form('packed with gzip', (), (b'\x1f\x8b',), 'rename it to end in .gz'),
  _Form('packed with zstd', (), (b'\x28\xb5\x2f\xfd',), 'rename it to end in .zst'),
  _Form('text in UTF-16', (), (b'\xff\xfe', b'\xfe\xff'), _UTF_16),
  _Form('a PDF file, not text', (), (b'%PDF-',), _LEAVE_OUT),
  _Form('a PNG file, not text', (), (b'\x89PNG',), _LEAVE_OUT),
  _Form('a JPEG file, not text', (), (b'\xff\xd8\xff',), _LEAVE_OUT),
)


def unpacked_name(path: str) -> str:
  """Return a file name in lower case, without the ending .gz or .zst."""
  return path.lower().removesuffix('.gz').removesuffix('.zst')


def unpack_command(path: str) -> str:
  """Return the command that prints the unpacked content of a file."""
  program = {'.gz': 'zcat', 'zst': 'zstdcat'}.get(path[-3:], 'cat')
  return f'{program} {shlex.quote(path)}'


def delimiter(path: str) -> str:
  """Return what is between the fields of a CSV or TSV file, or '' for other names."""
  return _DELIMITERS.get(unpacked_name(path)[-4:], '')


def has_rows(path: str) -> bool:
  """Return whether a file has the name of JSON or of a table, so that documents are its rows."""
  return bool(delimiter(path)) or unpacked_name(path).endswith(('.jsonl', '.ndjson', '.json'))


def layout(path: str, head: bytes) -> Layout:
  """Return how documents are in a file with this name and this start of its content.

  'lines': each line is a JSON object with a document. 'array': each element of a JSON array is.
  'table': each row of a CSV or TSV file has one. 'text': the file is one document.
  """
  if not has_rows(path):
    return 'text'
  if delimiter(path):
    return 'table'
  start, _, rest = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b'\n')
  if start.startswith(b'['):  # Lines that are arrays are bad rows, each named.
    return 'lines' if rest.strip() and _is_json(start) else 'array'
  return 'lines'


def check_name(path: str) -> None:
  """Check that a file is empty, or does not have the name of a binary table or an archive."""
  names = (path.lower(), unpacked_name(path))
  for form in _FORMS:
    if any(name.endswith(form.endings) for name in names) and reading.identity(path)[1]:
      raise _not_text(path, form)


def checked(path: str, chunks: Iterator[bytes], start: int = 0) -> Iterator[bytes]:
  """Yield the chunks of a file from a byte `start` on unchanged, and check that they are text."""
  head = b''
  while len(head) < _HEAD_BYTES and (chunk := next(chunks, b'')):
    head += chunk
  if not start:
    _check_head(path, head)
  position = start
  for chunk in itertools.chain([head] if head else [], chunks):
    if (nul := chunk.find(b'\0')) >= 0:
      if nul:
        yield chunk[:nul]
      raise _has_nul(path, position + nul, filled=not chunk[nul:].strip(b'\0'))
    position += len(chunk)
    yield chunk


def _check_head(path: str, head: bytes) -> None:
  for form in _FORMS:
    if form.starts and head.startswith(form.starts) and _is_binary(head):
      raise _not_text(path, form)
  first, newline, rest = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b'\n')
  is_object = newline and first.startswith(b'{') and not rest.lstrip().startswith(b'{')
  if unpacked_name(path).endswith('.json') and is_object and not _is_json(first):
    raise UserError(
      f'{path} is one JSON object on several lines, which is neither a text nor rows; give rows as '
      'a JSON array, or one a line, or rename it to end in .txt to have it read as a text'
    )


def _is_json(line: bytes) -> bool:
  try:
    json.loads(line)
  except (ValueError, RecursionError):
    return False
  return True


def _is_binary(head: bytes) -> bool:
  if head.translate(None, _NOT_IN_TEXT) != head:
    return True
  try:
    codecs.getincrementaldecoder('utf-8')().decode(head)  # The last character may be cut.
  except UnicodeDecodeError:
    return True
  return False


def _not_text(path: str, form: _Form) -> UserError:
  advice = form.advice.format(path=path, quoted=shlex.quote(path))
  return UserError(f'{path} is {form.name}; {advice}')


def _has_nul(path: str, position: int, filled: bool) -> UserError:
  if filled:
    where = 'from the start' if not position else f'from byte {position} on'
    return UserError(
      f'{path} is filled with NUL bytes {where}, which a crash or a full disk can cause; copy it '
      'again, or leave it out of the source'
    )
  return UserError(f'{path} is not text: its byte {position} is NUL; leave it out of the source')
