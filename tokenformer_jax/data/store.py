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


@dataclasses.dataclass(frozen=True)
class StoreSpec:
  """What determines a token store: the text of a config, and a tokenizer.

  Attributes:
    corpus: the open text of the config.
    tokenizer: None: the BPE of the config, which the build of the store trains on the text.
  """

  config: TextConfig
  corpus: Corpus
  tokenizer: Tokenizer | None

  @functools.cached_property
  def path(self) -> paths.Path:
    """The folder of the store: the one that the config names, or one in the cache."""
    config = self.config
    if config.store:
      return named_store.folder(config)
    identity = (
      _FORMAT,
      self.corpus.fingerprint,
      config.text_field,
      self.tokenizer.document_fingerprint if self.tokenizer else config.tokenizer,
      self.corpus.fraction,
      *self._rows,
    )
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
    name = re.sub(r'[^A-Za-z0-9]+', '-', config.source).strip('-')[:40]
    return cache_folder(config) / 'stores' / f'{name}-{digest}'

  def untrained(self) -> 'StoreSpec':
    """Return the specification before its BPE was trained."""
    return dataclasses.replace(self, tokenizer=None)

  def shard_builds(
    self, path: paths.Path, tokenizer: Tokenizer, *, bounds: bool = True
  ) -> list[ShardBuild]:
    """Return the builds of all shards, with `bounds` where an id does not tell documents apart."""
    config = self.config
    packed = config.is_packed  # One more value means no token.
    chat = self.corpus.template is not None
    bounds &= chat or tokenizer.spells_boundary
    dtype = shards.token_dtype(tokenizer.size + packed, marked=chat, bounds=bounds)
    return [
      ShardBuild(
        path,
        f'{i:05}',
        unit,
        self._key(unit, tokenizer, bounds),
        dtype.name,
        skip_bad=self.corpus.bad is not text.refuse,
        row=(config.sequence_length + 1) * packed,
        pairs=config.has_pairs,
        bounds=bounds,
      )
      for i, unit in enumerate(self.corpus.units)
    ]

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


def specify(
  config: TextConfig, tokenizer: Tokenizer | None = None, corpus: Corpus | None = None
) -> StoreSpec:
  """Return what determines the store of a text; open the corpus and the tokenizer if not given.

  The tokenizer of a trained model replaces `config.tokenizer`.
  """
  corpus = corpus or open_corpus(config)
  return StoreSpec(config, corpus, tokenizer or tokenizers.load_unless_bpe(config.tokenizer))


def prepare(
  config: TextConfig, tokenizer: Tokenizer | None = None, corpus: Corpus | None = None
) -> Store:
  """Open the token store of a corpus; build one in the cache first if it does not exist.

  For the arguments see `specify`. The corpus of a store that the config names is not opened.

  Raises:
    UserError: the text or the tokenizer cannot be read, a split would be empty, the store cannot be
      written, or `config.store` names none of this text and tokenizer.
    TransientError: reading or writing kept failing with errors that may pass.
  """
  if config.store:
    return named_store.open_named(config, tokenizer)
  return _find_or_build(specify(config, tokenizer, corpus or open_text(config)))


def make(
  config: TextConfig,
  tokenizer: Tokenizer | None = None,
  corpus: Corpus | None = None,
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
  spec = specify(config, tokenizer, corpus or open_text(config))
  if skip_bad:
    spec = dataclasses.replace(spec, corpus=dataclasses.replace(spec.corpus, bad=text.ignore))
  return _find_or_build(spec, workers, beam)


def find(config: TextConfig, tokenizer: Tokenizer) -> Store | None:
  """Return the token store of a corpus and tokenizer if it exists, else None.

  Nothing is tried again: a caller has other text where this is not to be read now.
  """
  if config.store:
    return named_store.open_named(config, tokenizer)
  return _find(specify(config, tokenizer))


def store_folder(
  config: TextConfig, tokenizer: Tokenizer | None = None, corpus: Corpus | None = None
) -> paths.Path:
  """Return the folder of a corpus's token store, whether the store exists or not."""
  if config.store:
    return named_store.folder(config)
  return specify(config, tokenizer, corpus).path


def open_text(config: TextConfig) -> Corpus:
  """Open the text of a run as `open_corpus` does, and try again where storage fails for a while."""
  return retry.retried(lambda: open_corpus(config), f'opening {config.source}')


def cache_folder(config: DataConfig) -> Path:
  """Return the folder for token stores and tokenizers."""
  cache = config.cache_dir or Path(
    os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'tokenformer_jax'
  )
  return paths.local(cache).expanduser().absolute()


def _find_or_build(spec: StoreSpec, workers: int = 1, beam: str = '') -> Store:
  """Find or build a store, and say what to do about a disk that is full or cannot be written."""
  remedy = 'set config.data.cache_dir to a'
  if spec.config.store:
    remedy = 'name another --out, a'
  try:
    store = retry.retried(
      lambda: _find(spec) or _build(spec, workers, beam), f'preparing the token store {spec.path}'
    )
    # What else a folder says, such as how texts end, may differ: it does not change a store.
    return dataclasses.replace(store, tokenizer=spec.tokenizer or store.tokenizer)
  except OSError as error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
      raise UserError(
        f'the disk is full, so the token store {spec.path} cannot be written; free some space or '
        f'{remedy} folder on another disk'
      ) from error
    raise UserError(
      f'the token store {spec.path} cannot be written ({error.strerror or error}); {remedy} '
      'writable folder'
    ) from error


def _find(spec: StoreSpec) -> Store | None:
  """Return the store if it exists, else None."""
  if spec.config.store:
    return named_store.find_named(spec.config, spec.tokenizer)
  store = _open_cached(spec.path, spec.config)
  if store is None and spec.tokenizer and tokenizers.bpe_size(spec.config.tokenizer):
    # The run that trained the tokenizer named its store before the tokenizer existed.
    first = _open_cached(spec.untrained().path, spec.config)
    if first is not None and first.tokenizer.fingerprint == spec.tokenizer.fingerprint:
      return first
  return store


def _open_cached(path: paths.Path, config: TextConfig) -> Store | None:
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
  spec = StoreSpec(config, corpus, tokenizer)
  if path not in (spec.path, spec.untrained().path):
    raise UserError(f'{folder} is damaged, and {config.source} has changed since; start again')
  with lock(path, f'the token store {path}'):
    try:
      shards.verify(path, folder.name)
    except UserError:
      say(f'{folder} is damaged; building this shard of the token store again')
      spec.shard_builds(path, tokenizer, bounds=index.bounds)[int(folder.name)].write(tokenizer)
      (path / shard_writer.record_name(folder.name)).unlink()
      shards.verify(path, folder.name)


def _build(spec: StoreSpec, workers: int, beam: str) -> Store:
  """Build the store, or wait for the process that is building it."""
  path = spec.path
  _ = spec.corpus.units  # Text that cannot be read is reported before anything is written.
  path.parent.mkdir(parents=True, exist_ok=True)
  with lock(path, f'the token store {path}') as held:
    if (store := _find(spec)) is not None:
      return store
    if paths.exists(path / 'meta.json'):
      say(f'building the token store {path} again')
      paths.remove(path)
    path.mkdir(exist_ok=True)
    try:
      shards.remove_temporaries(path)
      index = _write(spec, workers, beam)
      held.check()
      _publish(spec, index)
    except BaseException:
      with contextlib.suppress(paths.errors(path)):
        path.rmdir()  # unless it holds shards, from which the next build continues
      raise
  if (store := _find(spec)) is None:
    raise UserError(f'the token store {path} changed while it was opened; run again')
  return store


def _write(spec: StoreSpec, workers: int, beam: str) -> Index:
  """Write the shards that are not there yet, and return the index of all."""
  tokenizer = spec.tokenizer or _train_tokenizer(spec)
  say(f'tokenizing {spec.config.source} into the token store {spec.path}')
  template, builds = spec.corpus.template, spec.shard_builds(spec.path, tokenizer)
  written = _write_shards(builds, tokenizer, workers, beam)
  _say_spelled(spec.config, written)
  wholes = (bytes.fromhex(shard.splits[split].whole) for shard in written for split in SPLITS)
  return Index(
    made_from=shards.made_from(spec.config),
    dtype=builds[0].dtype,
    tokenizer=tokenizer.to_json(),
    shards=tuple(written),
    digest=hashlib.blake2b(b''.join(wholes), digest_size=16).hexdigest(),
    chat=template and template.to_json(),
    bounds=builds[0].bounds,
  )


def _train_tokenizer(spec: StoreSpec) -> Tokenizer:
  say(f'training the tokenizer {spec.config.tokenizer}')
  texts = (piece.text for piece in spec.corpus.pieces() if piece.split == 'train')
  return tokenizers.train_bpe(texts, tokenizers.bpe_size(spec.config.tokenizer) or 0)


def _write_shards(
  builds: list[ShardBuild], tokenizer: Tokenizer, workers: int, beam_flags: str
) -> list[Shard]:
  sizes = shards.file_sizes(builds[0].folder)
  written = {build.name: shard for build in builds if (shard := build.find(sizes))}
  missing = [build for build in builds if build.name not in written]
  if beam_flags:
    new = beam.write_shards(missing, tokenizer, beam_flags)
  elif workers > 1 and len(missing) > 1:
    new = shard_writer.write_in_processes(missing, tokenizer, min(workers, len(missing)))
  else:
    new = (build.write(tokenizer) for build in missing)
  # None: the bar is shown on a terminal only.
  for shard in tqdm.tqdm(new, 'tokenizing', len(builds), initial=len(written), disable=None):
    written[shard.name] = shard
  return [written[build.name] for build in builds]


def _say_spelled(config: TextConfig, written: list[Shard]) -> None:
  """Say how often the text spells the end of a document."""
  counts = sum((collections.Counter(shard.spelled) for shard in written), collections.Counter())
  spelled = [(end, f'{end} {counted(count, "time")}') for end, count in counts.most_common()]
  if spelled:
    say(
      f'{config.source} spells the end of a document ({", ".join(s for _, s in spelled)}), which '
      'is read as text; to part documents there, set '
      f"config.data.document_separator='{spelled[0][0]}'"
    )


def _publish(spec: StoreSpec, index: Index) -> None:
  """Write the index, which makes the store complete. Delete the store if a split is empty."""
  try:
    _check_splits(spec.config, index)
  except UserError:
    paths.remove(spec.path)
    raise
  shards.put_json(spec.path, 'meta.json', dataclasses.asdict(index))
  for shard in index.shards:
    with contextlib.suppress(Exception):  # Nothing reads the record of a complete store.
      (spec.path / shard_writer.record_name(shard.name)).unlink()


def _check_splits(config: TextConfig, index: Index) -> None:
  """Check that both splits have a document."""
  documents = {split: index.total(split, 'documents') for split in SPLITS}
  for split in (split for split in SPLITS if not documents[split]):
    other, total = config.validation_source, sum(documents.values())
    key = 'validation_source' if other and split == 'validation' else 'source'
    named = f'{config.setting(key)} is {getattr(config, key)}'
    if other or not total:
      raise UserError(f'{named}, which holds no text; name another source')
    raise UserError(
      f'{named}, of which the {split} split is empty, because splits take whole documents and it '
      f'has {counted(total, "document")}; add documents (a text file is one, a line of a .jsonl '
      'file is one), change config.data.validation_fraction from '
      f'{config.validation_fraction}, or name another text in '
      f'{config.setting("validation_source")}'
    )


def lock(path: paths.Path, subject: str) -> contextlib.AbstractContextManager[claim.Claim]:
  """Claim the building of something at a path; wait for the process that builds it."""
  advice = 'set config.data.cache_dir to a writable folder'
  return claim.hold(claim.directory_for(path), subject, advice, doing='being built', waits=True)
