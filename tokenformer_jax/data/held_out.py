"""Text that a model was not trained on, to look at models with."""

from collections.abc import Iterable

import numpy as np

from tokenformer_jax.config import DataConfig
from tokenformer_jax.data import store, text, tokenizers
from tokenformer_jax.errors import UserError


def held_out_tokens(
  data: DataConfig, tokenizer: tokenizers.Tokenizer, needed: int
) -> tuple[np.ndarray, str]:
  """Tokens that a run was not trained on, if its text is here, and a name for the text.

  Args:
    data: of the run. Its token store is used if there is one on this machine.
    tokenizer: of the run.
    needed: how many tokens.

  Returns:
    int32 [at most `needed`], and the name.
  """
  try:
    existing = store.find(data, tokenizer)
  except UserError:  # The text itself is not here.
    existing = None
  if existing is not None:
    return np.asarray(existing.validation[:needed], np.int32), 'held-out text of the run'
  documents = text.open_source('stdlib', '').documents()
  return first_tokens(documents, tokenizer, needed), 'text of the Python standard library'


def first_tokens(
  documents: Iterable[str], tokenizer: tokenizers.Tokenizer, needed: int
) -> np.ndarray:
  """The first tokens of documents, int32 [at most `needed`]; what comes later is not read."""
  pieces, count = [np.zeros(0, np.int32)], 0
  for document in documents:
    pieces.append(np.append(tokenizer.encode(document), np.int32(tokenizer.end_of_document)))
    count += len(pieces[-1])
    if count >= needed:
      break
  return np.concatenate(pieces)[:needed]
