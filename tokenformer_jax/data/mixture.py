"""Open the text of a run: one source, or several, each with its own store, order and epochs.

`mixture_order` says which source a sample comes from.
"""

import contextlib
import dataclasses
import fractions
import functools
import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.mixture import BLOCK, MixedConfig, Shares, shares, source_configs
from tokenformer_jax.data import named_store, order, store, tokenizers
from tokenformer_jax.data.corpus import Corpus, check_apart
from tokenformer_jax.data.mixture_order import MixtureOrder
from tokenformer_jax.data.order import Position
from tokenformer_jax.data.shards import Store
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.storage import paths, retry, sealed

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  """The open text of a run.

  Attributes:
    stores: the token store of each source, in the order of `shares.names`; the only source of a run
      without a mixture has the name ''.
    subsamples: the training samples of a sample of the order, which all have one source.
  """

  stores: dict[str, Store]
  shares: Shares
  config: TextConfig
  seed: int
  subsamples: int = 1

  def at_stage(self, data: TextConfig) -> 'Mixture':
    """Return the text with batches of the sizes of a stage: see `config.at_stage`."""
    data = data.windows
    subsamples = self.config.sequence_length // data.sequence_length
    return dataclasses.replace(self, config=data, subsamples=subsamples)

  @property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer of all sources."""
    return next(iter(self.stores.values())).tokenizer

  @property
  def chat(self) -> dict[str, Any] | None:
    """The template of conversations, as `Store.chat`."""
    return next((one.chat for one in self.stores.values() if one.chat), None)

  @property
  def examples(self) -> int:
    """The number of samples in an epoch of each source, in all."""
    return sum(self._lengths.values())

  @functools.cached_property
  def digests(self) -> tuple[str, ...]:
    """A hash of the content of all sources, and the one with their weights of earlier versions."""
    if '' in self.stores:
      return (self.stores[''].digest,)
    contents = [(name, one.digest) for name, one in self.stores.items()]
    weights = [[str(fractions.Fraction(n, BLOCK)) for n in row] for row in self.shares.counts]
    identities = contents, [contents, self.shares.steps, weights]
    texts = (json.dumps(identity).encode() for identity in identities)
    return tuple(hashlib.blake2b(text, digest_size=16).hexdigest() for text in texts)

  @functools.cached_property
  def _lengths(self) -> dict[str, int]:
    """The number of samples of the order in an epoch of each source."""
    length = self.config.sequence_length * self.subsamples
    return {name: order.window_count(one.train, length) for name, one in self.stores.items()}

  def train_batches(
    self,
    rows: Sequence[int],
    first_step: int,
    last_step: int = order.ENDLESS,
    position: Position = order.BEGINNING,
  ) -> Generator[np.ndarray, None, None]:
    """Return this host's rows of the training batches `first_step` … `last_step` − 1, read ahead.

    Close the generator to stop the threads or processes that read.
    """
    batches = order.TrainBatches(
      sources=[one.train for one in self.stores.values()],
      rows=rows,
      batch_size=self.config.batch_size,
      sequence_length=self.config.sequence_length,
      seed=self.seed,
      mixture=self._order(position),
      position=position,
      subsamples=self.subsamples,
      bounds=self.config.documents != 'joined',
      last_step=last_step,
    )
    return order.read_ahead(batches, first_step, self.config)

  def validation_parts(
    self, rows: Sequence[int], batches: int = 0
  ) -> dict[str, Iterator[np.ndarray]]:
    """Return the validation batches of each source: see `order.validation_batches`."""
    return {
      name: order.validation_batches(one, self.config, rows, batches)
      for name, one in self.stores.items()
    }

  def bytes_per_token(self, split: str, name: str = '') -> float:
    """Return the UTF-8 bytes of text per token of a source; '': of all, by their last weights."""
    if name:
      return self.stores[name].bytes_per_token(split)
    return sum(w * self.stores[n].bytes_per_token(split) for n, w in self.shares.last.items())

  def figures(self, step: int, position: Position) -> dict[str, float]:
    """Return the epochs of each source after a step, as figures by their full names."""
    if '' in self.stores:
      return {}
    samples = position.batch_start(step, self.config.batch_size)
    seen = self._order(position).taken(samples // self.subsamples)
    return {
      f'data/{name}/epochs': count / length
      for (name, length), count in zip(self._lengths.items(), seen, strict=True)
    }

  def _order(self, position: Position) -> MixtureOrder:
    # Only weights by stages depend on the size of a batch. With them it is always the same, and a
    # whole number of samples of the order.
    size = max(1, self.config.batch_size // self.subsamples)
    first_step = position.step - position.sample // self.subsamples // size
    return MixtureOrder(self.shares, size, max(0, first_step))

  def describe(self) -> str:
    """Return a short description of the training text."""
    length = self.config.sequence_length
    if '' in self.stores:
      return order.describe_store(self.stores[''], length)
    return ', '.join(
      f'{weight:.3g} {name} ({order.describe_store(self.stores[name], length)})'
      for name, weight in self.shares.last.items()
    )


def one_source(made: Store, data: TextConfig, seed: int) -> Mixture:
  """Return the text of a run without a mixture."""
  return Mixture({'': made}, order.ONE_SOURCE.shares, data, seed)


def open_sources(data: TextConfig, seed: int, tokenizer: Tokenizer | None = None) -> Mixture:
  """Open the token store of each source of a run; build those that do not exist.

  All sources share a tokenizer: that of a trained model, if one is given, or the one of the config.
  A BPE is trained on the text of all sources in the proportion of their last weights.
  """
  if not data.mixture:
    made = store.prepare(data, tokenizer)
    order.check_store(made, data)
    return one_source(made, data.windows, seed)
  sources, weights = source_configs(data), shares(data.mixture)
  corpora = _open_corpora(sources)
  tokenizer = tokenizer or _find_tokenizer(data, sources, corpora)

  def open_store(one: MixedConfig) -> Store:
    made = store.prepare(one, tokenizer, corpora.get(one.name))
    order.check_store(made, data)
    return made

  return Mixture(_for_each(sources, open_store), weights, data, seed)


def make_stores(data: TextConfig, out: str | None, **options: Any) -> dict[str, Store]:
  """Make the token store of each source: see `store.make`, which takes the options.

  `out` is a folder for all of them, each in a folder of its name; None: where the config has them.
  """
  sources = source_configs(data)
  corpora = _open_corpora(sources, of_stores=True)
  named = next((one for one in sources.values() if one.store), None)
  is_made = named and not out and paths.exists(named_store.folder(named) / 'meta.json')
  tokenizer = _find_tokenizer(data, sources if is_made else {}, corpora)

  def make_store(one: MixedConfig) -> Store:
    placed = dataclasses.replace(one, store=f'{out.rstrip("/")}/{one.name}') if out else one
    return store.make(placed, tokenizer, corpora[one.name], **options)

  return _for_each(sources, make_store)


def store_folders(data: TextConfig) -> dict[str, paths.Path]:
  """Return the folder of the token store of each source, whether the store exists or not."""
  sources = source_configs(data)
  corpora = _open_corpora(sources)
  tokenizer = _find_tokenizer(data, sources, corpora) if corpora else None
  return _for_each(sources, lambda one: store.store_folder(one, tokenizer, corpora.get(one.name)))


def _open_corpora(
  sources: Mapping[str, MixedConfig], *, of_stores: bool = False
) -> dict[str, Corpus]:
  """Open the text of each source, and check that a mixture names each text once.

  The text of a source that names its store is read `of_stores` only.
  """
  read = {name: one for name, one in sources.items() if of_stores or not one.store}
  corpora = _for_each(read, store.open_text)
  texts = [(one, corpora.get(name)) for name, one in sources.items()]
  retry.retried(lambda: check_apart(texts), 'looking for text that two sources of a mixture have')
  return corpora


def _for_each(
  sources: Mapping[str, MixedConfig], action: Callable[[MixedConfig], _T]
) -> dict[str, _T]:
  """Return what an action returns for each source, which is named in its errors."""
  results = {}
  for name, one in sources.items():
    with errors_name_source(name):
      results[name] = action(one)
  return results


@contextlib.contextmanager
def errors_name_source(name: str) -> Iterator[None]:
  """Name a source of a mixture in UserErrors about it."""
  path = f'config.data.mixture.{name}'
  try:
    yield
  except UserError as error:
    if f'{path}.' in str(error):
      raise
    raise UserError(f'{path}: {error}') from error


def _find_tokenizer(
  data: TextConfig, sources: Mapping[str, MixedConfig], corpora: Mapping[str, Corpus]
) -> Tokenizer:
  """Return the tokenizer of the config.

  A BPE is that of the first store which one of the `sources` names, or the one in the cache folder,
  or it is trained on the `corpora`.
  """
  if tokenizer := tokenizers.load_unless_bpe(data.tokenizer):
    return tokenizer
  for name, one in sources.items():
    if one.store:
      with errors_name_source(name):
        return named_store.open_named(one, None).tokenizer
  return _trained_bpe(data, corpora)


def _trained_bpe(data: TextConfig, corpora: Mapping[str, Corpus]) -> Tokenizer:
  """Return the BPE of the sources that have a weight, from the cache folder, or trained."""
  weights = {name: weight for name, weight in shares(data.mixture).last.items() if weight}
  texts = [(corpora[name].fingerprint, corpora[name].fraction) for name in weights]
  separator = [data.document_separator] if data.document_separator else []
  size = tokenizers.bpe_size(data.tokenizer) or 0
  identity = repr((size, data.text_field, data.deduplicate, texts, weights, *separator))
  digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
  path = store.cache_folder(data) / 'tokenizers' / f'{digest}.json'
  with contextlib.suppress(OSError, ValueError, LookupError, UserError):
    return tokenizers.from_json(sealed.load(path.read_bytes()))
  say(f'training the tokenizer {data.tokenizer} on {", ".join(weights)}')
  made = retry.retried(
    lambda: tokenizers.train_bpe(_in_proportion(corpora, weights), size), 'training the tokenizer'
  )
  with contextlib.suppress(OSError):  # Another start then trains it again.
    path.parent.mkdir(parents=True, exist_ok=True)
    paths.overwrite(path, sealed.dump(made.to_json()))
  return made


def _in_proportion(corpora: Mapping[str, Corpus], weights: Mapping[str, float]) -> Iterator[str]:
  """Yield the training text of several sources, each time of the one that is furthest behind."""
  texts = {
    name: (piece.text for piece in corpora[name].pieces() if piece.split == 'train')
    for name in weights
  }
  taken = dict.fromkeys(texts, 0)
  while texts:
    name = min(texts, key=lambda name: taken[name] / weights[name])
    with errors_name_source(name):
      text = next(texts[name], None)
    if text is None:
      del texts[name]
    else:
      taken[name] += len(text.encode())
      yield text
