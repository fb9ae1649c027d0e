"""The config of text whose tokens are bytes."""

from pathlib import Path
from typing import Any

from tokenformer_jax.config import TextConfig


def byte_config(folder: Path, source: str = '', /, **changes: Any) -> TextConfig:
  """Return the config of a source, with its store below `folder`."""
  values = {'source': source, 'tokenizer': 'bytes', 'cache_dir': str(folder / 'cache')}
  return TextConfig(**values | changes)
