"""Find the tokenizer that all sources of a mixture share, or train it on their text."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.mixture import shares, source_configs
from tokenformer_jax.data import store, tokenizers
from tokenformer_jax.data.corpus import Corpus
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.storage import paths, retry, sealed


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
  """Name a source in the messages of errors about it."""
  path = f'config.data.mixture.{name}'
  try:
    yield
  except UserError as error:
    if f'{path}.' in str(error):
      raise
    raise UserError(f'{path}: {error}') from error


def stored(data: TextConfig) -> Tokenizer | None:
  """Return the BPE of the first store that the config names, or None."""
  if not tokenizers.bpe_size(data.tokenizer):
    return None
  for name, one in source_configs(data).items():
    if one.store:
      with naming(name):
        return store.prepare(one).tokenizer
  return None


def find(data: TextConfig) -> Tokenizer:
  """Return the tokenizer of the config; train a BPE that is not in the cache folder."""
  size = tokenizers.bpe_size(data.tokenizer)
  return _trained_bpe(data, size) if size else tokenizers.load(data.tokenizer)


def _trained_bpe(data: TextConfig, size: int) -> Tokenizer:
  """Return the BPE of the sources that have a weight, from the cache folder, or trained."""
  last, corpora = shares(data.mixture).last, dict[str, Corpus]()
  for name, one in source_configs(data).items():
    if last[name]:
      with naming(name):
        corpora[name] = store.open_text(one)
  weights = {name: last[name] for name in corpora}
  texts = [(corpus.fingerprint(), corpus.fraction) for corpus in corpora.values()]
  separator = [data.document_separator] if data.document_separator else []
  identity = repr((size, data.text_field, data.deduplicate, texts, weights, *separator))
  digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
  path = store.cache_folder(data) / 'tokenizers' / f'{digest}.json'
  with contextlib.suppress(OSError, ValueError, LookupError, UserError):
    return tokenizers.from_json(sealed.load(path.read_bytes()))
  say(f'training the tokenizer {data.tokenizer} on {", ".join(corpora)}')
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
    name: (piece.text for piece in corpus.pieces() if piece.split == 'train')
    for name, corpus in corpora.items()
  }
  taken = dict.fromkeys(texts, 0)
  while texts:
    name = min(texts, key=lambda name: taken[name] / weights[name])
    with naming(name):
      text = next(texts[name], None)
    if text is None:
      del texts[name]
    else:
      taken[name] += len(text.encode())
      yield text
