"""Write files as `torch.save` does, without PyTorch."""

import math
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np

from tokenformer_jax.convert import pickled_table, tensor_files

_ALIGNMENT = 64  # of the numbers, as in torch.save


def write(path: Path, dtype: str, weights: dict[str, np.ndarray]) -> Path:
  """Write the weights in a dtype of `tensor_files.DTYPES`; the same array is stored once."""
  keys = {name: str(id(array)) for name, array in weights.items()}
  shapes = {name: array.shape for name, array in weights.items()}
  with path.open('wb') as file, zipfile.ZipFile(file, 'w') as archive:

    def add(name: str, content: bytes) -> None:
      """Add a record with aligned content, because PyTorch may map the file into memory."""
      record = zipfile.ZipInfo(f'pytorch_model/{name}')
      padding = -(file.tell() + 30 + len(record.filename) + 4) % _ALIGNMENT
      record.extra = struct.pack('<2sH', b'FB', padding) + b'Z' * padding
      archive.writestr(record, content)

    add('data.pkl', dump_table(dtype, shapes, keys))
    add('byteorder', b'little')
    stored = {keys[name]: array for name, array in weights.items()}
    for key, array in reversed(stored.items()):  # The table need not have the records' order.
      add(f'data/{key}', array.astype(tensor_files.DTYPES[dtype]).tobytes())
    add('version', b'3\n')
  return path


def dump_table(dtype: str, shapes: dict[str, tuple[int, ...]], keys: dict[str, str]) -> bytes:
  """Return the table of a file as `torch.save` would pickle it, built without PyTorch.

  All tensors have the `dtype`, a name in `STORAGES`. `shapes` and the `keys` of the tensors'
  records are by name.
  """

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
      named('torch', pickled_table.STORAGES[dtype]),
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
