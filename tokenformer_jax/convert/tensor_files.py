"""Find the tensors in files of PyTorch and of safetensors, and write safetensors files.

A PyTorch file (`torch.save` since 1.6) is an uncompressed zip archive, with the table of names,
shapes and offsets as a pickle in `data.pkl` and the numbers in `data/KEY`; reading it does not need
PyTorch. The safetensors library reads and checks the table of a safetensors file. It writes a file
only from tensors that are all in memory, so `write` here writes tensors one at a time.

Files come from untrusted sources: `pickled_table` runs no code that a pickle names, and the size of
a file bounds the memory that reading it takes. A table is not compressed, and the tensors together
are at most as large as their file.
"""

import contextlib
import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from tokenformer_jax.convert import pickled_table
from tokenformer_jax.convert.pickled_table import View
from tokenformer_jax.errors import UserError

DTYPES = {
  'float32': np.dtype(np.float32),
  'float16': np.dtype(np.float16),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
}
SUFFIXES = ('.bin', '.safetensors')

_SAFETENSORS = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16'}
_ITEM_BYTES = {
  code: bytes_
  for bytes_, codes in {1: 'BOOL U8 I8', 2: 'F16 BF16 I16', 4: 'F32 I32', 8: 'F64 I64'}.items()
  for code in codes.split()
}
_MOST_TABLE_BYTES = 2**21  # 400 tensors take about 60 kB
_MOST_AXES = 8
_LONGEST_NAME = 256
_CHUNK = 2**20  # numbers
_ZIP = b'PK\x03\x04'  # the first bytes of a PyTorch file and of each record in it

Shape = tuple[int, ...]


class Tensor(NamedTuple):
  """The position of a tensor in a file, with its dtype and shape."""

  file: Path
  offset: int
  dtype: np.dtype
  shape: Shape

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  def read(self) -> np.ndarray:
    """Return the tensor, in its dtype and shape.

    Raises:
      UserError: the file ends before the tensor does.
    """
    # Read, not mapped: the pages of a mapped file would count as memory of this process.
    raw = np.fromfile(self.file, np.uint8, self.bytes, offset=self.offset)
    if len(raw) != self.bytes:
      raise UserError(f'{self.file} was cut short while it was read; fetch it again')
    return raw.view(self.dtype).reshape(self.shape)

  def chunks(self) -> Iterator[np.ndarray]:
    """Yield the numbers of the tensor in chunks.

    Raises:
      UserError: the file ends before the tensor does.
    """
    size = math.prod(self.shape)
    for first in range(0, size, _CHUNK):
      offset = self.offset + first * self.dtype.itemsize
      yield self._replace(offset=offset, shape=(min(_CHUNK, size - first),)).read()


def find(source: Path, skipped: Callable[[str], bool] = lambda name: False) -> dict[str, Tensor]:
  """Return every tensor of a file, a sharded set or a directory, by name.

  The source is a `.bin` or `.safetensors` file, the `.index.json` of a sharded set, or a directory
  with one of them, of which the one is taken that `transformers` takes. Tensors whose names are
  `skipped` are left out, whatever their dtype.

  Raises:
    UserError: the file does not exist, is damaged, or has another format.
  """
  if source.is_dir():
    source = _in_directory(source)
  if not source.is_file():
    raise UserError(
      f'{source} is not a file or directory here; name a .bin or .safetensors file or the folder '
      'of a model; `hf download NAME --local-dir FOLDER` (pip install huggingface_hub) fetches one '
      'of the hub'
    )
  if source.name.endswith('.index.json'):
    return _sharded(source, skipped)
  try:
    return (_safetensors if source.suffix == '.safetensors' else _pytorch)(source, skipped)
  except OSError as error:
    raise UserError(f'{source} cannot be read ({error.strerror or error})') from error


def _in_directory(directory: Path) -> Path:
  usual = ('model.safetensors', 'pytorch_model.bin')
  named = [f'{name}{end}' for name in usual for end in ('', '.index.json')]
  patterns = [f'*{suffix}{end}' for suffix in SUFFIXES[::-1] for end in ('.index.json', '')]
  for pattern in (*named, *patterns):
    found = sorted(directory.glob(pattern))
    if len(found) > 1:
      names = ', '.join(path.name for path in found[:4])
      raise UserError(f'{directory} has {names} without an index; name one file as --source')
    if found:
      return found[0]
  raise UserError(
    f'{directory} has no .bin, .safetensors or .index.json file; name another --source'
  )


def _sharded(index: Path, skipped: Callable[[str], bool]) -> dict[str, Tensor]:
  try:
    if index.stat().st_size > _MOST_TABLE_BYTES:
      raise ValueError(f'more than {_MOST_TABLE_BYTES} bytes')
    weight_map = json.loads(index.read_text('utf-8'))['weight_map']
    shards = sorted(set(weight_map.values()))
    for name in (*weight_map, *shards):
      _checked_name(name)
    # Shards must be in the directory of the index, so no path may lead out of it.
    usable = all(name == Path(name).name and name.endswith(SUFFIXES) for name in shards)
  except (OSError, *_MALFORMED) as error:
    raise UserError(f'{index} is not the index of a sharded set ({_reason(error)})') from error
  if not usable:
    raise UserError(
      f'{index} names shards that are not .bin or .safetensors files beside it; '
      'fetch the whole set into one directory'
    )
  if missing := [shard for shard in shards if not index.with_name(shard).is_file()]:
    raise UserError(
      f'{index} names {missing[0]}, which is not beside it ({len(missing)} of {len(shards)} shards '
      'are missing); fetch the whole set into one directory'
    )
  tensors: dict[str, Tensor] = {}
  for shard in shards:
    for name, tensor in find(index.with_name(shard), skipped).items():
      if weight_map.get(name) != shard:
        place = f'puts into {weight_map[name]}' if name in weight_map else 'does not name'
        raise UserError(
          f'{shard} holds the tensor {name}, which {index} {place}; fetch the whole set again'
        )
      tensors[name] = tensor
  for name, shard in weight_map.items():
    if name not in tensors and not skipped(name):
      raise UserError(
        f'{index} puts the tensor {name} into {shard}, which does not hold it; fetch the whole set '
        'again'
      )
  return tensors


# Errors that reading a value of an unexpected type raises.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _reason(error: BaseException) -> str:
  """Return the type and first line of an exception, escaped because it may quote a file."""
  text = str(error).strip().partition('\n')[0]
  return f'{type(error).__name__}: {ascii(text)[1:-1]:.160}'


def _safetensors(path: Path, skipped: Callable[[str], bool]) -> dict[str, Tensor]:
  try:
    with safe_open(path, framework='numpy') as file:
      entries = {name: file.get_slice(name) for name in file.offset_keys()}
      table = {name: (entry.get_dtype(), entry.get_shape()) for name, entry in entries.items()}
    with path.open('rb') as file:
      offset = 8 + int.from_bytes(file.read(8), 'little')  # the end of the table
  except SafetensorError as error:
    damaged = 'is not a safetensors file, or is cut short or damaged; fetch it again'
    reason = _describe_other_format(path) or f'{damaged} ({_reason(error)})'
    raise UserError(f'{path} {reason}') from error
  dtypes = {code: DTYPES[name] for name, code in _SAFETENSORS.items()}
  tensors: dict[str, Tensor] = {}
  for name, (code, sizes) in table.items():
    try:
      _checked_name(name)
      shape = _shape(sizes)
    except ValueError as error:
      raise UserError(f'{path} has a tensor that cannot be read ({_reason(error)})') from error
    if skipped(name) and code in _ITEM_BYTES:
      offset += math.prod(shape) * _ITEM_BYTES[code]
      continue
    if code not in dtypes:
      raise UserError(_wrong_dtype(path, name, code))
    # The library refuses a file whose tensors overlap, or do not fill it from the table to its end.
    tensors[name] = Tensor(path, offset, dtypes[code], shape)
    offset += tensors[name].bytes
  return tensors


def _checked_name(name: Any) -> str:
  """Return a tensor's name after checking that it is safe to print at a terminal."""
  if not (type(name) is str and name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
    raise ValueError(f'a name that is not 1 to {_LONGEST_NAME} printable characters')
  return name


def _whole(number: Any) -> int:
  if type(number) is not int:
    raise ValueError(f'a {type(number).__name__} instead of an integer')
  return number


def _shape(values: Iterable[Any]) -> Shape:
  shape = tuple(map(_whole, values))
  if len(shape) > _MOST_AXES:
    raise ValueError(f'{len(shape)} axes')
  if any(size < 1 for size in shape):
    raise ValueError(f'a shape of {list(shape)}')
  return shape


def _wrong_dtype(path: Path, name: str, dtype: Any) -> str:
  allowed = ', '.join(DTYPES)
  return f'{path}: the tensor {name} has the dtype {dtype!s:.20}; it must be one of {allowed}'


class _Archive(io.FileIO):
  """A file whose reads are limited to the size of a table, whatever its directory says."""

  def read(self, size: int | None = -1) -> bytes:
    if size is None or size < 0:
      size = os.fstat(self.fileno()).st_size - self.tell()
    if size > _MOST_TABLE_BYTES:
      raise zipfile.BadZipFile(f'a record of {size} bytes that is not a tensor')
    return super().read(size)


def _pytorch(path: Path, skipped: Callable[[str], bool]) -> dict[str, Tensor]:
  try:
    with _Archive(path) as file, zipfile.ZipFile(file) as archive:
      records = {info.filename: info for info in archive.infolist()}
      (table,) = [name for name in records if name.endswith('/data.pkl')]
      root = table.removesuffix('data.pkl')
      order = records.get(f'{root}byteorder')
      if order and _content(path, archive, order) != b'little':
        raise UserError(
          f'{path} was written in big-endian order; ask its author for a .safetensors file'
        )
      named = pickled_table.parse(_content(path, archive, records[table]))
      if isinstance(named, dict):
        named = {name: view for name, view in named.items() if not skipped(str(name))}
      return _locate_tensors(
        path, file, {k.removeprefix(root): r for k, r in records.items()}, named
      )
  except (UserError, OSError):
    raise
  except pickled_table.RefusedError as error:
    raise UserError(
      f'{path} asks to run {error!s:.80} when it is read, which was refused, because files of '
      'tensors never need it; do not load this file by other means unless you trust its author'
    ) from error
  except zipfile.BadZipFile as error:
    raise UserError(f'{path} {_describe_non_archive(path)} ({_reason(error)})') from error
  except Exception as error:  # A malformed archive or pickle can raise any exception.
    raise UserError(
      f'{path} is not a file that torch.save writes for a model ({_reason(error)})'
    ) from error


def _content(path: Path, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bytes:
  """Return the content of a record that describes the tensors."""
  _check_stored(path, record)
  if record.file_size > _MOST_TABLE_BYTES:
    raise UserError(
      f'{path} describes its tensors in {record.file_size} bytes, more than any model needs; at '
      f'most {_MOST_TABLE_BYTES} are read'
    )
  return archive.read(record)


def _check_stored(path: Path, record: zipfile.ZipInfo) -> None:
  """Check that a record is stored without compression."""
  if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
    raise UserError(
      f'{path} is compressed, which torch.save never does; unpack it and name the file inside, or '
      'ask its author for a .safetensors file'
    )


# How to read untrusted files with PyTorch. By its advisories, weights_only=True can run code before
# 2.6 (CVE-2025-32434) and corrupt memory before 2.10 (CVE-2026-24747).
_SAFELY = 'PyTorch 2.10 or later and weights_only=True, which runs no hidden code'


def _describe_non_archive(path: Path) -> str:
  with path.open('rb') as file:
    start = file.read(4)
  if start == _ZIP:
    return 'is cut short or damaged; fetch it again'
  return _describe_other_format(path) or 'is not a file of PyTorch, and is not named .safetensors'


def _describe_other_format(path: Path) -> str:
  """Return the actual format of a file whose name says another one, or an empty string."""
  with path.open('rb') as file:
    start = file.read(16)
  if start[:1] == b'\x80':
    return (
      'has the format of PyTorch before 1.6, a pickle that can run any code when it is loaded; ask '
      f'its author for a .safetensors file, or write one yourself with {_SAFELY}: '
      "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
    )
  if start.startswith(b'version https://'):
    return 'is a pointer of Git LFS, not the file itself; fetch the file (git lfs pull)'
  if start.startswith(_ZIP):
    return 'has the content of a file of PyTorch; rename it to .bin'
  if start[8:9] == b'{' and path.suffix != '.safetensors':
    return 'has the content of a safetensors file; rename it to .safetensors'
  return ''


def _locate_tensors(
  path: Path, file: BinaryIO, records: dict[str, zipfile.ZipInfo], named: Any
) -> dict[str, Tensor]:
  """Return the tensors of a table with their positions in the archive."""
  tensors: dict[str, Tensor] = {}
  file_size = path.stat().st_size  # The sizes in the archive's directory cannot be trusted.
  if not isinstance(named, dict):
    raise UserError(f'{path} holds a {type(named).__name__}, not tensors by name')
  for name, view in named.items():
    _checked_name(name)
    if not isinstance(view, View):
      raise UserError(f'{path} has {name!r}, which is not a tensor; name a file of weights alone')
    storage, shape = view.storage, _shape(view.shape)
    if storage.dtype not in DTYPES:
      raise UserError(_wrong_dtype(path, name, storage.dtype))
    by_rows = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    strides = map(_whole, view.strides)
    if any(a != b and n > 1 for a, b, n in zip(strides, by_rows, shape, strict=True)):
      raise UserError(
        f'{path}: the tensor {name} is not stored row by row; load the file with {_SAFELY}, and '
        'save all tensors contiguous'
      )
    dtype, record = DTYPES[storage.dtype], records.get(f'data/{storage.key}')
    end = (_whole(view.offset) + math.prod(shape)) * dtype.itemsize
    if record is None or view.offset < 0 or end > record.file_size:
      raise UserError(f'{path} is cut short: it does not hold the whole tensor {name}')
    _check_stored(path, record)
    first = _data_offset(file, record) + view.offset * dtype.itemsize
    tensors[name] = Tensor(path, first, dtype, shape)
    if first + tensors[name].bytes > file_size:
      raise UserError(f'{path} is cut short: it ends before the tensor {name} does')
  total = sum(tensor.bytes for tensor in tensors.values())
  # Views of one storage could claim far more memory than the file has bytes. A tied head has two.
  if total > 2 * file_size:
    raise UserError(
      f'{path} has {file_size} bytes, and its tensors together {total}: they share a storage, '
      'which only the embedding and a tied head may do; load the file with '
      f'{_SAFELY}, and save a copy of each tensor by safetensors.torch.save_file'
    )
  return tensors


def _data_offset(file: BinaryIO, record: zipfile.ZipInfo) -> int:
  """Return where the content of a record starts: after the header that the directory points to."""
  file.seek(record.header_offset)
  header = file.read(30)
  if header[:4] != _ZIP:
    raise zipfile.BadZipFile('a record is not where it should be')
  return record.header_offset + 30 + sum(struct.unpack('<HH', header[26:]))


def write(
  target: Path, dtype: str, shapes: dict[str, Shape], stream: Iterable[tuple[str, np.ndarray]]
) -> None:
  """Write a safetensors file, under a temporary name that is renamed at the end.

  `dtype` is a name in `DTYPES`, and the order of `shapes` that of the table. `stream` has every
  tensor once, in any order and in float32; only one tensor is in memory at a time.

  Raises:
    UserError: the file cannot be written, or a number is too large for the dtype. No partial file
      stays behind.
  """
  partial = target.with_name(f'.{target.name}.partial')
  try:
    with partial.open('wb') as file:
      offsets = _write_table(file, dtype, shapes)
      for name, array in stream:
        file.seek(offsets[name])
        file.write(_converted(name, array, dtype).reshape(-1).view(np.uint8).data)
    os.rename(partial, target)
  except OSError as error:
    raise UserError(
      f'{target} could not be written ({error.strerror or error}); nothing is left of it; free '
      'space or choose another --target'
    ) from error
  finally:
    with contextlib.suppress(OSError):
      partial.unlink()


def write_set(
  folder: Path,
  dtype: str,
  shapes: dict[str, Shape],
  stream: Iterable[tuple[str, np.ndarray]],
  most_bytes: int,
) -> None:
  """Write `model.safetensors`, or several files of up to `most_bytes` and their index.

  A tensor larger than that has a file of its own. For the other arguments see `write`. The folder
  is new, and the caller removes it after an error.

  Raises:
    OSError: a file cannot be written.
    UserError: a number is too large for the dtype.
  """
  parts = _cut(dtype, shapes, most_bytes)
  names = ['model.safetensors']
  if len(parts) > 1:
    names = [f'model-{i:05}-of-{len(parts):05}.safetensors' for i in range(1, len(parts) + 1)]
    total = sum(math.prod(shape) for shape in shapes.values()) * DTYPES[dtype].itemsize
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index, indent=2))
  with contextlib.ExitStack() as files:
    places: dict[str, tuple[BinaryIO, int]] = {}
    for name, part in zip(names, parts, strict=True):
      file = files.enter_context((folder / name).open('wb'))
      places |= {key: (file, at) for key, at in _write_table(file, dtype, part).items()}
    for name, array in stream:
      file, offset = places[name]
      file.seek(offset)
      file.write(_converted(name, array, dtype).reshape(-1).view(np.uint8).data)


def _cut(dtype: str, shapes: dict[str, Shape], most_bytes: int) -> list[dict[str, Shape]]:
  """Return the tensors of each file of a set, in order."""
  parts, used = [{}], 0
  for name, shape in shapes.items():
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if parts[-1] and used + size > most_bytes:
      parts.append({})
      used = 0
    parts[-1][name] = shape
    used += size
  return parts


def _write_table(file: BinaryIO, dtype: str, shapes: dict[str, Shape]) -> dict[str, int]:
  """Write the table of a safetensors file, and return the offset of each tensor in the file."""
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  begins, end = {}, 0
  for name, shape in shapes.items():
    begins[name], end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
    header[name] = {
      'dtype': _SAFETENSORS[dtype],
      'shape': shape,
      'data_offsets': [begins[name], end],
    }
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)  # Align the numbers.
  file.write(struct.pack('<Q', len(text)) + text)
  return {name: 8 + len(text) + begin for name, begin in begins.items()}


def _converted(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
  with np.errstate(over='ignore'):  # The check below reports an overflow.
    converted = np.ascontiguousarray(array.astype(DTYPES[dtype], copy=False))
    converted = converted.reshape(array.shape)  # A number has become an array [1].
  if dtype != 'float32' and not np.array_equal(np.isfinite(array), np.isfinite(converted)):
    raise UserError(f'the tensor {name} has numbers too large for {dtype}; use --dtype=float32')
  return converted
