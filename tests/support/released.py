"""The golden model as the released checkpoints have theirs: names, tensors, files, a tokenizer."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers as hf
from tiny import tiny_model

from tokenformer_jax.convert import tensor_files

# Computed in float32 by the authors' PyTorch layers on random weights; the model is below.
GOLDEN = dict(np.load(Path(__file__).parent.parent / 'golden' / 'tokenformer_lm.npz'))
MODEL = tiny_model(heads=2, tokens={'qkv': 32, 'proj': 32, 'ffn': 128})
WEIGHTS = {
  name.removeprefix('weights/'): array
  for name, array in GOLDEN.items()
  if name.startswith('weights/')
}
OPTIONS = {'heads': 2, 'rotary_fraction': 0.5, 'sequence_length': 32}


def write(path: Path, weights=WEIGHTS, dtype: str = 'float32') -> Path:
  """Writes a file in the format of its suffix."""
  if path.suffix == '.bin':
    return write_pytorch(path, dtype, weights)
  cast = {name: array.astype(tensor_files.DTYPES[dtype]) for name, array in weights.items()}
  safetensors.numpy.save_file(cast, path)
  return path


def write_pytorch(path: Path, dtype: str, weights: dict[str, np.ndarray]) -> Path:
  """Write the weights in a dtype of `tensor_files.DTYPES`; the same array is stored once."""
  torch = pytest.importorskip('torch')
  made = {id(array): torch.tensor(array).to(getattr(torch, dtype)) for array in weights.values()}
  torch.save({name: made[id(array)] for name, array in weights.items()}, path)
  return path


def write_tokenizer(directory: Path, size: int = 64) -> Path:
  """Writes a tokenizer.json of `size` ids, `<|endoftext|>` and single characters."""
  ids = {'<|endoftext|>': 0, **{chr(32 + i): i for i in range(1, size)}}
  tokenizer = hf.Tokenizer(hf.models.BPE(ids, [], unk_token='<|endoftext|>'))
  tokenizer.save(str(directory / 'tokenizer.json'))
  return directory / 'tokenizer.json'
