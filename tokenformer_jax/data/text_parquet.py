"""Read text from Parquet files: `parquet:GLOB` or `parquet:DIR`, on disks and in buckets.

A row group is read page by page, so the memory does not depend on its size.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenformer_jax.data import reading
from tokenformer_jax.data.chat_rows import without_nulls
from tokenformer_jax.data.text import ROWS, columns, document
from tokenformer_jax.data.text_files import Files, find_files
from tokenformer_jax.errors import TransientError, UserError, check_installed
from tokenformer_jax.storage import retry

if TYPE_CHECKING:
  from pyarrow import parquet

_BATCH_ROWS = 64
_BUFFER_BYTES = 2**20


def open_parquet(pattern: str, text_field: str, setting: str, splits: tuple[str, ...]) -> 'Parquet':
  """Return the source `parquet:PATTERN`; see `sources.SOURCES`."""
  del splits
  check_installed('pyarrow', f'reads {setting}=parquet:{pattern}', 'data')
  files = find_files('parquet', pattern, setting)
  # Other files of a folder, such as README.md, do not belong to the set.
  tables = {path: files[path] for path in files if path.lower().endswith('.parquet')}
  if not tables:
    raise UserError(
      f'{setting} is parquet:{pattern}, which matches no file that ends in .parquet; name others '
      'as files:GLOB'
    )
  return Parquet(tables, text_field)


class Parquet(Files):
  """Parquet files with a document a row, in the column `text_field`.

  The `span` is the first row group to read and the one after the last.
  """

  def _spans(self, path: str, size: int) -> Iterator[tuple[tuple[int, int] | None, int]]:
    with _open_table(path, self.identities[path][1]) as table:
      groups = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
    start, filled = 0, 0
    for end, group_size in enumerate([*groups, size + 1]):
      if end > start and filled + group_size > size:
        yield (start, end), filled
        start, filled = end, 0
      filled += group_size

  def lone_file(self) -> str:
    return ''

  def _file_texts(self, path: str) -> Iterator[str | UserError]:
    with _open_table(path, self.identities[path][1]) as table:
      first, end = self.span or (0, table.num_row_groups)
      sizes = (table.metadata.row_group(group).num_rows for group in range(first))
      names = columns(table.schema_arrow.names, self.text_field, path)
      if self.text_field not in ROWS:
        names = [self.text_field]  # of a struct the one field, not the whole column
      batches = table.iter_batches(_BATCH_ROWS, range(first, end), names, use_threads=False)
      # One document at a time: in Python a batch takes a multiple of the memory.
      rows = (batch.slice(i, 1).to_pylist()[0] for batch in batches for i in range(batch.num_rows))
      for number, row in enumerate(rows, start=1 + sum(sizes)):
        yield document(without_nulls(row), self.text_field, f'{path}, row {number},')


@contextlib.contextmanager
def _open_table(path: str, size: int) -> 'Iterator[parquet.ParquetFile]':
  """Open a Parquet file of `size` bytes, and turn errors of reading it into UserErrors."""
  import pyarrow  # noqa: PLC0415 (from an extra, and only needed here)
  from pyarrow import parquet  # noqa: PLC0415

  file = reading.SteadyFile(path, size=size)
  try:
    yield parquet.ParquetFile(
      pyarrow.PythonFile(file, mode='r'), buffer_size=_BUFFER_BYTES, pre_buffer=False
    )
  except (UserError, TransientError):
    raise
  # OSError: a page cannot be unpacked. UnicodeDecodeError: a text is not UTF-8.
  except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
    raise UserError(
      f'{path} is damaged or is not a Parquet file ({retry.one_line(error)}); copy it again, or '
      'leave it out of the source'
    ) from error
  finally:
    file.close()
