"""Build and open token stores: a corpus, tokenized once, in two files that are mapped into memory.

A store is a folder with `train.tokens`, `validation.tokens` and `meta.json`. Its name contains a
hash of everything that determines its content, so runs reuse a matching store and never change it.
A store is written to a temporary folder and renamed at the end, so an existing store is complete.
`_BATCH_CHARACTERS` and the longest document bound the memory; a source of one text file is read in
pieces.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import tqdm

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import blocks, tokenizers
from tokenformer_jax.data.corpus import SPLITS, Corpus, Piece, open_corpus
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.runs import lease
from tokenformer_jax.storage import paths, retry

_FORMAT = 1  # version of the folder layout and of the tokenization
_TEMPORARY = '.tmp-'  # marks the name of a folder that is being written
_BATCH_CHARACTERS = 4 * 2**20  # characters of the documents that are encoded together
_CHECK_SECONDS = 0.2  # how long opening a store compares blocks with their digests
_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
  """A tokenized corpus. The tokenizer's end of document follows each document.

  Attributes:
    train, validation: the tokens of each split, mapped read-only; uint16, or uint32 if the
      tokenizer has more than 65536 ids.
    train_bytes, validation_bytes: the UTF-8 bytes of the documents.
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
    """Return the UTF-8 bytes of text per token of a split, with ends of documents as tokens."""
    return getattr(self, f'{split}_bytes') / len(getattr(self, split))


def window_count(tokens: np.ndarray, sequence_length: int) -> int:
  """Return the number of sequences of tokens; a sequence needs one more token for its targets."""
  return max(0, (len(tokens) - 1) // sequence_length)


def prepare(
  config: DataConfig, tokenizer: Tokenizer | None = None, *, progress: bool = True
) -> Store:
  """Open the token store of a corpus; build it first if it does not exist.

  The tokenizer of a trained model replaces `config.tokenizer`. `progress` shows a progress bar if
  standard error is a terminal.

  Raises:
    UserError: the text or the tokenizer cannot be read, a split would be empty, or the store cannot
      be written.
    TransientError: reading or writing kept failing with errors that may pass.
  """
  corpus = retry.retried(lambda: open_corpus(config), f'opening {config.source}')
  builder = _Builder(config, corpus, progress, tokenizer)
  try:
    return retry.retried(
      lambda: builder.find() or builder.build(), f'preparing the token store {builder.path}'
    )
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      raise UserError(
        f'the disk is full, so the token store {builder.path} cannot be written; free some space '
        'or set config.data.cache_dir to a folder on another disk'
      ) from error
    raise UserError(
      f'the token store {builder.path} cannot be written ({error.strerror or error}); set '
      'config.data.cache_dir to a writable folder'
    ) from error


def cache_folder(config: DataConfig) -> Path:
  """Return the folder for token stores and prepared datasets."""
  cache = config.cache_dir or Path(
    os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'tokenformer_jax'
  )
  return paths.local(cache).expanduser().absolute()


def find(config: DataConfig, tokenizer: Tokenizer) -> Store | None:
  """Return the token store of a corpus and tokenizer if it exists, else None.

  Raises:
    UserError: the text cannot be read.
  """
  return _Builder(config, open_corpus(config), progress=False, tokenizer=tokenizer).find()


def _open(path: Path) -> Store | None:
  """Return the store in a folder, or None if it does not exist or has changed since it was written.

  Raises:
    OSError: the folder cannot be read now; the store may be good.
  """
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
    files = {path / f'{split}.tokens': digests for split, digests in meta['blocks'].items()}
    if changed := blocks.find_changed(files, _CHECK_SECONDS):
      say(f'{changed} has changed since it was written')
      return None
    tokenizer = tokenizers.from_json(meta['tokenizer'])
    return Store(path=path, tokenizer=tokenizer, digest=meta['digest'], **fields)
  except OSError as error:
    if retry.is_transient(error):
      raise
    return None
  except (ValueError, LookupError, TypeError, UserError):
    return None


def store_folder(config: DataConfig) -> Path:
  """Return the folder of a corpus's token store, whether the store exists or not.

  Raises:
    UserError: the text or the tokenizer cannot be read.
  """
  return _Builder(config, open_corpus(config), progress=False).path


def verify(path: Path) -> int:
  """Compare a whole store with its digests, and return the number of tokens.

  Raises:
    UserError: there is no store, it has another format, or it has changed since it was written.
  """
  repair = 'remove that folder, and the next run builds the store again from its source'
  try:
    meta = json.loads((path / 'meta.json').read_text('utf-8'))
    if meta['format'] != _FORMAT:
      raise UserError(f'{path} has the format {meta["format"]!s:.20}, not {_FORMAT}; {repair}')
    splits = []
    for split, recorded in meta['blocks'].items():
      file = path / f'{split}.tokens'
      splits.append(blocks.digest_file(file))
      for i, pair in enumerate(itertools.zip_longest(splits[-1].blocks(), recorded)):
        if len(set(pair)) > 1:
          raise UserError(f'{blocks.describe(file, i)} has changed since it was written; {repair}')
    if _digest(splits) != meta['digest']:
      raise ValueError('the blocks are not those of the digest')
    return sum(counts['tokens'] for counts in meta['splits'].values())
  except FileNotFoundError as error:
    raise UserError(
      f'{path} is not a complete token store: {error.filename} is missing; {repair}'
    ) from error
  except OSError as error:
    raise UserError(f'{path} cannot be read ({paths.reason(error)})') from error
  except (ValueError, LookupError, TypeError, AttributeError) as error:
    raise UserError(f'{path}/meta.json is damaged; {repair}') from error


def _digest(splits: Sequence[blocks.Digests]) -> str:
  """Return the digest of all tokens of a store."""
  digest = hashlib.blake2b(digest_size=16)
  for split in splits:
    digest.update(split.whole())
  return digest.hexdigest()


class _Builder:
  """Builder of the store for a corpus and, if one is given, a tokenizer."""

  def __init__(
    self, config: DataConfig, corpus: Corpus, progress: bool, tokenizer: Tokenizer | None = None
  ):
    self.config = config
    self.corpus = corpus
    self.progress = progress
    self.bpe_size = tokenizers.bpe_size(config.tokenizer)
    if tokenizer is None and not self.bpe_size:
      tokenizer = tokenizers.load(config.tokenizer)
    self.tokenizer = tokenizer  # None: the build trains one.
    self.path = self._path(tokenizer)

  def find(self) -> Store | None:
    """Return the store if it exists, else None."""
    store = _open(self.path)
    if store is None and self.tokenizer and self.bpe_size:
      # The run that trained the tokenizer named its store before the tokenizer existed.
      first = _open(self._path(None))
      if first is not None and first.tokenizer.fingerprint == self.tokenizer.fingerprint:
        return first
    return store

  def _path(self, tokenizer: Tokenizer | None) -> Path:
    config = self.config
    identity = (
      _FORMAT,
      self.corpus.fingerprint(),
      config.text_field,
      tokenizer.fingerprint if tokenizer else config.tokenizer,
      self.corpus.fraction,
    )
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    name = re.sub(r'[^A-Za-z0-9]+', '-', config.source).strip('-')[:40]
    return cache_folder(config) / 'stores' / f'{name}-{digest}'

  def build(self) -> Store:
    """Build the store, or wait for the process that is building it."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with lock(self.path, f'the token store {self.path}') as check_lease:
      if (store := _open(self.path)) is not None:
        return store
      if self.path.exists():
        say(f'the token store {self.path} is damaged; building it again')
      for temporary in self.path.parent.glob(f'{self.path.name}{_TEMPORARY}*'):
        shutil.rmtree(temporary, ignore_errors=True)  # Only the lease's holder writes here.
      leftovers = _Leftovers(self.path.parent)
      temporary = self.path.with_name(f'{self.path.name}{_TEMPORARY}{uuid.uuid4().hex[:8]}')
      temporary.mkdir()
      try:
        self._write(temporary)
        check_lease()
        _publish(temporary, self.path)
      finally:
        shutil.rmtree(temporary, ignore_errors=True)
      leftovers.remove()
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
    if exception := self.corpus.exception():
      train, held_out = (writers[split].documents for split in SPLITS)
      say(f'{exception} ({counted(train, "document")} to train on, {held_out} held out)')
    meta = {
      'format': _FORMAT,
      'source': self.config.source,
      'dtype': dtype.name,
      'digest': _digest([writer.digests for writer in writers.values()]),
      'splits': {split: writer.counts() for split, writer in writers.items()},
      'tokenizer': tokenizer.to_json(),
      'blocks': {split: writer.digests.blocks() for split, writer in writers.items()},
    }
    (folder / 'meta.json').write_text(json.dumps(meta), 'utf-8')

  def _write_documents(self, writers: dict[str, '_SplitWriter'], tokenizer: Tokenizer) -> None:
    no_bar = None if self.progress else True  # None: tqdm shows the bar only on a terminal.
    with tqdm.tqdm(desc='tokenizing', unit='B', unit_scale=True, disable=no_bar) as bar:
      for pieces in _read_ahead(_batches(self.corpus.pieces())):
        encoded = tokenizer.encode_batch([piece.text for piece in pieces])
        for piece, ids in zip(pieces, encoded, strict=True):
          writers[piece.split].add(piece, ids)
        written = writers.values()
        bar.set_postfix(documents=sum(writer.documents for writer in written), refresh=False)
        bar.update(sum(writer.bytes for writer in written) - bar.n)

  def _train_tokenizer(self) -> Tokenizer:
    say(f'training the tokenizer {self.config.tokenizer}')
    texts = (piece.text for piece in self.corpus.pieces() if piece.split == 'train')
    return tokenizers.train_bpe(texts, self.bpe_size)

  def _check(self, writers: dict[str, '_SplitWriter']) -> None:
    """Check that both splits have a document."""
    documents = sum(writer.documents for writer in writers.values())
    if not documents:
      raise UserError(
        f'config.data.source is {self.config.source}, which holds no text; name another source'
      )
    for split, writer in writers.items():
      if writer.documents:
        continue
      if other := self.config.validation_source:
        name = {'train': 'source', 'validation': 'validation_source'}[split]
        spec = {'train': self.config.source, 'validation': other}[split]
        raise UserError(f'config.data.{name} is {spec}, which holds no text; name another source')
      raise UserError(
        f'the {split} split of {self.config.source} is empty, because splits take whole documents '
        f'and the source has {counted(documents, "document")}; add documents (a text file is one, '
        'a line of a .jsonl file is one), change config.data.validation_fraction from '
        f'{self.config.validation_fraction}, or name another text in config.data.validation_source'
      )


class _SplitWriter:
  """Writer of the token file of a split, which also counts documents, bytes and tokens."""

  def __init__(self, file: BinaryIO, dtype: np.dtype, tokenizer: Tokenizer):
    self.digests = blocks.Digests()
    self.tokens = self.bytes = self.documents = 0
    self._file = file
    self._dtype = dtype
    self._tokenizer = tokenizer

  def add(self, piece: Piece, ids: np.ndarray) -> None:
    """Append the ids of a piece and, if the piece ends its document, the end of document."""
    if piece.ends:
      ids = np.append(ids, self._tokenizer.end_of_document)
    if ids.max(initial=0) >= self._tokenizer.size:
      raise UserError(
        f'the tokenizer {self._tokenizer.fingerprint} returned the id {ids.max()}, but its '
        f'vocabulary has {self._tokenizer.size} ids; repair its vocabulary'
      )
    data = ids.astype(self._dtype).tobytes()
    self._file.write(data)
    self.digests.update(data)
    self.tokens += len(ids)
    self.bytes += len(piece.text.encode())
    self.documents += piece.ends

  def counts(self) -> dict[str, int]:
    return {'tokens': self.tokens, 'bytes': self.bytes, 'documents': self.documents}

  def flush(self) -> None:
    """Wait until the file is on disk, so that a power cut leaves no renamed folder of zeros."""
    self._file.flush()
    os.fsync(self._file.fileno())


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
  batch, characters = [], 0
  for piece in pieces:
    batch.append(piece)
    characters += len(piece.text)
    if characters >= _BATCH_CHARACTERS:
      yield batch
      batch, characters = [], 0
  if batch:
    yield batch


def _read_ahead(items: Iterator[_T]) -> Iterator[_T]:
  """Yield items, and compute the next item in a thread while the caller works on this one."""
  with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
    future = pool.submit(next, items, None)
    while (item := future.result()) is not None:
      future = pool.submit(next, items, None)
      yield item


def _publish(temporary: Path, path: Path) -> None:
  """Move a finished store to its path. If another process was faster, keep its store."""
  if _open(path) is None:
    shutil.rmtree(path, ignore_errors=True)
  try:
    temporary.rename(path)
  except OSError:
    if _open(path) is None:
      raise


def lock(path: Path, subject: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
  """Hold the lease for building something at a path; wait for the process that holds it.

  Yields:
    A function that raises a UserError if another process has taken over the lease.
  """
  advice = 'set config.data.cache_dir to a writable folder'
  return lease.hold(_lease_directory(path), subject, advice, doing='being built', waits=True)


class _Leftovers:
  """Temporary folders of dead builds of other stores.

  A folder is removed at once if its owner is surely dead. An owner on another machine is watched
  while this process builds its own store, and counts as dead if nothing changed during that time.
  """

  def __init__(self, folder: Path):
    self._began = time.monotonic()
    self._watched: dict[Path, Any] = {}
    for temporary in folder.glob(f'*{_TEMPORARY}*'):
      if (state := _build_state(temporary)) is None:
        shutil.rmtree(temporary, ignore_errors=True)
      else:
        self._watched[temporary] = state

  def remove(self) -> None:
    """Remove the folders that have not changed, if they were watched for long enough."""
    if time.monotonic() - self._began < lease.Timing().silence:
      return
    for temporary, state in self._watched.items():
      if _build_state(temporary) == state:
        shutil.rmtree(temporary, ignore_errors=True)


def _build_state(temporary: Path) -> Any:
  """Return a value that changes while a build runs, or None if its owner is surely dead."""
  store = temporary.with_name(temporary.name.partition(_TEMPORARY)[0])
  try:
    owner = lease.state(_lease_directory(store))
    if owner is None and _lease_directory(store).exists():
      return None
    return owner, sorted((file.name, file.stat().st_size) for file in temporary.iterdir())
  except OSError as error:
    return str(error)


def _lease_directory(store: Path) -> Path:
  return store.with_name(f'{store.name}.lease')
