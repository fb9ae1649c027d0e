"""The group `data`: the source of text or images, and how they become batches."""

import dataclasses

from tokenformer_jax.config.fields import key


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The source of text or images, and how they become batches."""

  source: str = key(
    'stdlib',
    'stdlib, files:GLOB, files:DIR or tfds:NAME; for images digits, tfds:NAME or folder:DIR',
  )
  validation_source: str = key(
    '', "a source of validation text, instead of a part of source. '': none", only='lm'
  )
  text_field: str = key('text', 'the field of a jsonl line or a TFDS example', only='lm')
  tokenizer: str = key(
    'bpe:4096', 'bpe:SIZE, bytes, or a path to a Hugging Face tokenizer.json', only='lm'
  )
  sequence_length: int = key(256, 'T, in tokens', above=0, only='lm')
  batch_size: int = key(
    16, 'sequences or images in one optimizer update, over all devices', above=0
  )
  validation_fraction: float = key(
    0.05,
    'the part of source to hold out without validation_source: documents, at least one, chosen by '
    'a hash of the text; the end of a lone text file; images, if source has no validation split',
    above=0,
    below=1,
  )
  cache_dir: str = key('', "for token stores. '': $XDG_CACHE_HOME/tokenformer_jax or ~/.cache/…")
  workers: int = key(0, 'processes that read ahead. 0: threads of this process', least=0)
  prefetch: int = key(8, 'batches read ahead', above=0)
  new_order_at: int = key(
    0,
    'step of a checkpoint: a run resumed there may change seed, sequence_length or text, and '
    'begins at the first sample of the new order. 0: a resumed run keeps its order',
    least=0,
  )
  image_size: int = key(224, 'pixels of a side', above=0, only='vit')
  crop_area: float = key(
    1.0,
    'the smallest part of an image that a random crop keeps. 1: no crops',
    above=0,
    most=1,
    only='vit',
  )
  flip: bool = key(False, 'mirror every other image', only='vit')
  rand_augment: float = key(0.0, 'magnitude of RandAugment. 0: none', least=0, most=10, only='vit')
  rand_augment_std: float = key(0.5, 'standard deviation of the magnitude', least=0, only='vit')
  color_jitter: float = key(
    0.0, 'largest change of brightness, contrast and saturation', least=0, most=1, only='vit'
  )
  erase: float = key(
    0.0,
    'probability that a rectangle of an image is filled with noise',
    least=0,
    most=1,
    only='vit',
  )
  eval_crop: float = key(
    1.0, 'the part of the shorter side that evaluation sees', above=0, most=1, only='vit'
  )
  on_bad_image: str = key(
    'skip',
    'an image that cannot be read, or has no valid label',
    choices=('skip', 'fail'),
    only='vit',
  )
