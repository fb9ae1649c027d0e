"""The section `data`: the source of text or images, and how they become batches."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tokenformer_jax.config.section import Bool, Float, Int, Named, OneOf, Str, key, section, table


@section
class SourceConfig:
  """A source of a mixture."""

  source: Str = key('', 'the text, as data.source', order='text')
  validation_source: Str = key(
    '', "its validation text, as data.validation_source. '': a part of the source", order='text'
  )
  rows: Literal['text', 'chat'] = key('text', 'its documents, as data.rows', order='samples')
  store: Str = key('', 'the folder of its token store, as data.store', quiet=True)
  weight: Float = key(
    0.0,
    'its share of the samples; the weights of a mixture add up to 1. 0: only evaluated',
    least=0,
    most=1,
    order='weights',
  )
  weight_by_step: Str = key(
    '',
    'the weight by stages, instead of weight: points STEP:WEIGHT, each of which holds until the '
    'next, for example "0:0.5 1000:0.9"',
    order='weights',
  )


class Sources(Named[SourceConfig]):
  """The sources of a mixture by name."""

  of = SourceConfig


@section
class DataConfig:
  """The data of every kind: `TextConfig` or `ImagesConfig`."""

  kind: ClassVar[str]
  unit: ClassVar[str]  # of the length and speed of a training

  source: Str = key(
    'stdlib',
    'stdlib, files:GLOB, parquet:GLOB, hf:NAME or tfds:NAME, or several with " + " between them '
    '(docs/data.md); for images digits, tfds:NAME or folder:DIR',
    order='text',
  )
  batch_size: Int = key(
    16,
    'sequences, pairs or images in one optimizer update, over all devices',
    above=0,
    order='sizes',
  )
  batch_size_by_step: Str = key(
    '',
    'the batch size over steps: points STEP:SIZE, as "0:64 9000:16"; batch_size is then '
    'that of evaluations alone',
    order='sizes',
  )
  validation_fraction: Float = key(
    0.05,
    'the part of source to hold out without validation_source: documents, at least one, chosen by '
    'a hash of the text; the end of a lone text file; images, if source has no validation split',
    above=0,
    below=1,
    order='text',
  )
  cache_dir: Str = key(
    '', "for token stores. '': $XDG_CACHE_HOME/tokenformer_jax or ~/.cache/…", quiet=True
  )
  workers: Int = key(
    0, 'processes that read ahead. 0: threads of this process', least=0, quiet=True
  )
  prefetch: Int = key(8, 'batches read ahead', above=0, quiet=True)
  new_order_at: Int = key(
    0,
    'step of a checkpoint: a run resumed there may change seed, sequence_length or text, and '
    'begins at the first sample of the new order. 0: a resumed run keeps its order',
    least=0,
  )

  if TYPE_CHECKING:  # A checker does not know the kind.

    def __getattr__(self, name: str) -> Any: ...

  def setting(self, key: str) -> str:
    """Return the full name of a key of this section, for messages."""
    return f'config.data.{key}'

  @property
  def has_stages(self) -> bool:
    """Return whether batches have sizes over steps."""
    return bool(self.batch_size_by_step or self.sequence_length_by_step)

  @property
  def sequences(self) -> int:
    """Return the number of sequences, or of images, in a sample: two in a pair."""
    return 1 + self.has_pairs

  @property
  def units_per_step(self) -> int:
    """Return the number of `unit`s in a batch over all devices."""
    return self.batch_size * self.sequences * self.sequence_length

  @property
  def loss_unit(self) -> str:
    """Return what a loss is a mean over: token, image or pair."""
    return 'pair' if self.has_pairs else self.unit.removesuffix('s')


@section
class TextConfig(DataConfig):
  """Text or conversations, as sequences of tokens."""

  kind = 'text'
  unit = 'tokens'

  validation_source: Str = key(
    '', "a source of validation text, instead of a part of source. '': none", order='text'
  )
  mixture: Sources = dataclasses.field(default_factory=Sources)
  deduplicate: Bool = key(
    False, 'leave out documents that repeat an earlier one exactly', order='text'
  )
  rows: Literal['text', 'chat', 'preference'] = key(
    'text',
    'the documents of source: text; or chat, rows of messages, or of prompt and response, of which '
    'only the answers carry loss; or preference, rows of a chosen and a rejected answer',
    order='text',
  )
  chat_template: Str = key(
    '',
    "a .jinja file with generation marks, which makes text of chat. '': the template beside the "
    'tokenizer.json, or a built-in one',
    order='text',
  )
  text_field: Str = key('text', 'the field or column with the text of a row', order='text')
  document_separator: Str = key(
    '',
    "what stands between documents in a text, such as <|endoftext|>. '': a file or row is one",
    order='text',
  )
  tokenizer: Str = key('bpe:4096', 'bpe:SIZE, bytes, or a path to a Hugging Face tokenizer.json')
  packing: Literal['cut', 'best_fit'] = key(
    'cut',
    'how conversations become sequences: cut, one after another, cut where a sequence ends; '
    'best_fit, whole if they fit, together with those that fill it up',
    order='text',
  )
  documents: Literal['joined', 'masked', 'separate'] = key(
    'joined',
    'how documents packed into one sequence attend: joined, across documents; masked, within each; '
    'separate, within each, and positions restart',
  )
  sequence_length: Int = key(256, 'T, in tokens', above=0, order='samples')
  sequence_length_by_step: Str = key(
    '',
    'T over steps: points STEP:LENGTH, each length until the next point, for example "0:512 '
    '9000:2048"; the longest is sequence_length, which evaluations have throughout',
    order='sizes',
  )
  store: Str = key(
    '',
    "the folder of a token store made by tokenformer prepare, on a disk or in a bucket. '': in "
    'cache_dir, made by the run',
    quiet=True,
  )

  @property
  def has_chat(self) -> bool:
    """Return whether a source has conversations."""
    return self.has_pairs or any(one.rows == 'chat' for one in (self, *self.mixture.values()))

  @property
  def has_pairs(self) -> bool:
    """Return whether a sample is two sequences, a chosen and a rejected answer."""
    return self.rows == 'preference'

  @property
  def windows(self) -> 'TextConfig':
    """Return the config whose sequences are rows of a store: of pairs, those of both answers."""
    if not self.has_pairs:
      return self
    return dataclasses.replace(self, sequence_length=2 * self.sequence_length + 1)

  @property
  def is_packed(self) -> bool:
    """Return whether the conversations of the source are packed into sequences."""
    return self.has_pairs or (self.packing != 'cut' and self.rows == 'chat')

  @property
  def has_text(self) -> bool:
    """Return whether a source has documents of text."""
    return any(one.rows == 'text' for one in self.mixture.values() or (self,))


@section
class ImagesConfig(DataConfig):
  """Images with labels."""

  kind = 'images'
  unit = 'images'
  # An image is one sample by itself, from one source.
  sequence_length: ClassVar[int] = 1
  sequence_length_by_step: ClassVar[str] = ''
  mixture: ClassVar[Sources] = Sources()
  documents: ClassVar[str] = 'joined'
  has_pairs: ClassVar[bool] = False

  image_size: Int = key(224, 'pixels of a side', above=0)
  crop_area: Float = key(
    1.0, 'the smallest part of an image that a random crop keeps. 1: no crops', above=0, most=1
  )
  flip: Bool = key(False, 'mirror every other image')
  rand_augment: Float = key(0.0, 'magnitude of RandAugment. 0: none', least=0, most=10)
  eval_crop: Float = key(1.0, 'the part of the shorter side that evaluation sees', above=0, most=1)
  on_bad_image: Literal['skip', 'fail'] = key(
    'skip', 'an image that cannot be read, or has no valid label'
  )
  mixup: Float = key(0.0, 'α of the Beta distribution that weights two images. 0: none', least=0)
  cutmix: Float = key(
    0.0, 'α as for mixup, for areas; with both, half of the batches each', least=0
  )
  label_smoothing: Float = key(0.0, 'probability to spread over all classes', least=0, below=1)


DATA = table(TextConfig, ImagesConfig)
Data = Annotated[DataConfig, OneOf(DATA)]
