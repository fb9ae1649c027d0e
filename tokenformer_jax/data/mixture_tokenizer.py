"""Find the tokenizer that all sources of a mixture share, or train it on their text."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.mixture import MixedConfig, shares
from tokenformer_jax.data import named_store, store, tokenizers
from tokenformer_jax.data.corpus import Corpus
from tokenformer_jax.data.tokenizers import Tokenizer
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel.messages import say
from tokenformer_jax.storage import paths, retry, sealed


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


def find(
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
