"""Files of named tensors, read and written one tensor at a time: PyTorch's, safetensors, sharded.

Neither PyTorch nor the safetensors library is needed: all these files are a table of names, shapes
and offsets, and the raw numbers. A file of PyTorch (`torch.save` since 1.6) is an uncompressed zip
archive with the table as a pickle in `data.pkl` and the numbers in `data/KEY`; a safetensors file
is the length of its table, the table in JSON, and the numbers. Nothing that a pickle asks to run is
ever run: the few names that tables of tensors are made of stand for inert functions of this file.
"""

import collections
import contextlib
import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from tokenformer_jax.errors import UserError

DTYPES = {
  'float32': np.dtype(np.float32),
  'float16': np.dtype(np.float16),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
}
SUFFIXES = ('.bin', '.safetensors')

# The name of every dtype in each format; the last ones only to be named in a message.
_SAFETENSORS = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16'}
_STORAGES = {
  'float32': 'FloatStorage',
  'float16': 'HalfStorage',
  'bfloat16': 'BFloat16Storage',
  'float64': 'DoubleStorage',
  'int64': 'LongStorage',
  'int32': 'IntStorage',
  'uint8': 'ByteStorage',
  'bool': 'BoolStorage',
}
_MOST_TABLE_BYTES = 2**26  # 400 tensors take some 60 kB
_ALIGNMENT = 64  # of the numbers in a file of PyTorch, as torch.save has it

Shape = tuple[int, ...]


class Tensor(NamedTuple):
  """Where a tensor lies."""

  file: Path
  offset: int
  dtype: np.dtype
  shape: Shape

  def read(self) -> np.ndarray:
    """The tensor, in its dtype and shape.

    Raises:
      UserError: the file ends before it does.
    """
    wanted = math.prod(self.shape) * self.dtype.itemsize
    # Not mapped into memory: pages of a mapped file would count as this process's.
    raw = np.fromfile(self.file, np.uint8, wanted, offset=self.offset)
    if len(raw) != wanted:
      raise UserError(f'{self.file} was cut short while it was read; fetch it again')
    return raw.view(self.dtype).reshape(self.shape)


def find(source: Path) -> dict[str, Tensor]:
  """Every tensor of a file, of a sharded set, or of what a directory holds, by name.

  Args:
    source: a `.bin` or `.safetensors` file, the `.index.json` of a sharded set, or a directory with
      one of them (an index before a file, safetensors before PyTorch's).

  Raises:
    UserError: there is no such file, it is damaged, or it is something else.
  """
  if source.is_dir():
    source = _in_directory(source)
  if not source.is_file():
    raise UserError(f'{source} is not a file or directory; name a .bin or .safetensors file')
  if source.name.endswith('.index.json'):
    return _sharded(source)
  try:
    return _safetensors(source) if source.suffix == '.safetensors' else _pytorch(source)
  except OSError as error:
    raise UserError(f'{source} cannot be read ({error.strerror or error})') from error


def _in_directory(directory: Path) -> Path:
  usual = ('model.safetensors', '*.safetensors', 'pytorch_model.bin', '*.bin')
  for pattern in ('*.safetensors.index.json', '*.bin.index.json', *usual):
    found = sorted(directory.glob(pattern))
    if len(found) > 1:
      names = ', '.join(path.name for path in found[:4])
      raise UserError(f'{directory} has {names} and no index of them; name one file as --source')
    if found:
      return found[0]
  raise UserError(f'{directory} has no .bin, .safetensors or .index.json file')


def _sharded(index: Path) -> dict[str, Tensor]:
  try:
    weight_map = json.loads(index.read_text('utf-8'))['weight_map']
    shards = sorted(set(weight_map.values()))
    # A shard lies beside its index: no path leads out of there.
    usable = all(name == Path(name).name and name.endswith(SUFFIXES) for name in shards)
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f'{index} is not the index of a sharded set ({error!r})') from error
  if not usable:
    raise UserError(f'{index} names shards that are no .bin or .safetensors file beside it')
  tensors: dict[str, Tensor] = {}
  for shard in shards:
    for name, tensor in find(index.with_name(shard)).items():
      if weight_map.get(name) != shard:
        told = f'puts it into {weight_map[name]}' if name in weight_map else 'does not name'
        raise UserError(f'{shard} holds the tensor {name}, which {index} {told}')
      tensors[name] = tensor
  for name, shard in weight_map.items():
    if name not in tensors:
      raise UserError(f'{index} has the tensor {name} in {shard}, which does not hold it')
  return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
  size = path.stat().st_size
  with path.open('rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if not 2 <= length <= min(size - 8, _MOST_TABLE_BYTES):
      raise UserError(f'{path} is no safetensors file, or is cut short; fetch it again')
    header = file.read(length)
  dtypes = {code: DTYPES[name] for name, code in _SAFETENSORS.items()}
  tensors, last = {}, 'its table'
  try:
    for name, entry in json.loads(header).items():
      if name == '__metadata__':
        continue
      last = f'the tensor {name}'
      if entry['dtype'] not in dtypes:
        raise UserError(_wrong_dtype(path, name, entry['dtype']))
      begin, end = entry['data_offsets']
      shape, dtype = _shape(entry['shape']), dtypes[entry['dtype']]
      if _whole(begin) < 0 or _whole(end) - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError('its size is not that of its shape')
      if 8 + length + end > size:
        raise UserError(f'{path} is cut short: it ends before the tensor {name} does')
      tensors[name] = Tensor(path, 8 + length + begin, dtype, shape)
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(f'{path} is no safetensors file: {last} cannot be read ({error!r})') from error
  return tensors


def _whole(number: Any) -> int:
  if type(number) is not int:
    raise ValueError(f'{number!r} is no whole number')
  return number


def _shape(values: Iterable[Any]) -> Shape:
  shape = tuple(map(_whole, values))
  if any(size < 0 for size in shape):
    raise ValueError(f'a shape of {shape}')
  return shape


def _wrong_dtype(path: Path, name: str, dtype: str) -> str:
  return f'{path}: the tensor {name} is of {dtype}; it must be one of {", ".join(DTYPES)}'


class _Storage(NamedTuple):
  dtype: str
  key: str
  size: int


class _View(NamedTuple):
  storage: _Storage
  offset: int
  shape: Shape
  strides: tuple[int, ...]


class _RefusedError(Exception):
  """A pickle names something that a table of tensors has no use for."""


class _TableUnpickler(pickle.Unpickler):
  """Reads a table of tensors. What it can call makes tuples and dicts, and does nothing else."""

  def find_class(self, module: str, name: str) -> Any:
    known = {
      'collections.OrderedDict': collections.OrderedDict,
      'torch._utils._rebuild_tensor_v2': self._view,
      'torch._utils._rebuild_parameter': self._parameter,
      **{f'torch.{storage}': dtype for dtype, storage in _STORAGES.items()},
    }
    if f'{module}.{name}' not in known:
      raise _RefusedError(f'{module}.{name}')
    return known[f'{module}.{name}']

  def persistent_load(self, pid: Any) -> _Storage:
    kind, dtype, key, _, size = pid
    if kind != 'storage':
      raise ValueError(f'a reference to {kind!r}')
    return _Storage(dtype, key, size)

  def _view(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _View:
    return _View(storage, offset, shape, strides)

  def _parameter(self, data: Any, *_: Any) -> Any:
    return data


def _pytorch(path: Path) -> dict[str, Tensor]:
  try:
    with path.open('rb') as file, zipfile.ZipFile(file) as archive:
      records = {info.filename: info for info in archive.infolist()}
      (table,) = [name for name in records if name.endswith('/data.pkl')]
      root = table.removesuffix('data.pkl')
      if f'{root}byteorder' in records and archive.read(f'{root}byteorder') != b'little':
        raise UserError(f'{path} was written with the other byte order; save it on another machine')
      if records[table].file_size > _MOST_TABLE_BYTES:
        raise UserError(f'{path} has a table of {records[table].file_size} bytes, no model has')
      with archive.open(table) as pickled:
        named = _TableUnpickler(pickled).load()
      return _placed(path, file, {k.removeprefix(root): r for k, r in records.items()}, named)
  except (UserError, OSError):
    raise
  except _RefusedError as error:
    raise UserError(
      f'{path} asks to run {error} when it is read, which was refused: files of tensors have no '
      'use for it; do not load this file by other means unless you trust who made it'
    ) from error
  except zipfile.BadZipFile as error:
    raise UserError(f'{path} {_why_no_archive(path)} ({error})') from error
  except Exception as error:  # Whatever a malformed pickle makes the unpickler raise.
    raise UserError(f'{path} is not what torch.save writes for a model ({error!r:.200})') from error


def _why_no_archive(path: Path) -> str:
  with path.open('rb') as file:
    start = file.read(4)
  if start == b'PK\x03\x04':
    return 'is cut short or damaged; fetch it again'
  if start[:1] == b'\x80':
    return 'has the format of PyTorch before 1.6; load and save it with a later version'
  return 'is not a file of PyTorch (nor, by its name, a .safetensors file)'


def _placed(
  path: Path, file: BinaryIO, records: dict[str, zipfile.ZipInfo], named: Any
) -> dict[str, Tensor]:
  """The tensors of a table, found in the archive."""
  tensors: dict[str, Tensor] = {}
  file_size = path.stat().st_size  # The directory may say anything of the sizes in it.
  if not isinstance(named, dict):
    raise UserError(f'{path} holds a {type(named).__name__}, not tensors by name')
  for name, view in named.items():
    if not (isinstance(view, _View) and isinstance(view.storage, _Storage) and type(name) is str):
      raise UserError(f'{path} has {name!r}, which is no tensor; name a file of weights alone')
    storage, shape = view.storage, _shape(view.shape)
    if storage.dtype not in DTYPES:
      raise UserError(_wrong_dtype(path, name, storage.dtype))
    by_rows = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if any(a != b and n > 1 for a, b, n in zip(view.strides, by_rows, shape, strict=True)):
      raise UserError(f'{path}: the tensor {name} is not stored row by row; save it contiguous')
    dtype, record = DTYPES[storage.dtype], records.get(f'data/{storage.key}')
    end = (_whole(view.offset) + math.prod(shape)) * dtype.itemsize
    if record is None or view.offset < 0 or end > min(record.file_size, file_size):
      raise UserError(f'{path} is cut short: it does not hold the whole tensor {name}')
    if record.compress_type != zipfile.ZIP_STORED:
      raise UserError(f'{path} is compressed; save it with torch.save')
    first = _data_offset(file, record) + view.offset * dtype.itemsize
    tensors[name] = Tensor(path, first, dtype, shape)
  return tensors


def _data_offset(file: BinaryIO, record: zipfile.ZipInfo) -> int:
  """Where the content of a record starts: after its own header, which the directory points to."""
  file.seek(record.header_offset)
  header = file.read(30)
  if header[:4] != b'PK\x03\x04':
    raise zipfile.BadZipFile('a record is not where it should be')
  return record.header_offset + 30 + sum(struct.unpack('<HH', header[26:]))


def write(
  target: Path, dtype: str, shapes: dict[str, Shape], stream: Iterable[tuple[str, np.ndarray]]
) -> None:
  """Writes a file in the format of its suffix under another name, and renames it at the end.

  Args:
    target: a `.bin` or `.safetensors` file that does not exist.
    dtype: of all tensors; a name in `DTYPES`.
    shapes: of all tensors, in the order of the table.
    stream: every tensor once, in any order and in float32; none is kept.

  Raises:
    UserError: it cannot be written, or a number is too large for the dtype; nothing is left of it.
  """
  partial = target.with_name(f'.{target.name}.partial')
  write_format = _write_pytorch if target.suffix == '.bin' else _write_safetensors
  try:
    with partial.open('wb') as file:
      write_format(file, dtype, shapes, _converted(stream, dtype))
    os.rename(partial, target)
  except OSError as error:
    raise UserError(
      f'{target} could not be written ({error.strerror or error}); nothing is left of it; make '
      'room or choose another --target'
    ) from error
  finally:
    with contextlib.suppress(OSError):
      partial.unlink()


def _converted(
  stream: Iterable[tuple[str, np.ndarray]], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
  for name, array in stream:
    with np.errstate(over='ignore'):  # found out below
      converted = np.ascontiguousarray(array.astype(DTYPES[dtype], copy=False))
    if dtype != 'float32' and not np.array_equal(np.isfinite(array), np.isfinite(converted)):
      raise UserError(f'the tensor {name} has numbers too large for {dtype}; take --dtype=float32')
    yield name, converted


def _raw(array: np.ndarray) -> memoryview:
  return array.reshape(-1).view(np.uint8).data


def _write_safetensors(
  file: BinaryIO, dtype: str, shapes: dict[str, Shape], stream: Iterable[tuple[str, np.ndarray]]
) -> None:
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name, shape in shapes.items():
    begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
    header[name] = {'dtype': _SAFETENSORS[dtype], 'shape': shape, 'data_offsets': [begin, end]}
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)  # so that the numbers are aligned
  file.write(struct.pack('<Q', len(text)) + text)
  for name, array in stream:
    file.seek(8 + len(text) + header[name]['data_offsets'][0])
    file.write(_raw(array))


def _write_pytorch(
  file: BinaryIO, dtype: str, shapes: dict[str, Shape], stream: Iterable[tuple[str, np.ndarray]]
) -> None:
  keys = {name: str(i) for i, name in enumerate(shapes)}
  with zipfile.ZipFile(file, 'w') as archive:
    _add(archive, file, 'data.pkl', _pickled(dtype, shapes, keys))
    _add(archive, file, 'byteorder', b'little')
    for name, array in stream:
      _add(archive, file, f'data/{keys[name]}', _raw(array))
    _add(archive, file, 'version', b'3\n')


def _add(archive: zipfile.ZipFile, file: BinaryIO, name: str, content: Any) -> None:
  """Adds a record whose content is aligned, as PyTorch wants it to map the file into memory."""
  record = zipfile.ZipInfo(f'pytorch_model/{name}')
  start = file.tell() + 30 + len(record.filename) + 4
  padding = -start % _ALIGNMENT
  record.extra = struct.pack('<2sH', b'FB', padding) + b'Z' * padding
  archive.writestr(record, content)


def _pickled(dtype: str, shapes: dict[str, Shape], keys: dict[str, str]) -> bytes:
  """The table as `torch.save` pickles it, put together by hand: nothing of PyTorch is here."""

  def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack('<I', len(value.encode())) + value.encode()

  def integer(value: int) -> bytes:
    return pickle.LONG1 + b'\x08' + struct.pack('<q', value)

  def group(*values: bytes) -> bytes:
    return pickle.MARK + b''.join(values) + pickle.TUPLE

  def named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f'{module}\n{name}\n'.encode()

  new_dict = named('collections', 'OrderedDict') + pickle.EMPTY_TUPLE + pickle.REDUCE
  parts = [pickle.PROTO + b'\x02', new_dict, pickle.MARK]
  for name, shape in shapes.items():
    storage = group(
      text('storage'),
      named('torch', _STORAGES[dtype]),
      text(keys[name]),
      text('cpu'),
      integer(math.prod(shape)),
    )
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    view = group(
      storage + pickle.BINPERSID,
      integer(0),
      group(*map(integer, shape)),
      group(*map(integer, strides)),
      pickle.NEWFALSE,  # requires_grad
      new_dict,  # backward hooks
    )
    parts += [text(name), named('torch._utils', '_rebuild_tensor_v2'), view, pickle.REDUCE]
  return b''.join([*parts, pickle.SETITEMS, pickle.STOP])
