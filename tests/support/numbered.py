"""Text of numbered documents, and the config of runs that read it a byte a token."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokenformer_jax.config import DataConfig, TextConfig
from tokenformer_jax.data.tokenizers import Tokenizer


def write(path: Path, count: int, kind: str = '') -> str:
  """Write documents that say their number and kind, one a line; return them as a source."""
  what = f'{kind} document'.strip()
  lines = (json.dumps({'text': f'{i} is the number of this {what}'}) for i in range(count))
  path.write_text('\n'.join(lines) + '\n')
  return f'files:{path}'


def config(cache: Path, batch_size: int, sequence_length: int, **changes) -> DataConfig:
  """Return the config of a run whose tokens are bytes; `changes` name its text."""
  return TextConfig(
    tokenizer='bytes',
    batch_size=batch_size,
    sequence_length=sequence_length,
    cache_dir=str(cache),
    **{'validation_fraction': 0.3, **changes},
  )


class Tokens:
  """Tokens of a split that are in memory."""

  packed = False

  def __init__(self, ids: np.ndarray):
    self.ids = ids

  def __len__(self) -> int:
    return len(self.ids)

  def begin_as(self, tokenizer: Tokenizer) -> None:
    """Have no documents."""

  def gather(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    return [self.ids[start:stop] for start, stop in ranges]
