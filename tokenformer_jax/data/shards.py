"""Read and write the shards of a token store, and its index, `meta.json`.

A store is a folder. Its shard N has the tokens of a split in `N.SPLIT.tokens`; a split's tokens are
those of all shards, one after another. `meta.json` is written last, so a store that has one is
complete. It has the tokenizer, and for each shard the tokens, bytes and documents of both splits
and the digests of their blocks, by which a change of a part is found without reading all. A store
is in a file system or in a bucket.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.bucket_tokens import BucketTokens
from tokenformer_jax.data.corpus import SPLITS
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.data.tokens import Tokens
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths, retry, sealed

FORMAT = 3  # of meta.json; a file of an earlier one has no digest of itself
BLOCK = 4 * 2**20  # bytes of a block, so 2 TB of tokens have 8 MB of digests
# Keys of `data` that a store depends on.
MADE_FROM = (
  *('source', 'validation_source', 'text_field', 'validation_fraction', 'deduplicate'),
  'tokenizer',
)
_REPAIR = 'remove that folder, and the next run builds the store again from its source'

TEMPORARY = '.tmp-'  # begins the name of a folder inside a store for files that are being written
_OF_STORE = re.compile(
  rf'meta\.json|\d{{5,}}\.json|(\d{{5,}}\.)?(train|validation)\.tokens|{re.escape(TEMPORARY)}.*'
)
_CHECK_SECONDS = 0.2  # how long opening a store compares blocks with their digests


class ChangedError(Exception):
  """A store that is not as it was written; the message says where."""


@dataclasses.dataclass(frozen=True)
class Part:
  """The tokens of a split in a shard: how many, and the digests of all of them and of blocks.

  Of conversations, `bytes` are those of answers, `answers` is the number of tokens that carry loss,
  and `divided` that of conversations with an end of document inside.
  """

  tokens: int = 0
  bytes: int = 0
  documents: int = 0
  whole: str = ''
  digests: tuple[str, ...] = ()
  answers: int = 0
  divided: int = 0


@dataclasses.dataclass(frozen=True)
class Shard:
  """A line of the index: the name of a shard, and its part of each split."""

  name: str
  splits: dict[str, Part]
  bad: tuple[str, ...] = ()  # what was wrong with documents that were left out, the first of them
  bad_documents: int = 0

  def file(self, split: str) -> str:
    """Return the name of the file with the tokens of a split; a part of no tokens has none."""
    return '.'.join(filter(None, (self.name, split, 'tokens')))

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> 'Shard':
    """Return the shard that `dataclasses.asdict` and JSON made of one."""
    splits = {
      split: Part(**{**part, 'digests': tuple(part['digests'])})
      for split, part in values['splits'].items()
    }
    return cls(**{**values, 'splits': splits, 'bad': tuple(values['bad'])})


def token_dtype(size: int, *, marked: bool) -> np.dtype:
  """Return the dtype of a store's files for a number of ids; see `marks` for marked ones."""
  return np.dtype(np.uint16 if size <= 2 ** (15 if marked else 16) else np.uint32)


@dataclasses.dataclass(frozen=True)
class Cache:
  """Room on a disk of this host for tokens from a bucket."""

  folder: Path
  bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
  """A tokenized corpus. The tokenizer's end of document follows each document.

  In a store of conversations the tokens are marked (see `marks`), and bytes are those of answers.

  Attributes:
    train, validation: the tokens of each split; uint16, or uint32 if the tokenizer has more than
      65536 ids.
    train_bytes, validation_bytes: the UTF-8 bytes of the documents.
    digest: a hash of all tokens; hosts that train together must agree on it.
    made_from: the keys of `data` that the content depends on, and their values.
    chat: the template of its conversations (`chat_template.Template.to_json`); None: it is of text.
    train_answers, validation_answers: the tokens of conversations that carry loss.
    divided: the number of conversations with an end of document inside.
  """

  path: paths.Path
  tokenizer: Tokenizer
  train: Tokens
  validation: Tokens
  train_bytes: int
  validation_bytes: int
  train_documents: int
  validation_documents: int
  digest: str
  made_from: dict[str, Any]
  chat: dict[str, Any] | None = None
  train_answers: int = 0
  validation_answers: int = 0
  divided: int = 0

  def bytes_per_token(self, split: str) -> float:
    """Return the UTF-8 bytes of text per token of a split, with ends of documents as tokens.

    Of conversations only answers count.
    """
    tokens = getattr(self, f'{split}_answers') if self.chat else len(getattr(self, split))
    return getattr(self, f'{split}_bytes') / tokens


@dataclasses.dataclass(frozen=True)
class Index:
  """The content of `meta.json`; for `made_from` and `chat` see `Store`. Format 1 has neither."""

  made_from: dict[str, Any]
  dtype: str
  tokenizer: dict[str, Any]
  shards: tuple[Shard, ...]
  digest: str
  format: int = FORMAT
  chat: dict[str, Any] | None = None

  def total(self, split: str, count: str) -> int:
    """Return the tokens, bytes or documents of a split."""
    return sum(getattr(shard.splits[split], count) for shard in self.shards)

  def parts(self) -> Iterator[tuple[str, Part]]:
    """Yield every part that has tokens, with the name of its file."""
    for shard, split in itertools.product(self.shards, SPLITS):
      if shard.splits[split].tokens:
        yield shard.file(split), shard.splits[split]


def read_index(path: paths.Path) -> Index:
  """Read the index of a store. That of format 1 describes one shard, whose name is empty.

  Raises:
    FileNotFoundError, or any error of the storage: it cannot be read.
    ChangedError: it is damaged or has another format.
  """
  data = retry.retried(lambda: (path / 'meta.json').read_bytes(), f'reading {path}')
  try:
    meta = json.loads(data)
    if meta['format'] == 1:
      splits = {
        split: {**counts, 'digests': meta['blocks'][split]}
        for split, counts in meta['splits'].items()
      }
      shard = {'name': '', 'splits': splits, 'bad': ()}
      kept = {key: meta[key] for key in ('dtype', 'tokenizer', 'digest')}
      return Index({}, **kept, shards=(Shard.from_json(shard),))
    if meta['format'] == FORMAT:
      meta = sealed.load(data)
    elif meta['format'] != 2:
      raise ChangedError(f'{path} has the format {meta["format"]!s:.20}, not {FORMAT}')
    index = Index(**{**meta, 'shards': tuple(map(Shard.from_json, meta['shards']))})
    # These raise if the index names a dtype that is none, or lacks a split.
    np.dtype(index.dtype), [shard.splits[split] for shard in index.shards for split in SPLITS]
    return index
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise ChangedError(f'{path}/meta.json is damaged') from error


def open_store(path: paths.Path, cache: Cache | None = None) -> Store:
  """Open a store, and compare some of it with what was recorded when it was written.

  `cache` is for the tokens of a store in a bucket; None: they are not kept.

  Raises:
    FileNotFoundError: there is none.
    ChangedError: it has changed since it was written.
    OSError, or any error of a bucket: it cannot be read now, and may be good.
  """
  index = read_index(path)
  _check_sizes(path, index)
  room = cache.bytes if cache else 0
  marked = index.chat is not None
  fields: dict[str, Any] = {}
  for split in reversed(SPLITS):  # Validation is read again and again, so it has the cache first.
    shards = [shard for shard in index.shards if shard.splits[split].tokens]
    files = {path / shard.file(split): shard.splits[split].digests for shard in shards}
    if changed := find_changed(files, _CHECK_SECONDS / len(SPLITS)):
      raise ChangedError(f'{changed} has changed since it was written')
    counts = [shard.splits[split].tokens for shard in shards]
    arguments = list(map(os.fspath, files)), counts, index.dtype
    if paths.in_bucket(path):
      folder = cache.folder if cache else None
      fields[split] = BucketTokens(*arguments, folder, room, marked=marked)
      room = max(0, room - len(fields[split]) * fields[split].dtype.itemsize)
    else:
      fields[split] = Tokens(*arguments, marked=marked)
    fields[f'{split}_bytes'] = index.total(split, 'bytes')
    fields[f'{split}_documents'] = index.total(split, 'documents')
    fields[f'{split}_answers'] = index.total(split, 'answers')
  try:
    tokenizer = tokenizers.from_json(index.tokenizer)
  except (UserError, LookupError, TypeError, AttributeError) as error:
    raise ChangedError(f'{path}/meta.json is damaged') from error
  return Store(
    path=path,
    tokenizer=tokenizer,
    digest=index.digest,
    made_from=index.made_from,
    chat=index.chat,
    divided=sum(index.total(split, 'divided') for split in SPLITS),
    **fields,
  )


def _check_sizes(path: paths.Path, index: Index) -> None:
  width = np.dtype(index.dtype).itemsize
  found = paths.sizes(path)
  for name, part in index.parts():
    if name not in found:
      raise ChangedError(f'{path / name} is missing')
    if found[name] != part.tokens * width:
      raise ChangedError(
        f'{path / name} has {found[name]:,} bytes, not the {part.tokens * width:,} of its tokens'
      )


def verify(path: paths.Path) -> int:
  """Compare a whole store with its digests, and return the number of tokens.

  Raises:
    UserError: there is no store, it has another format, or it has changed since it was written.
  """
  try:
    index = read_index(path)
    if combine(list(_verified(path, index))) != index.digest:
      raise ChangedError(f'{path}/meta.json is damaged')
    return sum(index.total(split, 'tokens') for split in SPLITS)
  except ChangedError as error:
    raise UserError(f'{error}; {repair(path, _REPAIR)}') from error
  except FileNotFoundError as error:
    raise UserError(
      f'{path} is not a complete token store: {error.filename or error} is missing; name another '
      'folder, or complete this one by the command that began it'
    ) from error
  except paths.errors(path) as error:
    raise UserError(f'{path} cannot be read ({paths.reason(error)})') from error


def foreign(path: paths.Path) -> str:
  """Return the name of something in a folder that does not belong to a token store, or ''."""
  try:
    names = [*paths.listed(path)]
  except FileNotFoundError:
    return ''
  except NotADirectoryError:
    names = [path.name]
  return next((name for name in names if not _OF_STORE.fullmatch(name)), '')


def repair(path: paths.Path, advice: str) -> str:
  """Return the advice to remove a damaged store, or another one if a folder may be no store."""
  if other := foreign(path):
    return f'{other} is there as well, which belongs to no token store; name the folder of a store'
  return advice


def _verified(path: paths.Path, index: Index) -> Iterator[bytes]:
  """Yield the digest of every file of a store, after a comparison of its blocks."""
  _check_sizes(path, index)
  width = np.dtype(index.dtype).itemsize
  for shard, split in itertools.product(index.shards, SPLITS):
    recorded, file = shard.splits[split], path / shard.file(split)
    digests = digest_file(file, recorded.tokens * width)
    for i, pair in enumerate(itertools.zip_longest(digests.blocks(), recorded.digests)):
      if len(set(pair)) > 1:
        raise ChangedError(f'{describe(file, i)} has changed since it was written')
    yield digests.whole()


def combine(wholes: Iterable[bytes]) -> str:
  """Return the digest of a store from those of its files: both splits of a shard after another."""
  return hashlib.blake2b(b''.join(wholes), digest_size=16).hexdigest()


class Digests:
  """The digests of a file and of its blocks, computed while the file is read or written."""

  def __init__(self) -> None:
    self._whole = hashlib.blake2b(digest_size=16)
    self._block, self._filled = _empty(), 0
    self._done: list[str] = []

  def update(self, data: bytes) -> None:
    """Add the next bytes of the file."""
    self._whole.update(data)
    view = memoryview(data)
    while view:
      part = view[: BLOCK - self._filled]
      self._block.update(part)
      self._filled += len(part)
      view = view[len(part) :]
      if self._filled == BLOCK:
        self._done.append(self._block.hexdigest())
        self._block, self._filled = _empty(), 0

  def whole(self) -> bytes:
    """Return the digest of all bytes."""
    return self._whole.digest()

  def blocks(self) -> list[str]:
    """Return the digest of every block. The last block may be shorter."""
    return [*self._done, self._block.hexdigest()] if self._filled else self._done


def digest_file(path: paths.Path, size: int) -> Digests:
  """Return the digests of a file's content of `size` bytes."""
  digests = Digests()
  for start in range(0, size, BLOCK):
    digests.update(_read_block(path, start))
  return digests


def find_changed(files: Mapping[paths.Path, Sequence[str]], seconds: float) -> str | None:
  """Check blocks of files in random order for some seconds, at least one block.

  `files` has the recorded digest of every block of each file. Return a description of the first
  changed block found, or None. The next call checks other blocks.
  """
  until = time.monotonic() + seconds
  names = list(files)
  ends = list(itertools.accumulate(len(files[path]) for path in names))
  total = ends[-1] if ends else 0
  for number in random.sample(range(total), min(total, 1000)):  # far more than the time allows
    path = names[bisect.bisect_right(ends, number)]
    block = number - ends[bisect.bisect_right(ends, number)] + len(files[path])
    if _digest(_read_block(path, block * BLOCK)) != files[path][block]:
      return describe(path, block)
    if time.monotonic() > until:
      break
  return None


def describe(path: paths.Path, block: int) -> str:
  """Return the description of a block for messages."""
  return f'block {block} of {path} ({BLOCK // 2**20} MiB from byte {block * BLOCK:,})'


def _read_block(path: paths.Path, start: int) -> bytes:
  return retry.retried(lambda: paths.read_range(path, start, start + BLOCK), f'reading {path}')


def flush(file: IO[Any]) -> None:
  """Wait until a file is on disk, so that a power cut leaves no renamed file of zeros."""
  file.flush()
  os.fsync(file.fileno())


def put_json(folder: paths.Path, name: str, values: dict[str, Any]) -> None:
  """Write a sealed file into a store, where it appears as a whole."""
  with temporary_folder(folder) as temporary:
    with open(temporary / name, 'w', encoding='utf-8') as file:
      file.write(sealed.dump(values))
      flush(file)
    paths.put(temporary / name, folder / name)


@contextlib.contextmanager
def temporary_folder(store: paths.Path) -> Iterator[Path]:
  """Make a folder for files that will be moved into a store: in it, unless it is in a bucket."""
  where = None if paths.in_bucket(store) else store
  with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=where, ignore_cleanup_errors=True) as name:
    yield Path(name)


def remove_temporaries(store: paths.Path) -> None:
  """Remove what a killed build left; only the owner of the claim writes here."""
  if not paths.in_bucket(store):
    for temporary in store.glob(f'{TEMPORARY}*'):
      shutil.rmtree(temporary, ignore_errors=True)


def _empty() -> 'hashlib.blake2b':
  return hashlib.blake2b(digest_size=8)


def _digest(data: bytes) -> str:
  return hashlib.blake2b(data, digest_size=8).hexdigest()
