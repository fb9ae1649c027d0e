"""Tell the layout of a text file by its name and its first character."""

import codecs
from typing import Literal

Layout = Literal['text', 'lines', 'array', 'table']

_DELIMITERS = {'.csv': ',', '.tsv': '\t'}


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
  """
  if delimiter(path):
    return 'table'
  if not has_rows(path):
    return 'text'
  first, _, others = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b'\n')
  is_row = first.rstrip().endswith(b']') and others.strip()  # a list in each line
  return 'array' if first.startswith(b'[') and not is_row else 'lines'
