"""Find the token store of a corpus, or build it.

A store in the cache has a name with a hash of everything that determines its content, so runs reuse
a matching store and never change it. Its shards are written one by one, each with a record of what
it holds, and `meta.json` last: see data/shards.py. A build that was interrupted continues after the
last record; shards are the same bytes whoever writes them. `_BATCH_CHARACTERS` and the longest
document bound the memory; a source of one text file is read in pieces.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import numpy as np
import tqdm

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import shards, text, tokenizers
from tokenformer_jax.data.corpus import SPLITS, Corpus, Piece, Unit, open_corpus
from tokenformer_jax.data.shards import ChangedError, Index, Shard, Store
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.runs import lease
from tokenformer_jax.storage import paths, retry

_FORMAT = 1  # version of the tokenization
_TEMPORARY = '.tmp-'  # begins the name of a folder inside a store for files that are being written
_BATCH_CHARACTERS = 4 * 2**20  # characters of the documents that are encoded together
_T = TypeVar('_T')


def window_count(tokens: np.ndarray | shards.Tokens, sequence_length: int) -> int:
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


def _open(path: paths.Path) -> Store | None:
  """Return the store in a folder, or None if it does not exist or has changed since it was written.

  Raises:
    OSError: the folder cannot be read now; the store may be good.
  """
  try:
    return shards.open_store(path)
  except ChangedError as error:
    say(str(error))
    return None
  except OSError as error:
    if retry.is_transient(error):
      raise
    return None


def store_folder(config: DataConfig) -> Path:
  """Return the folder of a corpus's token store, whether the store exists or not.

  Raises:
    UserError: the text or the tokenizer cannot be read.
  """
  return _Builder(config, open_corpus(config), progress=False).path


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
      if paths.exists(self.path / 'meta.json'):
        say(f'the token store {self.path} is damaged; building it again')
        paths.remove(self.path)
      leftovers = _Leftovers(self.path)
      self.path.mkdir(exist_ok=True)
      try:
        _remove_temporaries(self.path)
        index = self._write()
        check_lease()
        self._publish(index)
      except BaseException:
        with contextlib.suppress(OSError):
          self.path.rmdir()  # unless it holds shards, from which the next build continues
        raise
      leftovers.remove()
    store = _open(self.path)
    if store is None:
      raise UserError(f'the token store {self.path} changed while it was opened; run again')
    return store

  def _write(self) -> Index:
    """Write the shards that are not there yet, and return the index of all."""
    tokenizer = self.tokenizer or self._train_tokenizer()
    say(f'tokenizing {self.config.source} into the token store {self.path}')
    dtype = np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)
    jobs = [
      _Job(self.path, f'{i:05}', unit, self._key(unit, tokenizer), dtype.name)
      for i, unit in enumerate(self.corpus.units())
    ]
    written = self._write_shards(jobs, tokenizer)
    wholes = [bytes.fromhex(shard.splits[split].whole) for shard in written for split in SPLITS]
    return Index(
      source=self.config.source,
      dtype=dtype.name,
      tokenizer=tokenizer.to_json(),
      shards=tuple(written),
      digest=shards.combine(wholes),
    )

  def _publish(self, index: Index) -> None:
    """Complete the store with its index; a store that lacks a split is removed."""
    try:
      self._check(index)
    except UserError:
      paths.remove(self.path)
      raise
    _put_json(self.path, 'meta.json', dataclasses.asdict(index))
    for shard in index.shards:
      with contextlib.suppress(Exception):  # Nothing reads the record of a complete store.
        (self.path / _record_name(shard.name)).unlink()

  def _key(self, unit: Unit, tokenizer: Tokenizer) -> str:
    """Return a hash of everything that determines a shard."""
    return text.digest((_FORMAT, unit.fingerprint(), self.config.text_field, tokenizer.fingerprint))

  def _write_shards(self, jobs: list['_Job'], tokenizer: Tokenizer) -> list[Shard]:
    """Write the shards that are not there yet, and return all."""
    found = paths.sizes(self.path)
    no_bar = None if self.progress else True  # None: tqdm shows the bar only on a terminal.
    written = []
    with tqdm.tqdm(desc='tokenizing', unit='B', unit_scale=True, disable=no_bar) as bar:
      for job in jobs:
        written.append(job.find(found) or job.write(tokenizer, bar.update))
        documents = sum(part.documents for s in written for part in s.splits.values())
        bar.set_postfix(documents=documents, refresh=False)
    return written

  def _train_tokenizer(self) -> Tokenizer:
    say(f'training the tokenizer {self.config.tokenizer}')
    texts = (piece.text for piece in self.corpus.pieces() if piece.split == 'train')
    return tokenizers.train_bpe(texts, self.bpe_size)

  def _check(self, index: Index) -> None:
    """Check that both splits have a document; report one outside the split of its hash."""
    documents = {split: index.total(split, 'documents') for split in SPLITS}
    if not sum(documents.values()):
      raise UserError(
        f'config.data.source is {self.config.source}, which holds no text; name another source'
      )
    for split in SPLITS:
      if documents[split]:
        continue
      if other := self.config.validation_source:
        name = {'train': 'source', 'validation': 'validation_source'}[split]
        spec = {'train': self.config.source, 'validation': other}[split]
        raise UserError(f'config.data.{name} is {spec}, which holds no text; name another source')
      total = counted(sum(documents.values()), 'document')
      raise UserError(
        f'the {split} split of {self.config.source} is empty, because splits take whole documents '
        f'and the source has {total}; add documents (a text file is one, a line of a .jsonl file '
        'is one), change config.data.validation_fraction from '
        f'{self.config.validation_fraction}, or name another text in config.data.validation_source'
      )
    if exception := self.corpus.exception():
      train, held_out = (documents[split] for split in SPLITS)
      say(f'{exception} ({counted(train, "document")} to train on, {held_out} held out)')


@dataclasses.dataclass(frozen=True)
class _Job:
  """The writing of one shard: its unit of text, and a hash of everything that determines it."""

  folder: paths.Path
  name: str
  unit: Unit
  key: str
  dtype: str

  def find(self, found: dict[str, int]) -> Shard | None:
    """Return the shard if an earlier build wrote it; `found` has the sizes of the store's files."""
    name = _record_name(self.name)
    if name not in found:
      return None
    try:
      record = json.loads((self.folder / name).read_text('utf-8'))
      shard = Shard.from_json(record['shard'])
      whole = all(
        found.get(shard.file(split)) == part.tokens * np.dtype(self.dtype).itemsize
        for split, part in shard.splits.items()
        if part.tokens
      )
      return shard if record['key'] == self.key and whole else None
    except (ValueError, LookupError, TypeError, AttributeError):
      return None  # A power cut can leave a file without content.

  def write(self, tokenizer: Tokenizer, update: Callable[[int], Any]) -> Shard:
    """Write the shard and its record; `update` is called with the bytes of each batch."""
    with _temporary_folder(self.folder) as temporary, contextlib.ExitStack() as stack:
      writers = {}
      for split in SPLITS:
        file = stack.enter_context(open(temporary / split, 'wb'))
        writers[split] = _PartWriter(file, np.dtype(self.dtype), tokenizer)
      for pieces in _read_ahead(_batches(self.unit.pieces())):
        encoded = tokenizer.encode_batch([piece.text for piece in pieces])
        before = sum(writer.bytes for writer in writers.values())
        for piece, ids in zip(pieces, encoded, strict=True):
          writers[piece.split].add(piece, ids)
        update(sum(writer.bytes for writer in writers.values()) - before)
      for writer in writers.values():
        writer.flush()
      shard = Shard(self.name, {split: writer.part() for split, writer in writers.items()})
      for split, part in shard.splits.items():
        if part.tokens:
          paths.put(temporary / split, self.folder / shard.file(split))
    record = {'key': self.key, 'shard': dataclasses.asdict(shard)}
    _put_json(self.folder, _record_name(self.name), record)
    return shard


class _PartWriter:
  """Writer of the tokens of a split in a shard, which also counts documents, bytes and tokens."""

  def __init__(self, file: BinaryIO, dtype: np.dtype, tokenizer: Tokenizer):
    self.tokens = self.bytes = self.documents = 0
    self._digests = shards.Digests()
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
    self._digests.update(data)
    self.tokens += len(ids)
    self.bytes += len(piece.text.encode())
    self.documents += piece.ends

  def part(self) -> shards.Part:
    """Return the counts and digests of what was written."""
    return shards.Part(
      self.tokens,
      self.bytes,
      self.documents,
      self._digests.whole().hex(),
      tuple(self._digests.blocks()),
    )

  def flush(self) -> None:
    """Wait until the file is on disk, so that a power cut leaves no renamed file of zeros."""
    _flush(self._file)


def _record_name(shard: str) -> str:
  """Return the name of the file that is written when a shard is complete."""
  return f'{shard}.json'


def _flush(file: IO[Any]) -> None:
  file.flush()
  os.fsync(file.fileno())


def _put_json(folder: paths.Path, name: str, value: Any) -> None:
  """Write a file of JSON values into a store, where it appears as a whole."""
  with _temporary_folder(folder) as temporary:
    with open(temporary / name, 'w', encoding='utf-8') as file:
      json.dump(value, file)
      _flush(file)
    paths.put(temporary / name, folder / name)


@contextlib.contextmanager
def _temporary_folder(store: paths.Path) -> Iterator[Path]:
  """Make a folder for files that will be moved into a store: in it, unless it is in a bucket."""
  where = None if paths.in_bucket(store) else store
  with tempfile.TemporaryDirectory(
    prefix=_TEMPORARY, dir=where, ignore_cleanup_errors=True
  ) as name:
    yield Path(name)


def _remove_temporaries(store: paths.Path) -> None:
  """Remove what a killed build left; only the holder of the lease writes here."""
  if not paths.in_bucket(store):
    for temporary in store.glob(f'{_TEMPORARY}*'):
      shutil.rmtree(temporary, ignore_errors=True)


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


def lock(path: Path, subject: str) -> contextlib.AbstractContextManager[Callable[[], None]]:
  """Hold the lease for building something at a path; wait for the process that holds it.

  Yields:
    A function that raises a UserError if another process has taken over the lease.
  """
  advice = 'set config.data.cache_dir to a writable folder'
  return lease.hold(_lease_directory(path), subject, advice, doing='being built', waits=True)


class _Leftovers:
  """Folders of other stores in which dead builds have finished no shard.

  A folder is removed at once if its owner is surely dead. An owner on another machine is watched
  while this process builds its own store, and counts as dead if nothing changed during that time.
  """

  def __init__(self, store: paths.Path):
    self._began = time.monotonic()
    self._watched: dict[Path, Any] = {}
    for folder in store.parent.iterdir():
      if folder == store or not _is_unfinished(folder):
        continue
      if (state := _build_state(folder)) is None:
        shutil.rmtree(folder, ignore_errors=True)
      else:
        self._watched[folder] = state

  def remove(self) -> None:
    """Remove the folders that have not changed, if they were watched for long enough."""
    if time.monotonic() - self._began < lease.Timing().silence:
      return
    for folder, state in self._watched.items():
      if _build_state(folder) == state:
        shutil.rmtree(folder, ignore_errors=True)


def _is_unfinished(folder: Path) -> bool:
  """Return whether a folder is a store without a shard that is complete."""
  if not folder.is_dir() or folder.suffix == '.lease':
    return False
  return not any(folder.glob('*.json'))


def _build_state(folder: Path) -> Any:
  """Return a value that changes while a build runs, or None if its owner is surely dead."""
  try:
    owner = lease.state(_lease_directory(folder))
    if owner is None and _lease_directory(folder).exists():
      return None
    return owner, sorted((str(file), file.stat().st_size) for file in folder.rglob('*'))
  except OSError as error:
    return str(error)


def _lease_directory(store: paths.Path) -> paths.Path:
  return store.with_name(f'{store.name}.lease')
