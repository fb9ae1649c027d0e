"""Find text that a model was not trained on, to compare and inspect models."""

from collections.abc import Iterable

import numpy as np

from tokenformer_jax.config import TextConfig
from tokenformer_jax.config.mixture import shares, source_configs
from tokenformer_jax.data import marks, store, tokenizers
from tokenformer_jax.data.sources import open_source
from tokenformer_jax.errors import TransientError, UserError


def held_out_tokens(
  data: TextConfig, tokenizer: tokenizers.Tokenizer, needed: int
) -> tuple[np.ndarray, str]:
  """Return tokens that a run was not trained on, int32 [at most `needed`], and their text's name.

  The tokens come from the validation split of the run's token store if this machine has the store,
  else from the Python standard library.
  """
  for one in _sources(data):
    try:
      existing = store.find(one, tokenizer)
    except (UserError, TransientError):  # This machine does not have the text.
      existing = None
    if existing is not None:
      ids = np.asarray(existing.validation[:needed], np.int32)
      return marks.plain(ids[ids != marks.NO_TOKEN]), 'held-out text of the run'
  documents = open_source('stdlib', '').documents()
  return first_tokens(documents, tokenizer, needed), 'text of the Python standard library'


def _sources(data: TextConfig) -> list[TextConfig]:
  """Return the config of each source of a run, that with the largest weight in the end first."""
  if not data.mixture:
    return [data]
  configs, weights = source_configs(data), shares(data.mixture).last
  return [configs[name] for name in sorted(configs, key=lambda name: -weights[name])]


def first_tokens(
  documents: Iterable[str], tokenizer: tokenizers.Tokenizer, needed: int
) -> np.ndarray:
  """Return the first tokens of documents, int32 [at most `needed`]; read no further document."""
  pieces, count = [np.zeros(0, np.int32)], 0
  for document in documents:
    pieces.append(marks.plain(tokenizer.document(tokenizer.encode(document))))
    count += len(pieces[-1])
    if count >= needed:
      break
  return np.concatenate(pieces)[:needed]
