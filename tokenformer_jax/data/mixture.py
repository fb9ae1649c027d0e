"""Mix several sources: the source and the sample of every row follow from its position.

A mixture has one endless order of samples. Of its first n samples each source has its quota, the
sum of its weights over these samples, up to less than one sample for two sources, and at most half
the number of sources for more. (The arithmetic of `grain.MapDataset.mix` rounds each source up, so
that the last one is up to seven samples behind with twelve sources, rounds weights to a percent of
the smallest, and has no weights over steps.) The samples that a source gives are those of its own
endless order, one after the other.

Nothing is counted sample by sample. Sample j of a source, from 0, is due when its quota reaches
j + ½; all sources' samples follow each other as they are due. Sources that are due at the same time
come in the order of their names. Quotas are integers times one unit, so position 10¹² is exact.
"""

import bisect
import contextlib
import dataclasses
import fractions
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer_jax.config import DataConfig
from tokenformer_jax.config.mixture import Shares, shares, source_configs
from tokenformer_jax.data import order, store, tokenizers
from tokenformer_jax.data.corpus import Corpus, check_apart
from tokenformer_jax.data.order import Position
from tokenformer_jax.data.shards import Store
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.data.tokens import Tokens
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.storage import paths, retry, sealed


@dataclasses.dataclass(frozen=True)
class Quotas:
  """The part of each source in the first samples of an order.

  Attributes:
    shares: the weights over steps.
    batch_size: the samples of a step.
    first_step: the step where the order begins.
  """

  shares: Shares
  batch_size: int
  first_step: int = 0

  def __post_init__(self):
    object.__setattr__(self, '_lines', _Lines.from_shares(self.shares))
    object.__setattr__(self, '_before', self._lines.until(self.first_step))

  def counts(self, samples: int) -> list[int]:
    """Return the samples of each source that are due before a time, given in samples."""
    steps, rows = divmod(samples, self.batch_size)
    now = self.first_step + steps
    unit, lines = self._lines.unit, (self._lines.until(now), self._before, self._lines.at(now))
    quotas = [
      (end - begin) * self.batch_size + rows * weight
      for end, begin, weight in zip(*lines, strict=True)
    ]
    return [(2 * quota + unit) // (2 * unit) for quota in quotas]

  def place(self, position: int) -> tuple[int, int]:
    """Return the number of the source of a position, and the position in that source's order."""
    before, due, earlier = self._around(position)
    source = due[earlier]
    return source, before[source]

  def taken(self, position: int) -> list[int]:
    """Return the number of samples of each source before a position."""
    before, due, earlier = self._around(position)
    return [count + (i in due[:earlier]) for i, count in enumerate(before)]

  def _around(self, position: int) -> tuple[list[int], list[int], int]:
    """Return what stands around a position in the order.

    In one unit of time a source is due at most once. Rounding moves the sum of all counts by at
    most half the number of sources, so the time is near.

    Returns:
      The counts before the time in which it is due, the sources that are due in that time, and the
      number of those that come before it.
    """
    time, before = position, self.counts(position)
    while sum(before) > position:
      time -= 1
      before = self.counts(time)
    while sum(after := self.counts(time + 1)) <= position:
      time, before = time + 1, after
    due = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
    return before, due, position - sum(before)


@dataclasses.dataclass(frozen=True)
class _Lines:
  """Weights over steps, and their sums, as integers times 1 / `unit`.

  Attributes:
    steps: where each line begins; the first one begins at 0, the last one has no end.
    values: the weight of each source where a line begins.
    slopes: the change of each weight in a step.
    sums: the sum of each source's weights over the steps before a line.
  """

  unit: int
  steps: tuple[int, ...]
  values: tuple[tuple[int, ...], ...]
  slopes: tuple[tuple[int, ...], ...]
  sums: tuple[tuple[int, ...], ...]

  @classmethod
  def from_shares(cls, weights: Shares) -> '_Lines':
    """Return the lines between the points of weights."""
    points = list(zip(weights.steps, weights.weights, strict=True))
    if points[0][0] > 0:
      points.insert(0, (0, points[0][1]))
    steps, values = zip(*points, strict=True)
    lengths = [after - before for before, after in itertools.pairwise(steps)]
    slopes = [
      tuple((new - old) / length for old, new in zip(before, after, strict=True))
      for before, after, length in zip(values, values[1:], lengths, strict=False)
    ]
    slopes.append((fractions.Fraction(0),) * len(weights.names))
    numbers = [number for row in (*values, *slopes) for number in row]
    unit = math.lcm(*(number.denominator for number in numbers))

    def whole(row: Sequence[fractions.Fraction]) -> tuple[int, ...]:
      return tuple(int(number * unit) for number in row)

    lines = cls(unit, steps, tuple(map(whole, values)), tuple(map(whole, slopes)), ())
    sums = [(0,) * len(weights.names)]
    for i, length in enumerate(lengths):
      sums.append(lines._after(i, length, sums[-1]))
    return dataclasses.replace(lines, sums=tuple(sums))

  def at(self, step: int) -> tuple[int, ...]:
    """Return the weights of a step."""
    i = bisect.bisect_right(self.steps, step) - 1
    since = step - self.steps[i]
    return tuple(v + since * s for v, s in zip(self.values[i], self.slopes[i], strict=True))

  def until(self, step: int) -> tuple[int, ...]:
    """Return the sum of each source's weights over the steps before one."""
    i = bisect.bisect_right(self.steps, step) - 1
    return self._after(i, step - self.steps[i], self.sums[i])

  def _after(self, i: int, steps: int, sums: Sequence[int]) -> tuple[int, ...]:
    """Return sums of weights, with those of the first steps of a line."""
    triangle = steps * (steps - 1) // 2
    return tuple(
      total + steps * value + triangle * slope
      for total, value, slope in zip(sums, self.values[i], self.slopes[i], strict=True)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  """The open sources of a mixture: see `order.OneSource`.

  Attributes:
    stores: the token store of each source, in the order of `shares.names`.
    parts: the training samples of one of the order, which all have one source.
  """

  stores: dict[str, Store]
  shares: Shares
  config: DataConfig
  seed: int
  parts: int = 1

  def at_stage(self, data: DataConfig) -> 'Mixture':
    return dataclasses.replace(self, config=data, parts=order.parts_at_stage(self.config, data))

  @property
  def tokenizer(self) -> Tokenizer:
    return next(iter(self.stores.values())).tokenizer

  @property
  def chat(self) -> dict[str, Any] | None:
    return next((one.chat for one in self.stores.values() if one.chat), None)

  @property
  def is_fixed(self) -> bool:
    return len(self.shares.steps) == 1

  @property
  def weights(self) -> dict[str, float]:
    return self.shares.last

  @property
  def examples(self) -> int:
    return sum(self._lengths.values())

  @functools.cached_property
  def digest(self) -> str:
    contents = [(name, one.digest) for name, one in self.stores.items()]
    weights = [[str(weight) for weight in row] for row in self.shares.weights]
    identity = json.dumps([contents, self.shares.steps, weights])
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

  @functools.cached_property
  def _lengths(self) -> dict[str, int]:
    """The number of samples of the order in an epoch of each source."""
    length = self.config.sequence_length * self.parts
    return {name: store.window_count(one.train, length) for name, one in self.stores.items()}

  def train_batches(
    self, rows: Sequence[int], first_step: int, last_step: int | None, position: Position
  ) -> Generator[np.ndarray, None, None]:
    steps = _MixedSteps(
      sources=tuple(one.train for one in self.stores.values()),
      batch_size=self.config.batch_size,
      sequence_length=self.config.sequence_length,
      parts=self.parts,
      seed=self.seed,
      quotas=self._quotas(position),
      rows=tuple(rows),
      last_step=order.ENDLESS if last_step is None else last_step,
      position=position,
    )
    return order.read_ahead(steps, first_step, self.config)

  def validation_parts(
    self, rows: Sequence[int], batches: int = 0
  ) -> dict[str, Iterator[np.ndarray]]:
    return {
      name: order.validation_batches(one, self.config, rows, batches)
      for name, one in self.stores.items()
    }

  def bytes_per_token(self, split: str, name: str = '') -> float:
    """Return the bytes of text per token of a source; '': of the mixture, by its last weights."""
    if name:
      return self.stores[name].bytes_per_token(split)
    return sum(w * self.stores[n].bytes_per_token(split) for n, w in self.weights.items())

  def figures(self, step: int, position: Position) -> dict[str, float]:
    """Return the epochs of each source after a step, as figures by their full names."""
    samples = position.batch_start(step, self.config.batch_size)
    seen = self._quotas(position).taken(samples // self.parts)
    return {
      f'data/{name}/epochs': count / length
      for (name, length), count in zip(self._lengths.items(), seen, strict=True)
    }

  def _quotas(self, position: Position) -> Quotas:
    # Only weights over steps depend on the size of a batch. With them it is always the same, and a
    # whole number of samples of the order.
    size = max(1, self.config.batch_size // self.parts)
    first_step = position.step - position.sample // self.parts // size
    return Quotas(self.shares, size, max(0, first_step))

  def describe(self) -> str:
    return ', '.join(
      f'{weight:.3g} {name} ({order.describe_store(self.stores[name])})'
      for name, weight in self.weights.items()
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _MixedSteps:
  """Training batches of a mixture by step, in the form of a random-access source for Grain."""

  sources: tuple[Tokens, ...]
  batch_size: int
  sequence_length: int
  parts: int
  seed: int
  quotas: Quotas
  rows: tuple[int, ...]
  last_step: int
  position: Position

  def __len__(self) -> int:
    return self.last_step

  def __getitem__(self, step: int) -> np.ndarray:
    first = self.position.batch_start(int(step), self.batch_size)
    places = [self._place(first + int(row)) for row in self.rows]
    batch = np.empty((len(places), self.sequence_length + 1), np.int32)
    for number, tokens in enumerate(self.sources):
      rows = [row for row, (source, _) in enumerate(places) if source == number]
      found = order.samples(
        tokens,
        [places[row][1] for row in rows],
        sequence_length=self.sequence_length,
        seed=self.seed,
        parts=self.parts,
      )
      for row, window in zip(rows, found, strict=True):
        batch[row] = window
    return batch

  def _place(self, position: int) -> tuple[int, int]:
    """Return the number of the source of a position, and the position in that source's order."""
    whole, part = divmod(position, self.parts)
    source, its_whole = self.quotas.place(whole)
    return source, its_whole * self.parts + part


def open_mixture(data: DataConfig, seed: int, tokenizer: Tokenizer | None = None) -> Mixture:
  """Open the token stores of all sources; build those that do not exist.

  All sources share a tokenizer: that of a trained model, if one is given, or the one of the config.
  A BPE is trained on the text of all sources in the proportion of their last weights.

  Raises:
    UserError: a source cannot be read, or is too short for one sequence.
  """
  weights = shares(data.mixture)
  _check_apart(data, stored=[name for name, one in data.mixture.items() if one.store])
  if tokenizer is None:
    tokenizer = _stored_tokenizer(data) or _find_tokenizer(data)
  stores = {}
  for name, one in source_configs(data).items():
    with _naming(name):
      stores[name] = made = store.prepare(one, tokenizer)
      order.check_store(made, data)
  return Mixture(stores, weights, data, seed)


def make_stores(data: DataConfig, out: str | None, **options: Any) -> dict[str, Store]:
  """Make the token store of each source: see `store.make`, which takes the options.

  `out` is a folder for all of them, each in a folder of its name; None: where the config has them.
  """
  _check_apart(data)
  named = next((one for one in source_configs(data).values() if one.store), None)
  made = not out and named and paths.exists(store.store_folder(named) / 'meta.json')
  tokenizer, stores = (made and _stored_tokenizer(data)) or _find_tokenizer(data), {}
  for name, one in source_configs(data).items():
    if out is not None:
      one = dataclasses.replace(one, store=f'{out.rstrip("/")}/{name}')
    with _naming(name):
      stores[name] = store.make(one, tokenizer, **options)
  return stores


def store_folders(data: DataConfig) -> dict[str, paths.Path]:
  """Return the folder of the token store of each source, whether the store exists or not.

  Raises:
    UserError: a text cannot be read, or the tokenizer was not trained yet.
  """
  sources = source_configs(data)
  tokenizer = None if all(one.store for one in sources.values()) else _known_tokenizer(data)
  folders = {}
  for name, one in sources.items():
    with _naming(name):
      folders[name] = store.store_folder(one, tokenizer)
  return folders


def _check_apart(data: DataConfig, stored: Collection[str] = ()) -> None:
  """Check that each text of a mixture has one place; that of `stored` sources is not read."""
  found: list[tuple[DataConfig, Corpus | None]] = []
  for name, one in source_configs(data).items():
    with _naming(name):
      found.append((one, None if name in stored else store.open_text(one)))
  retry.retried(lambda: check_apart(found), 'looking for text that two sources of a mixture have')


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
  """Name a source in the messages of errors about it."""
  path = f'config.data.mixture.{name}'
  try:
    yield
  except UserError as error:
    if f'{path}.' in str(error):
      raise
    raise UserError(f'{path}: {error}') from error


def _stored_tokenizer(data: DataConfig) -> Tokenizer | None:
  """Return the BPE of the first store that the config names, or None."""
  if not tokenizers.bpe_size(data.tokenizer):
    return None
  for name, one in source_configs(data).items():
    if one.store:
      with _naming(name):
        return store.prepare(one).tokenizer
  return None


def _find_tokenizer(data: DataConfig) -> Tokenizer:
  """Return the tokenizer of the config; train a BPE that is not in the cache folder."""
  size = tokenizers.bpe_size(data.tokenizer)
  return _trained_bpe(data, size) if size else tokenizers.load(data.tokenizer)


def _known_tokenizer(data: DataConfig) -> Tokenizer:
  if not (size := tokenizers.bpe_size(data.tokenizer)):
    return tokenizers.load(data.tokenizer)
  if found := _stored_tokenizer(data) or _read_bpe(_bpe_file(data, size, _weighted(data))):
    return found
  raise UserError(
    f'the tokenizer {data.tokenizer} of config.data.mixture was not trained yet, so there are no '
    'token stores; a run trains it, and so does `tokenformer prepare`'
  )


def _weighted(data: DataConfig) -> dict[str, Corpus]:
  """Return the text of the sources that have a weight."""
  weights = {name: weight for name, weight in shares(data.mixture).last.items() if weight}
  corpora = {}
  for name, one in source_configs(data).items():
    if name in weights:
      with _naming(name):
        corpora[name] = store.open_text(one)
  return corpora


def _bpe_file(data: DataConfig, size: int, corpora: Mapping[str, Corpus]) -> Path:
  """Return the path of the BPE of a mixture in the cache folder."""
  weights = {name: shares(data.mixture).last[name] for name in corpora}
  parts = [(corpus.fingerprint(), corpus.fraction) for corpus in corpora.values()]
  identity = repr((size, data.text_field, data.deduplicate, parts, weights))
  name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
  return store.cache_folder(data) / 'tokenizers' / f'{name}.json'


def _read_bpe(path: Path) -> Tokenizer | None:
  with contextlib.suppress(OSError, ValueError, LookupError, UserError):
    return tokenizers.from_json(sealed.load(path.read_bytes()))
  return None


def _trained_bpe(data: DataConfig, size: int) -> Tokenizer:
  """Return the BPE of a mixture, from the cache folder, or trained."""
  corpora = _weighted(data)
  path = _bpe_file(data, size, corpora)
  if known := _read_bpe(path):
    return known
  weights = shares(data.mixture).last
  say(f'training the tokenizer {data.tokenizer} on {", ".join(corpora)}')
  made = retry.retried(
    lambda: tokenizers.train_bpe(_in_proportion(corpora, weights), size), 'training the tokenizer'
  )
  with contextlib.suppress(OSError):  # Another start then trains it again.
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f'.{os.getpid()}')
    temporary.write_text(sealed.dump(made.to_json()), 'utf-8')
    temporary.replace(path)
  return made


def _in_proportion(corpora: Mapping[str, Corpus], weights: Mapping[str, float]) -> Iterator[str]:
  """Yield the training text of several sources, each time of the one that is furthest behind."""
  texts = {
    name: (piece.text for piece in corpus.pieces() if piece.split == 'train')
    for name, corpus in corpora.items()
  }
  taken = dict.fromkeys(texts, 0)
  while texts:
    name = min(texts, key=lambda name: taken[name] / weights[name])
    with _naming(name):
      text = next(texts[name], None)
    if text is None:
      del texts[name]
    else:
      taken[name] += len(text.encode())
      yield text
