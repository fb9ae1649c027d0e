"""Fill in the sizes of a model that its data decides, such as that of its vocabulary.

`trained` is the model that the run continues from, if any; it has all sizes. A run on images that
is not `resumed` may adapt it to others. `read=False` reads only what a size needs, of which the key
in `DATA_SIZES` is 0.
"""

import dataclasses

from tokenformer_jax.config import Config, ModelConfig
from tokenformer_jax.data import images, tokenizers
from tokenformer_jax.errors import UserError

# The key of each kind of model that the data determines if it is 0.
DATA_SIZES = {'lm': 'vocab_size', 'vit': 'classes'}
_COLOUR = 3  # the assumed channels of unknown images


def of_text(config: Config, trained: ModelConfig | None, *, read: bool) -> ModelConfig:
  """Return the language model with its vocabulary, its positions and the length of its scale."""
  model, length = config.model, config.data.sequence_length
  vocab_size, max_length = model.vocab_size, model.max_length or length
  if trained is not None:
    vocab_size = vocab_size or trained.vocab_size
    max_length = model.max_length or trained.max_length
    if model.position_embedding == 'learned' and max_length < length:
      raise UserError(
        f'config.data.sequence_length is {length}, but the model that the run continues from has '
        f'learned positions for {max_length} tokens; take at most that'
      )
  elif read or not vocab_size:
    tokenizer = config.data.tokenizer
    ids = tokenizers.bpe_size(tokenizer) or tokenizers.load(tokenizer).size
    vocab_size = vocab_size or -(-ids // 128) * 128
    if vocab_size < ids:
      raise UserError(
        f'config.model.vocab_size is {vocab_size}, but the tokenizer {tokenizer!r} '
        f'has {ids} token ids; make it at least that, or 0 to have it fit'
      )
  model = dataclasses.replace(model, vocab_size=vocab_size, max_length=max_length)
  known = None if trained is None else trained.scale_length
  return model.with_scale_length(known or length)


def of_images(
  config: Config, trained: ModelConfig | None, *, resumed: bool, read: bool
) -> ModelConfig:
  """Return the vision transformer with its classes, channels and positions."""
  model, known = config.model, images.KNOWN_SETS.get(config.data.source)
  classes, channels = model.classes, model.channels
  if resumed and trained is not None:
    classes, channels = classes or trained.classes, channels or trained.channels
  elif read or not (classes or known):
    data = images.open_images(config.data)
    classes, channels = classes or len(data.classes), channels or data.channels
    if classes < len(data.classes):
      raise UserError(
        f'config.model.classes is {classes}, but {config.data.source} has '
        f'{len(data.classes)}; make it at least that, or 0 to have it fit'
      )
  else:
    classes = classes or (known.classes if known else 0)
    channels = channels or (known.channels if known else _COLOUR)
  patches = (config.data.image_size // model.patch) ** 2
  length = patches if model.position_embedding == 'learned' else 0
  return dataclasses.replace(model, classes=classes, channels=channels, max_length=length)


def known_examples(config: Config) -> int | None:
  """Return the number of examples in an epoch if it is known without reading data, else None."""
  known = images.KNOWN_SETS.get(config.data.source)
  return known and known.examples
