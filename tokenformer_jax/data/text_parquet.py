"""Read text from Parquet files: `parquet:GLOB` or `parquet:DIR`, on disks and in buckets.

A row group is read page by page, so the memory does not depend on its size.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenformer_jax.data import packed, text_files
from tokenformer_jax.data.text import Source, columns, digest, document, with_errors
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.storage import retry

if TYPE_CHECKING:
  from pyarrow import parquet

_BATCH_ROWS = 64
_BUFFER_BYTES = 2**20


def open_parquet(pattern: str, text_field: str, setting: str, splits: tuple[str, ...]) -> 'Parquet':
  """Return the source `parquet:PATTERN`; see `text.SOURCES`."""
  del splits
  if importlib.util.find_spec('pyarrow') is None:
    raise UserError(
      f'{setting} is parquet:{pattern}, which needs pyarrow; run pip install -e ".[data]"'
    )
  found = text_files.find_files('parquet', pattern, setting)
  # Other files of a folder, such as README.md, are no part of the set.
  tables = {path: found[path] for path in found if path.lower().endswith('.parquet')}
  if not tables:
    raise UserError(
      f'{setting} is parquet:{pattern}, which matches no file that ends in .parquet; name others '
      'as files:GLOB'
    )
  return Parquet(tuple(tables), text_field, {p: tables[p] or packed.identity(p) for p in tables})


@dataclasses.dataclass(frozen=True)
class Parquet(Source):
  """Parquet files with a document a row, in the column `text_field`.

  Attributes:
    identities: the `paths.identity` of each file.
    groups: the first row group to read and the one after the last, for a part of a single file.
  """

  paths: tuple[str, ...]
  text_field: str
  identities: dict[str, tuple[Any, ...]] = dataclasses.field(compare=False)
  groups: tuple[int, int] | None = None

  def fingerprint(self) -> str:
    """Return a hash of the names, sizes and modification times (in a bucket: the objects' tags)."""
    return digest(([self.identities[path] for path in self.paths], self.groups))

  def files(self) -> tuple[str, ...]:
    return self.paths

  def parts(self, size: int) -> Iterator[tuple[Source, int]]:
    for path in self.paths:
      known = {path: self.identities[path]}
      part = dataclasses.replace(self, paths=(path,), identities=known)
      if known[path][1] <= size or self.groups:
        yield part, known[path][1]
      else:
        yield from part._group_parts(path, size)

  def _group_parts(self, path: str, size: int) -> Iterator[tuple[Source, int]]:
    """Yield parts of a large file, each with row groups of about `size` bytes."""
    with _table(path, self.identities[path][1]) as table:
      groups = [table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups)]
    start, filled = 0, 0
    for end, group_size in enumerate([*groups, size + 1]):
      if end > start and filled + group_size > size:
        yield dataclasses.replace(self, groups=(start, end)), filled
        start, filled = end, 0
      filled += group_size

  def _texts(self) -> Iterator[str | UserError]:
    for path in self.paths:
      yield from with_errors(self._file_texts(path))

  def _file_texts(self, path: str) -> Iterator[str | UserError]:
    with _table(path, self.identities[path][1]) as table:
      read = columns(table.schema_arrow.names, self.text_field, path)
      row = 0
      for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if self.groups is None or self.groups[0] <= group < self.groups[1]:
          number = row
          for values in _rows(table, group, read):  # `enumerate` would keep one beside the next.
            number += 1
            found = document(values, self.text_field, f'{path}, row {number},')
            del values  # The text would be in memory beside the next one.
            yield found
            del found
        row += rows


@contextlib.contextmanager
def _table(path: str, size: int) -> 'Iterator[parquet.ParquetFile]':
  """Open a Parquet file of `size` bytes, and turn errors of reading it into UserErrors."""
  import pyarrow  # noqa: PLC0415 (from an extra, and only needed here)
  from pyarrow import parquet  # noqa: PLC0415

  file = _File(path, size)
  try:
    yield parquet.ParquetFile(
      pyarrow.PythonFile(file, mode='r'), buffer_size=_BUFFER_BYTES, pre_buffer=False
    )
  except (UserError, TransientError):
    raise
  except (pyarrow.ArrowException, OSError) as error:  # OSError: a page cannot be unpacked.
    raise UserError(
      f'{path} is damaged or is not a Parquet file ({retry.one_line(error)}); copy it again, or '
      'leave it out of the source'
    ) from error
  finally:
    file.close()


def _rows(table: 'parquet.ParquetFile', group: int, names: list[str]) -> Iterator[dict[str, Any]]:
  """Yield the rows of some columns in a row group; a lone text as UTF-8, which may be invalid."""
  for batch in table.iter_batches(_BATCH_ROWS, [group], names, use_threads=False):
    if len(names) > 1:
      yield from batch.to_pylist()
    else:
      yield from ({names[0]: value.as_py()} for value in _binary(batch.column(0)))


def _binary(values: Any) -> Any:
  """Return Arrow's values of a column, text as bytes."""
  import pyarrow  # noqa: PLC0415

  if pyarrow.types.is_dictionary(values.type):
    values = values.dictionary_decode()
  if pyarrow.types.is_string(values.type):
    return values.cast(pyarrow.binary())
  if pyarrow.types.is_large_string(values.type):
    return values.cast(pyarrow.large_binary())
  return values


class _File(packed.Steady):
  """A file as pyarrow reads it."""

  closed = False

  def __init__(self, path: str, size: int):
    super().__init__(path)
    self._size = size

  def read(self, size: int = -1) -> bytes:
    with packed.reading(self._path):
      return super().read(size)

  def seek(self, offset: int, whence: int = 0) -> int:
    self.position = offset + (0, self.position, self._size)[whence]
    return self.position

  def tell(self) -> int:
    return self.position
