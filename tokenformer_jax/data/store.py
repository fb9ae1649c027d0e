"""The token store: a corpus, tokenized once, as two files of tokens that are mapped into memory.

A store is a folder with `train.tokens`, `validation.tokens` and `meta.json`. Its name contains a
hash of everything that its content depends on, so a store is reused as long as it fits and never
changed. It is written to a temporary folder that is renamed at the end: a store that exists is
complete. Memory is bounded by `_BATCH_CHARACTERS` and by the longest document.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import tqdm
from absl import logging

from tokenformer_jax.cli import say
from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.text import Source, open_source
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.paths import local

SPLITS = ('train', 'validation')

_FORMAT = 1  # of the folder, and of the way that tokens are made
_BATCH_CHARACTERS = 4 * 2**20  # of the documents that are encoded together
_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
  """A tokenized corpus. Each document is followed by the tokenizer's end of document.

  Attributes:
    path: the folder.
    tokenizer: what made the tokens.
    train, validation: the tokens of the splits, mapped read-only; uint16, or uint32 if the
      tokenizer has more than 65536 ids.
    train_bytes, validation_bytes: UTF-8 bytes of the documents.
    train_documents, validation_documents: how many there are.
    digest: a hash of all tokens; hosts that train together must agree on it.
  """

  path: Path
  tokenizer: Tokenizer
  train: np.memmap
  validation: np.memmap
  train_bytes: int
  validation_bytes: int
  train_documents: int
  validation_documents: int
  digest: str

  def bytes_per_token(self, split: str) -> float:
    """UTF-8 bytes of text for each token of a split, ends of documents included."""
    return getattr(self, f'{split}_bytes') / len(getattr(self, split))


def window_count(tokens: np.ndarray, sequence_length: int) -> int:
  """How many sequences with their targets, which are one token further, the tokens give."""
  return max(0, (len(tokens) - 1) // sequence_length)


def prepare(config: DataConfig, *, progress: bool = True) -> Store:
  """Opens the token store of a corpus, and builds it first if there is none.

  Args:
    config: where the text comes from, how it is tokenized and split, and where stores are kept.
    progress: whether to show a progress bar, if standard error is a terminal.

  Raises:
    UserError: the text or the tokenizer cannot be read, a split would be empty, or the store cannot
      be written.
  """
  source = open_source(config.source, config.text_field)
  builder = _Builder(config, source, progress)
  if (store := _open(builder.path)) is not None:
    return store
  try:
    return builder.build()
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      raise UserError(
        f'the disk is full, so the token store {builder.path} cannot be written; free some space '
        'or set config.data.cache_dir to a folder on another disk'
      ) from error
    raise UserError(
      f'the token store {builder.path} cannot be written ({error.strerror or error}); set '
      'config.data.cache_dir to a folder that can be'
    ) from error


def cache_folder(config: DataConfig) -> Path:
  """Where what is made once of data is kept."""
  cache = config.cache_dir or Path(
    os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'tokenformer_jax'
  )
  return local(cache).expanduser().absolute()


def find(config: DataConfig) -> Store | None:
  """The token store of a corpus if it is made already, or None.

  Raises:
    UserError: the text or the tokenizer cannot be read.
  """
  source = open_source(config.source, config.text_field)
  return _open(_Builder(config, source, progress=False).path)


def _open(path: Path) -> Store | None:
  """The store in a folder; None if there is none, or if its files are not what they should be."""
  try:
    meta = json.loads((path / 'meta.json').read_text('utf-8'))
    fields: dict[str, Any] = {}
    for split, counts in meta['splits'].items():
      tokens = np.memmap(path / f'{split}.tokens', meta['dtype'], mode='r')
      if len(tokens) != counts['tokens']:
        return None
      fields |= {
        split: tokens,
        f'{split}_bytes': counts['bytes'],
        f'{split}_documents': counts['documents'],
      }
    tokenizer = tokenizers.from_json(meta['tokenizer'])
    return Store(path=path, tokenizer=tokenizer, digest=meta['digest'], **fields)
  except (OSError, ValueError, LookupError, TypeError, UserError):
    return None


def _is_validation(text: str, fraction: float) -> bool:
  """Whether a document belongs to the validation split. Depends on nothing but its text."""
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'little') < fraction * 2**64


class _Builder:
  """Builds the store that belongs to a config."""

  def __init__(self, config: DataConfig, source: Source, progress: bool):
    self.config = config
    self.source = source
    self.progress = progress
    self.bpe_size = tokenizers.bpe_size(config.tokenizer)
    # None: to be trained.
    self.tokenizer = None if self.bpe_size else tokenizers.load(config.tokenizer)
    self.path = self._path()

  def _path(self) -> Path:
    config = self.config
    identity = (
      _FORMAT,
      self.source.fingerprint(),
      config.text_field,
      self.tokenizer.fingerprint if self.tokenizer else config.tokenizer,
      config.validation_fraction,
    )
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    name = re.sub(r'[^A-Za-z0-9]+', '-', config.source).strip('-')[:40]
    return cache_folder(config) / 'stores' / f'{name}-{digest}'

  def build(self) -> Store:
    """Builds the store, or waits for the process that is building it."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(self.path.parent)
    with lock(self.path):
      if (store := _open(self.path)) is not None:
        return store
      if self.path.exists():
        say(f'the token store {self.path} is damaged; it is built again')
      temporary = self.path.with_name(f'{self.path.name}.tmp-{uuid.uuid4().hex[:8]}')
      temporary.mkdir()
      try:
        self._write(temporary)
        _publish(temporary, self.path)
      finally:
        shutil.rmtree(temporary, ignore_errors=True)
    store = _open(self.path)
    if store is None:
      raise UserError(f'the token store {self.path} changed while it was opened; run again')
    return store

  def _write(self, folder: Path) -> None:
    tokenizer = self.tokenizer or self._train_tokenizer()
    say(f'tokenizing {self.config.source} into the token store {self.path}')
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    with contextlib.ExitStack() as stack:
      writers = {}
      for split in SPLITS:
        file = stack.enter_context(open(folder / f'{split}.tokens', 'wb'))
        writers[split] = _SplitWriter(file, dtype, tokenizer)
      self._write_documents(writers, tokenizer)
      for writer in writers.values():
        writer.flush()
    self._check(writers)
    digest = hashlib.blake2b(digest_size=16)
    for writer in writers.values():
      digest.update(writer.digest.digest())
    meta = {
      'format': _FORMAT,
      'source': self.config.source,
      'dtype': dtype.name,
      'digest': digest.hexdigest(),
      'splits': {split: writer.counts() for split, writer in writers.items()},
      'tokenizer': tokenizer.to_json(),
    }
    (folder / 'meta.json').write_text(json.dumps(meta), 'utf-8')

  def _write_documents(self, writers: dict[str, '_SplitWriter'], tokenizer: Tokenizer) -> None:
    no_bar = None if self.progress else True  # None: no bar unless on a terminal
    with tqdm.tqdm(desc='tokenizing', unit='B', unit_scale=True, disable=no_bar) as bar:
      for texts in _read_ahead(_batches(self.source.documents())):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
          writers[self._split(text)].add(text, ids)
        written = writers.values()
        bar.set_postfix(documents=sum(writer.documents for writer in written), refresh=False)
        bar.update(sum(writer.bytes for writer in written) - bar.n)

  def _train_tokenizer(self) -> Tokenizer:
    say(f'training the tokenizer {self.config.tokenizer}')
    texts = (text for text in self.source.documents() if self._split(text) == 'train')
    return tokenizers.train_bpe(texts, self.bpe_size)

  def _split(self, text: str) -> str:
    return SPLITS[_is_validation(text, self.config.validation_fraction)]

  def _check(self, writers: dict[str, '_SplitWriter']) -> None:
    """Raises unless both splits hold a document."""
    documents = sum(writer.documents for writer in writers.values())
    if not documents:
      raise UserError(f'config.data.source is {self.config.source}, which holds no text')
    for split, writer in writers.items():
      if not writer.documents:
        raise UserError(
          f'the {split} split of {self.config.source} is empty, because a split takes whole '
          f'documents and their number is {documents}; give more of them (a text file is one, and '
          'so is a line of a .jsonl file) or change config.data.validation_fraction from '
          f'{self.config.validation_fraction}'
        )


class _SplitWriter:
  """Appends documents to the token file of a split and counts them."""

  def __init__(self, file: BinaryIO, dtype: np.dtype, tokenizer: Tokenizer):
    self.digest = hashlib.blake2b(digest_size=16)
    self.tokens = self.bytes = self.documents = 0
    self._file = file
    self._dtype = dtype
    self._tokenizer = tokenizer

  def add(self, text: str, ids: np.ndarray) -> None:
    """Appends the ids of a text and the end of document."""
    ids = np.append(ids, self._tokenizer.end_of_document)
    if ids.max() >= self._tokenizer.size:
      raise UserError(
        f'the tokenizer {self._tokenizer.fingerprint} gave the id {ids.max()}, but it says that it '
        f'has {self._tokenizer.size} ids; repair its vocabulary'
      )
    data = ids.astype(self._dtype).tobytes()
    self._file.write(data)
    self.digest.update(data)
    self.tokens += len(ids)
    self.bytes += len(text.encode())
    self.documents += 1

  def counts(self) -> dict[str, int]:
    return {'tokens': self.tokens, 'bytes': self.bytes, 'documents': self.documents}

  def flush(self) -> None:
    """Waits until all is on the disk; a power cut must not leave a renamed folder of zeros."""
    self._file.flush()
    os.fsync(self._file.fileno())


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
  batch, characters = [], 0
  for text in texts:
    batch.append(text)
    characters += len(text)
    if characters >= _BATCH_CHARACTERS:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch


def _read_ahead(items: Iterator[_T]) -> Iterator[_T]:
  """Computes the next item in a thread while the caller works on this one."""
  with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
    future = pool.submit(next, items, None)
    while (item := future.result()) is not None:
      future = pool.submit(next, items, None)
      yield item


def _publish(temporary: Path, path: Path) -> None:
  """Moves a finished store to its place. If another process was faster, its store stays."""
  if _open(path) is None:
    shutil.rmtree(path, ignore_errors=True)
  try:
    temporary.rename(path)
  except OSError:
    if _open(path) is None:
      raise


@contextlib.contextmanager
def lock(store: Path) -> Iterator[None]:
  """Lets one process at a time build what is to be at a path. It ends with the process, too."""
  with open(_lock_path(store), 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      say(f'waiting for the process that is building {store}')
      fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # Not needed for a right result, only against repeated work.
      logging.warning('%s cannot be locked (%s)', store, error)
    yield


def _remove_leftovers(folder: Path) -> None:
  """Removes the temporary folders of processes that died."""
  for temporary in folder.glob('*.tmp-*'):
    store = temporary.with_name(temporary.name.partition('.tmp-')[0])
    with contextlib.suppress(OSError), open(_lock_path(store), 'a') as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Raises if the process is alive.
      shutil.rmtree(temporary, ignore_errors=True)


def _lock_path(store: Path) -> Path:
  return store.with_name(f'{store.name}.lock')
