"""Check the inputs of `Run.logits`, and make batches of them."""

from typing import Any

import numpy as np

from tokenformer_jax.config import Config, arguments
from tokenformer_jax.data import tokenizers
from tokenformer_jax.decoding import buckets
from tokenformer_jax.decoding.trained import Trained
from tokenformer_jax.errors import UserError
from tokenformer_jax.tasks import Batch


def rows_of_ids(inputs: Any, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> list[np.ndarray]:
  """Return the token ids [T] of each text, or the rows of ids [B, T]."""
  texts = [inputs] if isinstance(inputs, str) else inputs
  if not np.iterable(texts) or not (several := list(texts)):
    raise UserError(
      f'inputs is {arguments.shown(inputs)}: there are no inputs; give a text, several texts, or '
      'token ids [B, T]'
    )
  if all(isinstance(text, str) for text in several):
    return [tokenizer.start(tokenizer.encode(text)).astype(np.int32) for text in several]
  wanted = f'they must be integers [B, T] from 0 to {vocab_size - 1}, or texts'
  ids = _array(inputs, wanted)
  if ids.ndim != 2 or ids.dtype.kind not in 'iu' or not ids.size:
    raise UserError(f'inputs are {ids.dtype} {list(ids.shape)}; {wanted}')
  if ids.min() < 0 or ids.max() >= vocab_size:
    raise UserError(f'inputs are ids from {ids.min()} to {ids.max()}; {wanted}')
  return list(ids.astype(np.int32))


def token_batch(rows: list[np.ndarray], model: Trained) -> np.ndarray:
  """Return rows of token ids [T] as a batch int32 [B, bucket + 1], padded with -1."""
  longest, config = max(map(len, rows)), model.config.model
  length = buckets.bucket(longest)  # Buckets of lengths keep the number of programs small.
  if config.position_embedding == 'learned':
    model.context_length(longest)
    length = min(length, config.max_length)
  # The last column is an unused target. Padding takes no places of experts.
  batch = np.full((len(rows), length + 1), -1, np.int32)
  for row, ids in zip(batch, rows, strict=True):
    row[: len(ids)] = ids
  return batch


def image_batch(inputs: Any, config: Config) -> Batch:
  """Return images uint8 [B, S, S, C] as a batch of a classifier."""
  size, channels = config.data.image_size, config.model.channels
  shape = (size, size, channels)
  wanted = f'they must be images, uint8 [B, {size}, {size}, {channels}]'
  images = _array(inputs, wanted)
  if images.shape[1:] != shape or images.dtype != np.uint8 or not len(images):
    raise UserError(f'inputs are {images.dtype} {list(images.shape)}; {wanted}')
  return {'images': images, 'labels': np.zeros(len(images), np.int32)}


def _array(inputs: Any, wanted: str) -> np.ndarray:
  """Return inputs as an array; `wanted` is the end of the message if they are none."""
  try:
    return np.asarray(inputs)
  except (ValueError, TypeError) as error:  # such as rows of unequal lengths
    raise UserError(f'inputs is {arguments.shown(inputs)}, which is no array; {wanted}') from error
