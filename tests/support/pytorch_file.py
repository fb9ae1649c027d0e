"""Write files by `torch.save`."""

from pathlib import Path

import numpy as np
import pytest


def write(path: Path, dtype: str, weights: dict[str, np.ndarray]) -> Path:
  """Write the weights in a dtype of `tensor_files.DTYPES`; the same array is stored once."""
  torch = pytest.importorskip('torch')
  made = {id(array): torch.tensor(array).to(getattr(torch, dtype)) for array in weights.values()}
  torch.save({name: made[id(array)] for name, array in weights.items()}, path)
  return path
