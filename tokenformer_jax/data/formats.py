"""Detect files that are not text, and name the command that converts each to text.

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

# Commands that print a table as a .jsonl file, one row a line; {} is the quoted file name.
_CSV = (
  'python -c "import csv, json, sys; '
  '[print(json.dumps(row)) for row in csv.DictReader(sys.stdin{})]"'
)
_ARRAY = 'python -c "import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]"'
_PANDAS = (
  'python -c "import pandas, sys; '
  "print(pandas.read_{}(sys.argv[1]).to_json(orient='records', lines=True))\" {{}}"
)
_DATASETS = (
  'python -c "import datasets, sys; '
  'datasets.Dataset.from_file(sys.argv[1]).to_json(sys.stdout.buffer)" {}'
)
_TABLES = {
  'CSV': '{} | ' + _CSV.format(''),
  'TSV': '{} | ' + _CSV.format(", delimiter='\\t'"),
  'Parquet': _PANDAS.format('parquet'),
  'Feather': _PANDAS.format('feather'),
  'Arrow': _DATASETS,
}
_ARCHIVES = {'zip': 'unzip {}', 'tar': 'tar -xf {}', 'bzip2': 'bunzip2 {}', 'xz': 'unxz {}'}
_NAMES = {
  '.csv': 'CSV',
  '.tsv': 'TSV',
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


def has_document_a_line(path: str) -> bool:
  """Return whether each line of a file is a JSON object with a document, by the file's name."""
  return unpacked_name(path).endswith(('.jsonl', '.ndjson'))


def check_name(path: str) -> None:
  """Check that a file is empty, or does not have the name of a table or an archive.

  Raises:
    UserError: the name is that of a table or an archive. The message has the command to convert it.
  """
  name = path.lower()
  for ending, form in _NAMES.items():
    if (name.endswith(ending) or unpacked_name(name).endswith(ending)) and packed.size(path):
      raise _not_text(path, form)


def checked(path: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
  """Yield the chunks of a file unchanged, and check that they are text.

  Raises:
    UserError: the content has another format, or has NUL bytes.
  """
  head = b''
  for chunk in chunks:
    head += chunk
    if len(head) >= _HEAD_BYTES:
      break
  _check_head(path, head)
  position = 0
  for chunk in itertools.chain([head] if head else [], chunks):
    if (nul := chunk.find(b'\0')) >= 0:
      raise _has_nul(path, position + nul, filled=not chunk[nul:].strip(b'\0'))
    position += len(chunk)
    yield chunk


def _check_head(path: str, head: bytes) -> None:
  for start, form in _STARTS.items():
    if head.startswith(start) and _is_binary(head):
      raise _not_text(path, form)
  is_json = unpacked_name(path).endswith('.json')
  if not (is_json or has_document_a_line(path)):
    return
  first, *others = [line for line in head.split(b'\n') if line.strip()] or [b'']
  lone = _value(first) is None or not others
  if head.lstrip(b'\xef\xbb\xbf \t\r\n').startswith(b'[') and (is_json or lone):
    command = f'{_print_command(path)} | {_ARRAY} > FILE.jsonl'
    raise UserError(
      f'{path} is one JSON array, not text; convert it to a .jsonl file, one element a line: '
      f'{command}'
    )
  if is_json and isinstance(_value(first), dict) and others and others[0].startswith(b'{'):
    raise UserError(
      f'{path} has a JSON object on each line; rename it to end in .jsonl, so that each line is a '
      'document'
    )


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
  if form in _TABLES:
    command = _TABLES[form].format(_print_command(path) if form in ('CSV', 'TSV') else name)
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
  return UserError(f'{path} is a {form} file, not text; leave it out of config.data.source')


def _print_command(path: str) -> str:
  """Return the command that prints the content of a file."""
  for ending, command in (('.gz', 'gzip -dc'), ('.zst', 'zstd -dc')):
    if path.endswith(ending):
      return f'{command} {shlex.quote(path)}'
  return f'cat {shlex.quote(path)}'


def _has_nul(path: str, position: int, filled: bool) -> UserError:
  if filled:
    where = 'from the start' if not position else f'from byte {position} on'
    return UserError(
      f'{path} is filled with NUL bytes {where}, which a crash or a full disk can cause; copy it '
      'again, or leave it out of config.data.source'
    )
  return UserError(
    f'{path} is not text: its byte {position} is NUL; leave it out of config.data.source'
  )
