"""Read a file of PyTorch (`torch.save`) by PyTorch, which the extra `transformers` brings.

Files come from strangers: `weights_only` runs no code that a pickle names, and the sizes in the zip
archive are compared with those of the file before PyTorch reads it.
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from tokenformer_jax.errors import UserError, check_installed

if TYPE_CHECKING:
  import torch

# Earlier versions can run code or corrupt memory in spite of weights_only (CVE-2025-32434,
# CVE-2026-24747).
_LEAST = (2, 10)
_MOST_TABLE_BYTES = 2**21  # of the pickle; 400 tensors take about 60 kB
_ZIP = b'PK\x03\x04'


def load(path: Path) -> dict[str, 'torch.Tensor']:
  """Return the tensors of a file by name, mapped into memory."""
  _check_archive(path)
  check_installed('torch', f'reads {path.name}', 'transformers')
  import torch  # noqa: PLC0415

  if tuple(map(int, torch.__version__.split('.')[:2])) < _LEAST:
    raise UserError(
      f'PyTorch {torch.__version__} cannot read {path} safely; install PyTorch '
      f'{".".join(map(str, _LEAST))} or later, or ask for a .safetensors file'
    )
  try:
    named = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
  except pickle.UnpicklingError as error:
    if asked := re.search(r'GLOBAL (\S{1,80})', str(error)):
      raise UserError(
        f'{path} asks to run {asked[1]} when it is read, which was refused, because files of '
        'tensors never need it; do not load this file by other means unless you trust its author'
      ) from error
    raise UserError(f'{path} is not a file that torch.save writes for a model') from error
  except Exception as error:  # A malformed pickle can raise any exception.
    text = ascii(str(error).partition('\n')[0])[1:-1]
    raise UserError(
      f'{path} is not a file that torch.save writes for a model ({text:.160})'
    ) from error
  if not isinstance(named, dict):
    raise UserError(f'{path} holds a {type(named).__name__}, not tensors by name')
  for name, tensor in named.items():
    if not isinstance(tensor, torch.Tensor):
      raise UserError(
        f'{path} has {str(name)!r:.80}, which is not a tensor; name a file of weights alone'
      )
  return named


def to_numpy(tensor: 'torch.Tensor') -> np.ndarray:
  """Return the numbers of a tensor; NumPy has bfloat16 from ml_dtypes."""
  tensor = tensor.detach().contiguous()
  if str(tensor.dtype) == 'torch.bfloat16':
    import torch  # noqa: PLC0415

    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
  return tensor.numpy()


def _check_archive(path: Path) -> None:
  """Check that the records of the zip archive are stored as they are, and fit into the file."""
  try:
    with zipfile.ZipFile(path) as archive:
      records = archive.infolist()
  except zipfile.BadZipFile as error:
    with path.open('rb') as file:
      cut = file.read(4) == _ZIP
    reason = 'is cut short or damaged; fetch it again' if cut else describe_format(path)
    reason = reason or 'is not a file of PyTorch, or is cut short; it is not named .safetensors'
    raise UserError(f'{path} {reason}') from error
  for record in records:
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
      raise UserError(
        f'{path} is compressed, which torch.save never does; unpack it and name the file inside, '
        'or ask its author for a .safetensors file'
      )
    if record.filename.endswith('.pkl') and record.file_size > _MOST_TABLE_BYTES:
      raise UserError(
        f'{path} describes its tensors in {record.file_size} bytes, more than any model needs; at '
        f'most {_MOST_TABLE_BYTES} are read'
      )
  if sum(record.file_size for record in records) > path.stat().st_size:
    raise UserError(f'{path} is cut short or damaged: its records are larger than the file')


def describe_format(path: Path) -> str:
  """Return the actual format of a file whose name says another one, or an empty string."""
  with path.open('rb') as file:
    start = file.read(16)
  if start[:1] == b'\x80':
    return (
      'has the format of PyTorch before 1.6, a pickle that can run any code when it is loaded; ask '
      'its author for a .safetensors file'
    )
  if start.startswith(b'version https://'):
    return 'is a pointer of Git LFS, not the file itself; fetch the file (git lfs pull)'
  if start.startswith(_ZIP):
    return 'has the content of a file of PyTorch; rename it to .bin'
  if start[8:9] == b'{' and path.suffix != '.safetensors':
    return 'has the content of a safetensors file; rename it to .safetensors'
  return ''
