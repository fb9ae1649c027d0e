"""Read and write the shards of a token store, and its index, `meta.json`.

A store is a folder. Its shard N is an array in the folder `N` (see `tokens`): the tokens for
training, and then those for validation. A split is the tokens of all shards, one after another.
`meta.json` is written last, so a store that has one is complete. It has the tokenizer, a digest of
itself, and for each shard the tokens, bytes and documents of both splits and the size and digest of
each file. A store is in a file system or in a bucket.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer_jax.config import TextConfig
from tokenformer_jax.data import tokenizers
from tokenformer_jax.data.corpus import SPLITS
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.data.tokens import ArraySlice, Tokens
from tokenformer_jax.errors import UserError
from tokenformer_jax.storage import paths, retry, sealed

FORMAT = 4  # of meta.json
LONGEST = 100  # conversations of a shard whose lengths are kept
TEMPORARY = '.tmp-'  # begins the name of a folder inside a store for files that are being written
_OF_STORE = re.compile(rf'meta\.json|\d{{5,}}(\.json)?|{re.escape(TEMPORARY)}.*')


class ChangedError(Exception):
  """A store that is not as it was written; the message says where."""


@dataclasses.dataclass(frozen=True)
class SplitCounts:
  """The tokens of a split in a shard: how many, and a digest of them.

  Of conversations, `bytes` are those of answers, and `answers` is the number of tokens that carry
  loss. Only stores of before count in `divided` conversations with an end of document inside.
  """

  tokens: int = 0
  bytes: int = 0
  documents: int = 0
  whole: str = ''
  answers: int = 0
  divided: int = 0


@dataclasses.dataclass(frozen=True)
class Shard:
  """An entry of the index.

  Attributes:
    name: of the shard's folder.
    splits: the shard's tokens of each split.
    files: the size and the digest of each file of the array; a shard without tokens has none.
    bad: what was wrong with documents that were left out, the first of them.
    bad_documents: how many were left out.
    spelled: how often text spells the end of a document, by the spelling.
    longest: the tokens of its `LONGEST` longest conversations, from the longest on.
    longest_row: the name of the row of the longest one.
  """

  name: str
  splits: dict[str, SplitCounts]
  files: dict[str, tuple[int, str]]
  bad: tuple[str, ...] = ()
  bad_documents: int = 0
  spelled: dict[str, int] = dataclasses.field(default_factory=dict)
  longest: tuple[int, ...] = ()
  longest_row: str = ''

  @property
  def tokens(self) -> int:
    """The tokens of both splits."""
    return sum(split.tokens for split in self.splits.values())

  def is_among(self, sizes: dict[str, int]) -> bool:
    """Return whether the files are among those of a store, which are given with their sizes."""
    return all(sizes.get(f'{self.name}/{file}') == size for file, (size, _) in self.files.items())

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> 'Shard':
    """Return the shard that `dataclasses.asdict` and JSON made of one."""
    splits = {split: SplitCounts(**values['splits'][split]) for split in SPLITS}
    files = {file: (size, digest) for file, (size, digest) in values['files'].items()}
    return cls(**{**values, 'splits': splits, 'files': files, 'bad': tuple(values['bad'])})


def made_from(config: TextConfig) -> dict[str, Any]:
  """Return the keys of `data` that a store depends on, with their values."""
  keys = ['source', 'validation_source', 'text_field', 'validation_fraction', 'deduplicate']
  keys += ['tokenizer', *('packing', 'sequence_length') * config.is_packed]
  keys += ['rows'] * config.has_pairs
  keys += ['document_separator'] * bool(config.document_separator)
  return {key: getattr(config, key) for key in keys}


def token_dtype(size: int, *, marked: bool, bounds: bool = False) -> np.dtype:
  """Return the dtype of a store's files for a number of ids; see `marks` for marked ones."""
  bits = 14 if bounds else 15 if marked else 16
  return np.dtype(np.uint16 if size <= 2**bits else np.uint32)


@dataclasses.dataclass(frozen=True)
class Index:
  """The content of `meta.json`.

  Attributes:
    made_from: the keys of `data` that the content depends on, and their values.
    digest: a hash of all tokens; hosts that train together must agree on it.
    chat: the template of its conversations (`chat_template.Template.to_json`); None: it is of text.
    bounds: whether its files say where documents begin; if not, one id does.
  """

  made_from: dict[str, Any]
  dtype: str
  tokenizer: dict[str, Any]
  shards: tuple[Shard, ...]
  digest: str
  format: int = FORMAT
  chat: dict[str, Any] | None = None
  bounds: bool = False

  @property
  def packed(self) -> bool:
    """Whether the tokens are rows: see `shard_writer.Packer`."""
    return 'packing' in self.made_from

  def total(self, split: str, count: str) -> int:
    """Return a count of a split, such as its tokens: see `SplitCounts`."""
    return sum(getattr(shard.splits[split], count) for shard in self.shards)


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
  """A tokenized corpus. The tokenizer's end of document follows each document.

  In a store of conversations the tokens are marked (see `marks`), and bytes are those of answers.

  Attributes:
    train, validation: the tokens of each split; uint16, or uint32 if the tokenizer has more than
      65536 ids.
  """

  path: paths.Path
  index: Index
  tokenizer: Tokenizer
  train: Tokens
  validation: Tokens

  def __post_init__(self):
    for tokens in (self.train, self.validation):
      tokens.begin_as(self.tokenizer)

  @property
  def digest(self) -> str:
    """A hash of all tokens."""
    return self.index.digest

  @property
  def chat(self) -> dict[str, Any] | None:
    """The template of its conversations, or None."""
    return self.index.chat

  @property
  def divided(self) -> int:
    """The number of conversations with an end of document inside, in a store without bounds."""
    return sum(self.index.total(split, 'divided') for split in SPLITS)

  def bytes_per_token(self, split: str) -> float:
    """Return the UTF-8 bytes of text per token of a split, with ends of documents as tokens.

    Of conversations only answers count.
    """
    return self.index.total(split, 'bytes') / self.index.total(
      split, 'answers' if self.chat else 'tokens'
    )


def read_index(path: paths.Path) -> Index:
  """Read the index of a store.

  Raises:
    FileNotFoundError, or any error of the storage: it cannot be read.
    ChangedError: it is damaged or has another format.
  """
  data = retry.retried(lambda: (path / 'meta.json').read_bytes(), f'reading {path}')
  try:
    if (number := json.loads(data)['format']) != FORMAT:
      raise ChangedError(f'{path} has the format {number!s:.20}, not {FORMAT}')
    meta = sealed.load(data)
    return Index(**{**meta, 'shards': tuple(map(Shard.from_json, meta['shards']))})
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
    raise ChangedError(f'{path}/meta.json is damaged') from error


def open_store(path: paths.Path) -> Store:
  """Open a store whose files are all there. Their content is checked as it is read.

  Raises:
    FileNotFoundError: there is none.
    ChangedError: it has changed since it was written.
    OSError, or any error of a bucket: it cannot be read now, and may be good.
  """
  index = read_index(path)
  _check_files(path, index)
  splits = {}
  for split in SPLITS:
    slices = [
      ArraySlice(path / shard.name, start, shard.splits[split].tokens, shard.tokens)
      for shard in index.shards
      for start in [shard.splits['train'].tokens if split == 'validation' else 0]
      if shard.splits[split].tokens
    ]
    marked, bounds = index.chat is not None, index.bounds
    splits[split] = Tokens(slices, index.dtype, marked=marked, packed=index.packed, bounds=bounds)
  try:
    tokenizer = tokenizers.from_json(index.tokenizer)
  except (UserError, LookupError, TypeError, AttributeError) as error:
    raise ChangedError(f'{path}/meta.json is damaged') from error
  return Store(path, index, tokenizer, **splits)


def _check_files(path: paths.Path, index: Index) -> None:
  sizes = file_sizes(path)
  for shard in index.shards:
    for file, (size, _) in shard.files.items():
      name = f'{shard.name}/{file}'
      if name not in sizes:
        raise ChangedError(f'{path / name} is missing')
      if sizes[name] != size:
        raise ChangedError(f'{path / name} has {sizes[name]:,} bytes, not {size:,}')


def file_sizes(folder: paths.Path) -> dict[str, int]:
  """Return the size of each file below a folder by its path there, by one listing of a bucket."""

  def once() -> dict[str, int]:
    if paths.in_bucket(folder):
      start = len(os.fspath(folder).rstrip('/')) + 1
      return {p[start:]: size for p, size, _ in paths.objects(f'{folder}/**').values()}
    files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}

  return retry.retried(once, f'listing {folder}')


def verify(path: paths.Path, name: str = '') -> int:
  """Compare all files of a store, or of a shard, with their digests; return the store's tokens."""
  try:
    index = read_index(path)
    _check_files(path, index)
    for shard in index.shards:
      for file, (_, digest) in shard.files.items() if name in ('', shard.name) else ():
        if file_digest(path / shard.name / file) != digest:
          raise ChangedError(f'{path / shard.name / file} has changed since it was written')
    return sum(shard.tokens for shard in index.shards)
  except ChangedError as error:
    raise UserError(
      f'{error}; if {path} is a token store, remove it, and the next run builds it again from its '
      'source'
    ) from error
  except FileNotFoundError as error:
    raise UserError(
      f'{path} is not a complete token store: {error.filename or error} is missing; name another '
      'folder, or complete this one by the command that began it'
    ) from error
  except paths.errors(path) as error:
    raise UserError(f'{path} cannot be read ({paths.reason(error)})') from error


def file_digest(path: paths.Path) -> str:
  """Return the digest of a file."""
  data = retry.retried(path.read_bytes, f'reading {path}')
  return hashlib.blake2b(data, digest_size=16).hexdigest()


def foreign(path: paths.Path) -> str:
  """Return the name of something in a folder that does not belong to a token store, or ''."""
  try:
    names = [*paths.listed(path)]
  except FileNotFoundError:
    return ''
  except NotADirectoryError:
    names = [path.name]
  return next((name for name in names if not _OF_STORE.fullmatch(name)), '')


def put_array(temporary: Path, target: paths.Path) -> dict[str, tuple[int, str]]:
  """Move an array into a store; return the size and the digest of each file of it.

  A file that is there is replaced at once, because another process may write the same shard.
  """
  sizes, others = file_sizes(temporary), file_sizes(target)
  files = {name: (size, file_digest(temporary / name)) for name, size in sizes.items()}
  for name in sorted(files):
    if not paths.in_bucket(target):
      (target / name).parent.mkdir(parents=True, exist_ok=True)
    paths.put(temporary / name, target / name)
  for name in others.keys() - files.keys():  # of a build of other text
    (target / name).unlink(missing_ok=True)
  return files


def put_json(folder: paths.Path, name: str, values: dict[str, Any]) -> None:
  """Write a sealed file into a store, where it appears as a whole."""
  with temporary_folder(folder) as temporary:
    paths.create(temporary / name, sealed.dump(values))
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
