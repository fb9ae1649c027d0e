"""The config of text whose tokens are bytes, and what its store has."""

from pathlib import Path
from typing import Any

import numpy as np

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data.store import Store


def byte_config(folder: Path, source: str = '', /, **changes: Any) -> TextConfig:
  """Return the config of a source, with its store below `folder`."""
  values = {'source': source, 'tokenizer': 'bytes', 'cache_dir': str(folder / 'cache')}
  return TextConfig(**values | changes)


def documents(store: Store, split: str = 'train') -> list[str]:
  """Return the documents of a split, each of which has an end."""
  ids, end = getattr(store, split)[:], store.tokenizer.end_of_document
  *parts, rest = np.split(ids, np.flatnonzero(ids == end) + 1)
  assert not len(rest), f'the last document of {split} has no end'
  return [store.tokenizer.decode(part[:-1]) for part in parts]


def total(store: Store, count: str) -> int:
  """Return a count of both splits: see `Index.total`."""
  return sum(store.index.total(split, count) for split in ('train', 'validation'))
