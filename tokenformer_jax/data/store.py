"""Find the token store of a corpus, or build it.

A store in the cache has a name with a hash of everything that determines its content, so runs reuse
a matching store and never change it. Its shards are written one by one, each with a record of what
it holds, and `meta.json` last: see data/shards.py. A build that was interrupted continues after the
last record; shards are the same bytes whoever writes them. `shard_writer.BATCH_CHARACTERS` and the
longest document bound the memory; a source of one text file is read in pieces.
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import re
from pathlib import Path

import tqdm

from tokenformer_jax.config import DataConfig, TextConfig
from tokenformer_jax.data import (
  beam,
  named_store,
  processes,
  shard_writer,
  shards,
  text,
  tokenizers,
)
from tokenformer_jax.data.corpus import SPLITS, Corpus, Unit, open_corpus
from tokenformer_jax.data.shard_writer import ShardBuild
from tokenformer_jax.data.shards import ChangedError, Index, Shard, Store
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.runs import claim
from tokenformer_jax.storage import paths, retry

_FORMAT = 3  # version of the tokenization and of the stores in the cache


def prepare(config: TextConfig, tokenizer: Tokenizer | None = None) -> Store:
  """Open the token store of a corpus; build one in the cache first if it does not exist.

  The tokenizer of a trained model replaces `config.tokenizer`.

  Raises:
    UserError: the text or the tokenizer cannot be read, a split would be empty, the store cannot be
      written, or `config.store` names none of this text and tokenizer.
    TransientError: reading or writing kept failing with errors that may pass.
  """
  if config.store:
    return named_store.open_named(config, tokenizer)
  return _build(_Builder(config, open_text(config), tokenizer))


def make(
  config: TextConfig,
  tokenizer: Tokenizer | None = None,
  *,
  workers: int = 1,
  beam: str = '',
  skip_bad: bool = False,
) -> Store:
  """Return the token store of a corpus; build it in `config.store`, or the cache, if it is missing.

  `workers` processes tokenize; the store does not depend on their number. One is this process,
  which tokenizes in threads. `beam` has flags of Apache Beam, whose workers tokenize instead: see
  data/beam.py. With `skip_bad` documents that cannot be read are left out.
  """
  corpus = open_text(config)
  if skip_bad:
    corpus = dataclasses.replace(corpus, bad=text.ignore)
  return _build(_Builder(config, corpus, tokenizer, workers, beam))


def open_text(config: TextConfig) -> Corpus:
  """Open the text of a run as `open_corpus` does, and try again where storage fails for a while."""
  return retry.retried(lambda: open_corpus(config), f'opening {config.source}')


def _build(builder: '_Builder') -> Store:
  """Find or build a store, and say what to do about a disk that is full or cannot be written."""
  remedy = 'set config.data.cache_dir to a'
  if builder.config.store:
    remedy = 'name another --out, a'
  try:
    store = retry.retried(
      lambda: builder.find() or builder.build(), f'preparing the token store {builder.path}'
    )
    # What else a folder says, such as how texts end, may differ: it does not change a store.
    return dataclasses.replace(store, tokenizer=builder.tokenizer or store.tokenizer)
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      raise UserError(
        f'the disk is full, so the token store {builder.path} cannot be written; free some space '
        f'or {remedy} folder on another disk'
      ) from error
    raise UserError(
      f'the token store {builder.path} cannot be written ({error.strerror or error}); {remedy} '
      'writable folder'
    ) from error


def cache_folder(config: DataConfig) -> Path:
  """Return the folder for token stores and tokenizers."""
  cache = config.cache_dir or Path(
    os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'tokenformer_jax'
  )
  return paths.local(cache).expanduser().absolute()


def find(config: TextConfig, tokenizer: Tokenizer) -> Store | None:
  """Return the token store of a corpus and tokenizer if it exists, else None."""
  if config.store:
    return named_store.open_named(config, tokenizer)
  return _Builder(config, open_corpus(config), tokenizer).find()


def _open(path: paths.Path, config: TextConfig) -> Store | None:
  """Return the store in a folder of the cache, which repairs itself while it is read.

  None: it does not exist, has changed since it was written, or cannot tell documents apart.

  Raises:
    OSError: the folder cannot be read now; the store may be good.
  """
  try:
    store = shards.open_store(path)
    if store.divided and config.documents != 'joined':
      raise ChangedError(f'{path} is of an earlier version and has no bounds of conversations')
    for tokens in (store.train, store.validation):
      tokens.repair = functools.partial(_repair, config)
    return store
  except ChangedError as error:
    say(str(error))
    return None
  except OSError as error:
    if retry.is_transient(error):
      raise
    return None


def _repair(config: TextConfig, folder: paths.Path) -> None:
  """Write a damaged shard of a store in the cache again, and check that it is what it was."""
  path, corpus = folder.parent, dataclasses.replace(open_text(config), bad=text.ignore)
  index = shards.read_index(path)
  tokenizer = tokenizers.from_json(index.tokenizer)
  builder = _Builder(config, corpus, tokenizer)
  if path not in (builder.path, builder.path_of(None)):
    raise UserError(f'{folder} is damaged, and {config.source} has changed since; start again')
  builder.path = path
  with lock(path, f'the token store {path}'):
    try:
      shards.verify(path, folder.name)
    except UserError:
      say(f'{folder} is damaged; building this shard of the token store again')
      builder.builds(tokenizer, bounds=index.bounds)[int(folder.name)].write(tokenizer)
      (path / shard_writer.record_name(folder.name)).unlink()
      shards.verify(path, folder.name)


def store_folder(config: TextConfig, tokenizer: Tokenizer | None = None) -> paths.Path:
  """Return the folder of a corpus's token store, whether the store exists or not."""
  if config.store:
    return named_store.folder(config)
  return _Builder(config, open_corpus(config), tokenizer).path


class _Builder:
  """Builder of the store for a corpus and, if one is given, a tokenizer."""

  def __init__(
    self,
    config: TextConfig,
    corpus: Corpus,
    tokenizer: Tokenizer | None = None,
    workers: int = 1,
    beam: str = '',
  ):
    self.config = config
    self.corpus = corpus
    self.workers = workers
    self.beam = beam
    self.bpe_size = tokenizers.bpe_size(config.tokenizer)
    if tokenizer is None and not self.bpe_size:
      tokenizer = tokenizers.load(config.tokenizer)
    self.tokenizer = tokenizer  # None: the build trains one.
    self.path = store_folder(config) if config.store else self.path_of(tokenizer)

  def find(self) -> Store | None:
    """Return the store if it exists, else None."""
    if self.config.store:
      named_store.check_folder(self.path)
      is_there = paths.exists(self.path / 'meta.json')
      return prepare(self.config, self.tokenizer) if is_there else None
    store = _open(self.path, self.config)
    if store is None and self.tokenizer and self.bpe_size:
      # The run that trained the tokenizer named its store before the tokenizer existed.
      first = _open(self.path_of(None), self.config)
      if first is not None and first.tokenizer.fingerprint == self.tokenizer.fingerprint:
        return first
    return store

  def path_of(self, tokenizer: Tokenizer | None) -> Path:
    """Return the folder in the cache of the store for a tokenizer, or for one yet to be trained."""
    config = self.config
    identity = (
      _FORMAT,
      self.corpus.fingerprint(),
      config.text_field,
      tokenizer.document_fingerprint if tokenizer else config.tokenizer,
      self.corpus.fraction,
      *self._rows,
    )
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    name = re.sub(r'[^A-Za-z0-9]+', '-', config.source).strip('-')[:40]
    return cache_folder(config) / 'stores' / f'{name}-{digest}'

  def build(self) -> Store:
    """Build the store, or wait for the process that is building it."""
    _ = self.corpus.units  # Text that cannot be read is reported before anything is written.
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with lock(self.path, f'the token store {self.path}') as held:
      if (store := self.find()) is not None:
        return store
      if paths.exists(self.path / 'meta.json'):
        say(f'building the token store {self.path} again')
        paths.remove(self.path)
      self.path.mkdir(exist_ok=True)
      try:
        shards.remove_temporaries(self.path)
        index = self._write()
        held.check()
        self._publish(index)
      except BaseException:
        with contextlib.suppress(paths.errors(self.path)):
          self.path.rmdir()  # unless it holds shards, from which the next build continues
        raise
    store = _open(self.path, self.config)
    if store is None:
      raise UserError(f'the token store {self.path} changed while it was opened; run again')
    return store

  def _write(self) -> Index:
    """Write the shards that are not there yet, and return the index of all."""
    tokenizer = self.tokenizer or self._train_tokenizer(self.bpe_size or 0)
    say(f'tokenizing {self.config.source} into the token store {self.path}')
    template, builds = self.corpus.template, self.builds(tokenizer)
    written = self._write_shards(builds, tokenizer)
    self._say_spelled(written)
    wholes = (bytes.fromhex(shard.splits[split].whole) for shard in written for split in SPLITS)
    return Index(
      made_from=shards.made_from(self.config),
      dtype=builds[0].dtype,
      tokenizer=tokenizer.to_json(),
      shards=tuple(written),
      digest=hashlib.blake2b(b''.join(wholes), digest_size=16).hexdigest(),
      chat=template and template.to_json(),
      bounds=builds[0].bounds,
    )

  def _say_spelled(self, written: list[Shard]) -> None:
    """Say how often the text spells the end of a document."""
    counts = sum((collections.Counter(shard.spelled) for shard in written), collections.Counter())
    spelled = [(end, f'{end} {counted(count, "time")}') for end, count in counts.most_common()]
    if spelled:
      say(
        f'{self.config.source} spells the end of a document ({", ".join(s for _, s in spelled)}), '
        'which is read as text; to part documents there, set '
        f"config.data.document_separator='{spelled[0][0]}'"
      )

  def builds(self, tokenizer: Tokenizer, *, bounds: bool = True) -> list[ShardBuild]:
    """Return the builds of all shards, with `bounds` where an id does not tell documents apart."""
    packed = self.config.is_packed  # One more value means no token.
    chat = self.corpus.template is not None
    bounds &= chat or tokenizer.spells_boundary
    dtype = shards.token_dtype(tokenizer.size + packed, marked=chat, bounds=bounds)
    how = {
      'dtype': dtype.name,
      'skip_bad': self.corpus.bad is not text.refuse,
      'row': (self.config.sequence_length + 1) * packed,
      'pairs': self.config.has_pairs,
      'bounds': bounds,
    }
    return [
      ShardBuild(self.path, f'{i:05}', unit, self._key(unit, tokenizer, bounds), **how)
      for i, unit in enumerate(self.corpus.units)
    ]

  def _publish(self, index: Index) -> None:
    """Complete the store with its index; a store that lacks a split is removed."""
    try:
      self._check(index)
    except UserError:
      paths.remove(self.path)
      raise
    shards.put_json(self.path, 'meta.json', dataclasses.asdict(index))
    for shard in index.shards:
      with contextlib.suppress(Exception):  # Nothing reads the record of a complete store.
        (self.path / shard_writer.record_name(shard.name)).unlink()

  def _key(self, unit: Unit, tokenizer: Tokenizer, bounds: bool) -> str:
    """Return a hash of everything that determines a shard."""
    fingerprint = tokenizer.document_fingerprint
    identity = (_FORMAT, unit.fingerprint(), self.config.text_field, fingerprint)
    return text.digest((*identity, *self._rows, *('bounds',) * bounds))

  @property
  def _rows(self) -> tuple[int | str, ...]:
    """What makes rows, where it is set: the length of packed sequences, pairs, a separator."""
    config = self.config
    separator = (config.document_separator,) * bool(config.document_separator)
    return (
      (config.sequence_length,) * config.is_packed + (config.rows,) * config.has_pairs + separator
    )

  def _write_shards(self, builds: list[ShardBuild], tokenizer: Tokenizer) -> list[Shard]:
    sizes = shards.file_sizes(self.path)
    written = {build.name: shard for build in builds if (shard := build.find(sizes))}
    missing = [build for build in builds if build.name not in written]
    if self.beam:
      new = beam.write_shards(missing, tokenizer, self.beam)
    elif self.workers > 1 and len(missing) > 1:
      new = processes.write_shards(missing, tokenizer, min(self.workers, len(missing)))
    else:
      new = (build.write(tokenizer) for build in missing)
    # None: the bar is shown on a terminal only.
    for shard in tqdm.tqdm(new, 'tokenizing', len(builds), initial=len(written), disable=None):
      written[shard.name] = shard
    return [written[build.name] for build in builds]

  def _train_tokenizer(self, size: int) -> Tokenizer:
    say(f'training the tokenizer {self.config.tokenizer}')
    texts = (piece.text for piece in self.corpus.pieces() if piece.split == 'train')
    return tokenizers.train_bpe(texts, size)

  def _check(self, index: Index) -> None:
    documents = {split: index.total(split, 'documents') for split in SPLITS}
    for split in (split for split in SPLITS if not documents[split]):
      other, total = self.config.validation_source, sum(documents.values())
      key = 'validation_source' if other and split == 'validation' else 'source'
      named = f'{self.config.setting(key)} is {getattr(self.config, key)}'
      if other or not total:
        raise UserError(f'{named}, which holds no text; name another source')
      raise UserError(
        f'{named}, of which the {split} split is empty, because splits take whole documents and '
        f'it has {counted(total, "document")}; add documents (a text file is one, a line of a '
        '.jsonl file is one), change config.data.validation_fraction from '
        f'{self.config.validation_fraction}, or name another text in '
        f'{self.config.setting("validation_source")}'
      )


def lock(path: paths.Path, subject: str) -> contextlib.AbstractContextManager[claim.Claim]:
  """Claim the building of something at a path; wait for the process that builds it."""
  advice = 'set config.data.cache_dir to a writable folder'
  return claim.hold(claim.directory_for(path), subject, advice, doing='being built', waits=True)
