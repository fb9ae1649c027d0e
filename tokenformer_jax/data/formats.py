"""Tell the layout of a text file by its name, and refuse files that are not text."""

import codecs
from typing import Literal

from tokenformer_jax.errors import UserError

Layout = Literal['text', 'lines', 'array', 'table']

_DELIMITERS = {'.csv': ',', '.tsv': '\t'}
# What files are that begin with these bytes, and what to do with them.
_BINARY = {
  b'PAR1': 'a Parquet table; name it as parquet:{path}',
  b'ARROW1': 'an Arrow or Feather table; write it as Parquet, and name it as parquet:FILE',
  b'PK\x03\x04': 'packed with zip; unpack it',
  b'BZh': 'packed with bzip2; unpack it',
  b'\xfd7zXZ\x00': 'packed with xz; unpack it',
  b'\x1f\x8b': 'packed with gzip; rename it to end in .gz',
  b'\x28\xb5\x2f\xfd': 'packed with zstd; rename it to end in .zst',
  b'\xff\xfe': 'text in UTF-16; convert it to UTF-8: iconv -f UTF-16 -t UTF-8',
  b'\xfe\xff': 'text in UTF-16; convert it to UTF-8: iconv -f UTF-16 -t UTF-8',
}


def delimiter(path: str) -> str:
  """Return what is between the fields of a CSV or TSV file, or '' for other names."""
  return _DELIMITERS.get(_unpacked_name(path)[-4:], '')


def has_rows(path: str) -> bool:
  """Return whether a file has the name of JSON or of a table, so that documents are its rows."""
  return bool(delimiter(path)) or _unpacked_name(path).endswith(('.jsonl', '.ndjson', '.json'))


def _unpacked_name(path: str) -> str:
  return path.lower().removesuffix('.gz').removesuffix('.zst')


def layout(path: str, head: bytes) -> Layout:
  """Return how documents are in a file with this name and this start of its content.

  'lines': each line is a JSON object with a document. 'array': each element of a JSON array is.
  'table': each row of a CSV or TSV file has one. 'text': the file is one document.

  Raises:
    UserError: the file is a table or an archive that is read in another form.
  """
  form = next((_BINARY[start] for start in _BINARY if head.startswith(start)), '')
  if form and _is_binary(head):
    raise UserError(f'{path} is {form.format(path=path)}')
  if delimiter(path):
    return 'table'
  if not has_rows(path):
    return 'text'
  return 'array' if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b'[') else 'lines'


def _is_binary(head: bytes) -> bool:
  try:  # The last character may be cut.
    return '\0' in codecs.getincrementaldecoder('utf-8')().decode(head)
  except UnicodeDecodeError:
    return True
