"""Detect the layout of a text file, and files that are not text, with advice for each.

The file name decides if the content cannot: text with commas is text, unless the file is called
.csv. Otherwise the content decides.
"""

import codecs
import itertools
import json
import shlex
from collections.abc import Iterator
from typing import Any

from tokenformer_jax.data import packed
from tokenformer_jax.errors import UserError

_HEAD_BYTES = 64 * 2**10  # bytes at the start of the content that the detection reads

_DELIMITERS = {'.csv': ',', '.tsv': '\t'}  # of the tables that are text
# Commands that print a table as a .jsonl file, one row a line; {} is the quoted file name.
_PANDAS = (
  'python -c "import pandas, sys; '
  "print(pandas.read_feather(sys.argv[1]).to_json(orient='records', lines=True))\" {}"
)
_DATASETS = (
  'python -c "import datasets, sys; '
  'datasets.Dataset.from_file(sys.argv[1]).to_json(sys.stdout.buffer)" {}'
)
_TABLES = {'Feather': _PANDAS, 'Arrow': _DATASETS}
_ARCHIVES = {'zip': 'unzip {}', 'tar': 'tar -xf {}', 'bzip2': 'bunzip2 {}', 'xz': 'unxz {}'}
_NAMES = {
  '.parquet': 'Parquet',
  '.feather': 'Feather',
  '.arrow': 'Arrow',
  '.zip': 'zip',
  '.tar': 'tar',
  '.tgz': 'tar',
  '.bz2': 'bzip2',
  '.xz': 'xz',
}
# First bytes of files that are not UTF-8 text.
_STARTS = {
  b'PAR1': 'Parquet',
  b'ARROW1': 'Arrow',
  b'PK\x03\x04': 'zip',
  b'BZh': 'bzip2',
  b'\xfd7zXZ\x00': 'xz',
  b'\x1f\x8b': 'gzip',
  b'\x28\xb5\x2f\xfd': 'zstd',
  b'%PDF-': 'PDF',
  b'\x89PNG': 'PNG',
  b'\xff\xd8\xff': 'JPEG',
  b'\xff\xfe': 'UTF-16',
  b'\xfe\xff': 'UTF-16',
}
_NOT_IN_TEXT = bytes({*range(32)} - {*b'\b\t\n\v\f\r\x1b'})


def unpacked_name(path: str) -> str:
  """Return a file name without the ending .gz or .zst."""
  return path.removesuffix('.gz').removesuffix('.zst')


def delimiter(path: str) -> str:
  """Return what is between the fields of a CSV or TSV file, or '' for other names."""
  return _DELIMITERS.get(unpacked_name(path.lower())[-4:], '')


def layout(path: str, head: bytes) -> str:
  """Return how documents are in a text file with this name and start of its content.

  'lines': each line is a JSON object with a document. 'array': each element of a JSON array is.
  'table': each row of a CSV or TSV file has one. 'text': the file is one document.
  """
  if delimiter(path):
    return 'table'
  has_lines, is_json = _has_lines(path), unpacked_name(path).endswith('.json')
  if (has_lines or is_json) and _starts_with(b'[', head):
    first, *others = _lines(head)
    if is_json or _value(first) is None or not others:
      return 'array'
  return 'lines' if has_lines else 'text'


def _starts_with(character: bytes, head: bytes) -> bool:
  return head.lstrip(b'\xef\xbb\xbf \t\r\n').startswith(character)


def _has_lines(path: str) -> bool:
  return unpacked_name(path).endswith(('.jsonl', '.ndjson'))


def check_name(path: str) -> None:
  """Check that a file is empty, or does not have the name of a binary table or an archive.

  Raises:
    UserError: the name is that of a binary table or an archive. The message says how to read it.
  """
  name = path.lower()
  for ending, form in _NAMES.items():
    if (name.endswith(ending) or unpacked_name(name).endswith(ending)) and packed.size(path):
      raise _not_text(path, form)


def checked(path: str, chunks: Iterator[bytes], start: int = 0) -> Iterator[bytes]:
  """Yield the chunks of a file from a byte `start` on unchanged, and check that they are text.

  Raises:
    UserError: the content has another format, or has NUL bytes.
  """
  head = b''
  for chunk in chunks:
    head += chunk
    if len(head) >= _HEAD_BYTES:
      break
  if not start:
    _check_head(path, head)
  position = start
  for chunk in itertools.chain([head] if head else [], chunks):
    if (nul := chunk.find(b'\0')) >= 0:
      raise _has_nul(path, position + nul, filled=not chunk[nul:].strip(b'\0'))
    position += len(chunk)
    yield chunk


def _check_head(path: str, head: bytes) -> None:
  for start, form in _STARTS.items():
    if head.startswith(start) and _is_binary(head):
      raise _not_text(path, form)
  if not unpacked_name(path).endswith('.json'):
    return
  first, *others = _lines(head)
  if isinstance(_value(first), dict) and others and others[0].startswith(b'{'):
    raise UserError(
      f'{path} has a JSON object on each line; rename it to end in .jsonl, so that each line is a '
      'document'
    )
  if _starts_with(b'{', head):
    raise UserError(
      f'{path} is one JSON object, which is neither a text nor rows; give rows as a JSON array, or '
      'one a line in a .jsonl file, or rename it to end in .txt to have it read as a text'
    )


def _lines(head: bytes) -> list[bytes]:
  """Return the lines that are not blank, at least one."""
  return [line for line in head.split(b'\n') if line.strip()] or [b'']


def _value(line: bytes) -> Any:
  """Return the JSON value of a line, or None if the line is not JSON."""
  try:
    return json.loads(line)
  except (ValueError, RecursionError):
    return None


def _is_binary(head: bytes) -> bool:
  if head.translate(None, _NOT_IN_TEXT) != head:
    return True
  try:
    codecs.getincrementaldecoder('utf-8')().decode(head)  # The last character may be cut.
  except UnicodeDecodeError:
    return True
  return False


def _not_text(path: str, form: str) -> UserError:
  name = shlex.quote(path)
  if form == 'Parquet':
    return UserError(f'{path} is a Parquet table, not text; name it as parquet:{path}')
  if form in _TABLES:
    command = _TABLES[form].format(name)
    article = 'an' if form == 'Arrow' else 'a'
    return UserError(
      f'{path} is {article} {form} table, not text; convert it to a .jsonl file, one row a line, '
      f'and name the text column in config.data.text_field: {command} > FILE.jsonl'
    )
  if form in _ARCHIVES:
    command = _ARCHIVES[form].format(name)
    return UserError(f'{path} is packed with {form}, which is not supported; unpack it: {command}')
  if form in ('gzip', 'zstd'):
    ending = {'gzip': '.gz', 'zstd': '.zst'}[form]
    return UserError(f'{path} is packed with {form}; rename it to end in {ending}')
  if form == 'UTF-16':
    command = f'iconv -f UTF-16 -t UTF-8 {name} > FILE.txt'
    return UserError(f'{path} is text in UTF-16; convert it to UTF-8: {command}')
  return UserError(f'{path} is a {form} file, not text; leave it out of the source')


def _has_nul(path: str, position: int, filled: bool) -> UserError:
  if filled:
    where = 'from the start' if not position else f'from byte {position} on'
    return UserError(
      f'{path} is filled with NUL bytes {where}, which a crash or a full disk can cause; copy it '
      'again, or leave it out of the source'
    )
  return UserError(f'{path} is not text: its byte {position} is NUL; leave it out of the source')
