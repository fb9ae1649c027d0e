"""Find the tensors in files of PyTorch and of safetensors, and write safetensors files.

The libraries read the files. The safetensors library writes a file only from tensors that are all
in memory, so `write` here writes tensors one at a time.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from tokenformer_jax.convert import torch_file
from tokenformer_jax.errors import UserError, arg

DTYPES = {
  'float32': np.dtype(np.float32),
  'float16': np.dtype(np.float16),
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
}
SUFFIXES = ('.bin', '.safetensors')

_SAFETENSORS = {'float32': 'F32', 'float16': 'F16', 'bfloat16': 'BF16'}
_MOST_TABLE_BYTES = 2**26  # 91,000 tensors of experts take 13 MB
_MOST_AXES = 8
_LONGEST_NAME = 256
SHARD_BYTES = 5 * 10**9  # of a file of weights; larger models have several files and an index

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor in a file.

  Attributes:
    dtype: that of its numbers.
    shape: its sizes.
    read: returns the numbers.
  """

  dtype: np.dtype
  shape: Shape
  read: Callable[[], np.ndarray]


def find(source: Path, skipped: Callable[[str], bool] = lambda name: False) -> dict[str, Tensor]:
  """Return every tensor of a file, a sharded set or a directory, by name.

  The source is a `.bin` or `.safetensors` file, the `.index.json` of a sharded set, or a directory
  with one of them, of which the one is taken that `transformers` takes. Tensors whose names are
  `skipped` are left out, whatever their dtype.
  """
  if source.is_dir():
    source /= choose([path.name for path in source.glob('*')], source)
  if not source.is_file():
    raise UserError(
      f'{source} is not a file or directory here; name a .bin or .safetensors file, the folder of '
      'a model, or a model of the hub as ORG/NAME or ORG/NAME@REVISION'
    )
  if source.name.endswith('.index.json'):
    return _sharded(source, skipped)
  try:
    return (_safetensors if source.suffix == '.safetensors' else _pytorch)(source, skipped)
  except OSError as error:
    raise UserError(f'{source} cannot be read ({error.strerror or error})') from error


def choose(files: Collection[str], source: Any) -> str:
  """Return the file of weights that is read, given the names of all files of `source`."""
  usual = ('model.safetensors', 'pytorch_model.bin')
  named = [f'{name}{end}' for name in usual for end in ('', '.index.json')]
  patterns = [f'*{suffix}{end}' for suffix in SUFFIXES[::-1] for end in ('.index.json', '')]
  for pattern in (*named, *patterns):
    found = sorted(fnmatch.filter(files, pattern))
    if len(found) > 1:
      names = ', '.join(found[:4])
      raise UserError(f'{source} has {names} without an index; name one file as {arg.source}')
    if found:
      return found[0]
  raise UserError(
    f'{source} has no .bin, .safetensors or .index.json file; name another {arg.source}'
  )


def read_index(index: Path) -> dict[str, str]:
  """Return the shard in which each tensor of a sharded set is, by its name."""
  try:
    if index.stat().st_size > _MOST_TABLE_BYTES:
      raise ValueError(f'more than {_MOST_TABLE_BYTES} bytes')
    weight_map = json.loads(index.read_text('utf-8'))['weight_map']
    shards = {*weight_map.values()}
    for name in (*weight_map, *shards):
      _checked_name(name)
    # Shards must be in the directory of the index, so no path may lead out of it.
    usable = all(name == Path(name).name and name.endswith(SUFFIXES) for name in shards)
  except (OSError, *_MALFORMED) as error:
    raise UserError(f'{index} is not the index of a sharded set ({_reason(error)})') from error
  if not usable:
    raise UserError(
      f'{index} names shards that are not .bin or .safetensors files of its folder; '
      'fetch the whole set into one directory'
    )
  return weight_map


def _sharded(index: Path, skipped: Callable[[str], bool]) -> dict[str, Tensor]:
  weight_map = read_index(index)
  shards = sorted({*weight_map.values()})
  if missing := [shard for shard in shards if not index.with_name(shard).is_file()]:
    raise UserError(
      f'{index} names {missing[0]}, which is not in its folder ({len(missing)} of {len(shards)} '
      'shards are missing); fetch the whole set into one directory'
    )
  tensors: dict[str, Tensor] = {}
  for shard in shards:  # Each is read whole, as in transformers: an index may lack a tensor.
    tensors |= find(index.with_name(shard), skipped)
  for name, shard in weight_map.items():
    if name not in tensors and not skipped(name):
      raise UserError(
        f'{index} puts the tensor {name} into {shard}, and no shard holds it; fetch the whole set '
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
      slices = {name: file.get_slice(name) for name in file.offset_keys()}
      table = {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
  except SafetensorError as error:
    damaged = 'is not a safetensors file, or is cut short or damaged; fetch it again'
    reason = torch_file.describe_format(path) or f'{damaged} ({_reason(error)})'
    raise UserError(f'{path} {reason}') from error

  def read(name: str) -> np.ndarray:
    try:
      with safe_open(path, framework='numpy') as file:
        return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
      raise UserError(f'{path} has changed while it was read; fetch it again') from error

  dtypes = {code: DTYPES[name] for name, code in _SAFETENSORS.items()}
  return _tensors(
    path,
    {name: entry for name, entry in table.items() if not skipped(name)},
    dtypes.get,
    read,
  )


def _pytorch(path: Path, skipped: Callable[[str], bool]) -> dict[str, Tensor]:
  named = {name: one for name, one in torch_file.load(path).items() if not skipped(str(name))}

  table = {name: (str(one.dtype).removeprefix('torch.'), one.shape) for name, one in named.items()}
  tensors = _tensors(path, table, DTYPES.get, lambda name: torch_file.to_numpy(named[name]))
  total = sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors.values())
  # Views of one storage could claim far more memory than the file has bytes. A tied head has two.
  if total > 2 * path.stat().st_size:
    raise UserError(
      f'{path} has {path.stat().st_size} bytes, and its tensors together {total}: they share a '
      'storage, which only the embedding and a tied head may do; save a copy of each tensor by '
      'safetensors.torch.save_file'
    )
  return tensors


def _tensors(
  path: Path,
  table: Mapping[str, tuple[Any, Iterable[int]]],
  to_dtype: Callable[[Any], np.dtype | None],
  read: Callable[[str], np.ndarray],
) -> dict[str, Tensor]:
  """Return the tensors of a file, given its dtypes and shapes by name."""
  tensors: dict[str, Tensor] = {}
  for name, (code, sizes) in table.items():
    shape = tuple(sizes)
    try:
      _checked_name(name)
      if len(shape) > _MOST_AXES or any(size < 1 for size in shape):
        raise ValueError(f'a shape of {str(shape)[:80]}')
    except ValueError as error:
      raise UserError(f'{path} has a tensor that cannot be read ({_reason(error)})') from error
    if (dtype := to_dtype(code)) is None:
      raise UserError(
        f'{path}: the tensor {name} has the dtype {code!s:.20}; it must be one of '
        f'{", ".join(DTYPES)}'
      )
    tensors[name] = Tensor(dtype, shape, functools.partial(read, name))
  return tensors


def _checked_name(name: Any) -> None:
  """Check that a tensor's name is safe to print at a terminal."""
  if not (type(name) is str and name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
    raise ValueError(f'a name that is not 1 to {_LONGEST_NAME} printable characters')


def write(
  folder: Path,
  dtype: str,
  shapes: Mapping[str, Shape],
  stream: Iterable[tuple[str, np.ndarray]],
  most_bytes: int = SHARD_BYTES,
) -> None:
  """Write `model.safetensors`, or several files of up to `most_bytes` and their index.

  A tensor larger than that has a file of its own. `dtype` is a name in `DTYPES`, and the order of
  `shapes` that of the tables. `stream` has every tensor once, in any order and in float32; only one
  tensor is in memory at a time. The folder is new, and the caller removes it after an error.

  Raises:
    OSError: a file cannot be written.
    UserError: a number is too large for the dtype.
  """
  shards = _cut(dtype, shapes, most_bytes)
  names = ['model.safetensors']
  if len(shards) > 1:
    names = [f'model-{i:05}-of-{len(shards):05}.safetensors' for i in range(1, len(shards) + 1)]
    total = sum(math.prod(shape) for shape in shapes.values()) * DTYPES[dtype].itemsize
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index, indent=2))
  with contextlib.ExitStack() as files:
    offsets: dict[str, tuple[BinaryIO, int]] = {}
    for name, shard in zip(names, shards, strict=True):
      file = files.enter_context((folder / name).open('wb'))
      offsets |= {key: (file, at) for key, at in _write_table(file, dtype, shard).items()}
    for name, array in stream:
      file, offset = offsets[name]
      file.seek(offset)
      file.write(_converted(name, array, dtype).reshape(-1).view(np.uint8).data)


def _cut(dtype: str, shapes: Mapping[str, Shape], most_bytes: int) -> list[dict[str, Shape]]:
  """Return the tensors of each file of a set, in order."""
  shards, used = [{}], 0
  for name, shape in shapes.items():
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if shards[-1] and used + size > most_bytes:
      shards.append({})
      used = 0
    shards[-1][name] = shape
    used += size
  return shards


def _write_table(file: BinaryIO, dtype: str, shapes: Mapping[str, Shape]) -> dict[str, int]:
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
    raise UserError(f'the tensor {name} has numbers too large for {dtype}; use {arg.dtype}=float32')
  return converted
