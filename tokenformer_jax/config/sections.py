"""The sections `mesh`, `data`, `train` and `distill` of a run's config."""

import dataclasses
from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from tokenformer_jax.config.section import (
  Bool,
  Float,
  Int,
  Long,
  Named,
  Str,
  key,
  section,
)
from tokenformer_jax.errors import UserError


@section
class MeshConfig:
  """Sizes of the mesh axes; one size may be -1: all remaining devices."""

  replica: Int = key(1, 'copies of the model')
  fsdp: Int = key(-1, 'parts of parameters by width, and of the batch')
  experts: Int = key(
    1,
    'parts of the experts, and of batch and width as well: these devices are also fsdp',
  )
  sequence: Int = key(
    1,
    'parts of the positions of a row, and of the width as well; attention exchanges heads for '
    'positions (docs/planned_speed.md)',
  )
  tokens: Int = key(1, 'parts of parameter tokens, heads and vocabulary')


@section
class SourceConfig:
  """A source of a mixture."""

  source: Str = key('', 'the text, as data.source')
  validation_source: Str = key(
    '', "its validation text, as data.validation_source. '': a part of the source"
  )
  rows: Literal['text', 'chat'] = key('text', 'its documents, as data.rows')
  store: Str = key('', 'the folder of its token store, as data.store')
  weight: Float = key(
    0.0,
    'its share of the samples; the weights of a mixture add up to 1. 0: only evaluated',
    least=0,
    most=1,
  )
  weight_by_step: Str = key(
    '',
    'the weight over steps, instead of weight: points STEP:WEIGHT with straight lines between, '
    'for example "0:0.5 1000:0.9"',
  )


class Sources(Named[SourceConfig]):
  """The sources of a mixture by name."""


@section
class DataConfig:
  """The source of text or images, and how they become batches."""

  source: Str = key(
    'stdlib',
    'stdlib, files:GLOB, parquet:GLOB, hf:NAME or tfds:NAME, or several with " + " between them '
    '(docs/data.md); for images digits, tfds:NAME or folder:DIR',
  )
  validation_source: Str = key(
    '', "a source of validation text, instead of a part of source. '': none"
  )
  mixture: Sources = dataclasses.field(default_factory=Sources)
  deduplicate: Bool = key(False, 'leave out documents that repeat an earlier one exactly')
  rows: Literal['text', 'chat'] = key(
    'text',
    'the documents of source: text; or chat, rows of messages, or of prompt and response, of which '
    'only the answers carry loss',
  )
  chat_template: Str = key(
    '',
    "a .jinja file with generation marks, which makes text of chat. '': the template beside the "
    'tokenizer.json, or a built-in one',
  )
  text_field: Str = key('text', 'the field or column with the text of a row')
  tokenizer: Str = key('bpe:4096', 'bpe:SIZE, bytes, or a path to a Hugging Face tokenizer.json')
  documents: Literal['joined', 'masked', 'separate'] = key(
    'joined',
    'those in one sequence: joined, a token also sees the documents before its own; masked, only '
    'its own; separate, only its own, and positions restart with each',
  )
  sequence_length: Int = key(256, 'T, in tokens', above=0)
  sequence_length_by_step: Str = key(
    '',
    'T over steps: points STEP:LENGTH, each length until the next point, for example "0:512 '
    '9000:2048"; the longest is sequence_length, which evaluations have throughout',
  )
  batch_size: Int = key(
    16, 'sequences or images in one optimizer update, over all devices', above=0
  )
  batch_size_by_step: Str = key(
    '',
    'the batch size over steps, in the same form, for example "0:64 9000:16"; batch_size is then '
    'that of evaluations alone',
  )
  validation_fraction: Float = key(
    0.05,
    'the part of source to hold out without validation_source: documents, at least one, chosen by '
    'a hash of the text; the end of a lone text file; images, if source has no validation split',
    above=0,
    below=1,
  )
  cache_dir: Str = key('', "for token stores. '': $XDG_CACHE_HOME/tokenformer_jax or ~/.cache/…")
  store: Str = key(
    '',
    "the folder of a token store made by tokenformer prepare, on a disk or in a bucket. '': in "
    'cache_dir, made by the run',
  )
  cache_gb: Float = key(
    10.0,
    'GB on a disk for each process, in cache_dir, for tokens of a store in a bucket. 0: none',
    least=0,
  )
  workers: Int = key(0, 'processes that read ahead. 0: threads of this process', least=0)
  prefetch: Int = key(8, 'batches read ahead', above=0)
  new_order_at: Int = key(
    0,
    'step of a checkpoint: a run resumed there may change seed, sequence_length or text, and '
    'begins at the first sample of the new order. 0: a resumed run keeps its order',
    least=0,
  )
  image_size: Int = key(224, 'pixels of a side', above=0)
  crop_area: Float = key(
    1.0, 'the smallest part of an image that a random crop keeps. 1: no crops', above=0, most=1
  )
  flip: Bool = key(False, 'mirror every other image')
  rand_augment: Float = key(0.0, 'magnitude of RandAugment. 0: none', least=0, most=10)
  rand_augment_std: Float = key(0.5, 'standard deviation of the magnitude', least=0)
  color_jitter: Float = key(
    0.0, 'largest change of brightness, contrast and saturation', least=0, most=1
  )
  erase: Float = key(
    0.0, 'probability that a rectangle of an image is filled with noise', least=0, most=1
  )
  eval_crop: Float = key(1.0, 'the part of the shorter side that evaluation sees', above=0, most=1)
  on_bad_image: Literal['skip', 'fail'] = key(
    'skip', 'an image that cannot be read, or has no valid label'
  )

  def setting(self, key: str) -> str:
    """Return the full name of a key of this section, for messages."""
    return f'config.data.{key}'

  @property
  def has_chat(self) -> bool:
    """Return whether a source has conversations."""
    return any(one.rows == 'chat' for one in (self, *self.mixture.values()))

  @property
  def has_text(self) -> bool:
    """Return whether a source has documents of text."""
    return any(one.rows == 'text' for one in self.mixture.values() or (self,))

  @property
  def has_stages(self) -> bool:
    """Return whether batches have sizes over steps."""
    return bool(self.batch_size_by_step or self.sequence_length_by_step)


Tracker = Literal['tensorboard', 'wandb', 'trackio', 'mlflow']


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
  """Check that no name stands twice in a list."""
  if len(set(names)) < len(names):
    raise PydanticCustomError('twice', 'a name twice')
  return names


@section
class TrainConfig:
  """The length of the run, what it writes, and how the step is computed."""

  steps: Int = key(1000, 'optimizer updates', least=0)
  epochs: Float = key(
    0.0, 'passes over the training data, instead of steps, if greater than 0', least=0
  )
  examples: Long = key(0, 'sequences or images, instead of steps', least=0)
  decay_from: Int = key(
    0,
    'with optim.schedule=wsd, the update from which the rate decays until the last step; a run may '
    'begin there from the checkpoint of a longer one (init_from). 0: as optim.decay_share says',
    least=0,
  )
  seed: Int = key(0, 'seed of parameters, of the order of the data and of random draws', least=0)
  log_every: Int = key(10, 'steps between lines of figures', above=0)
  eval_every: Int = key(
    250, 'steps between evaluations; also at the end. 0: only at the end', least=0
  )
  eval_batches: Int = key(0, 'batches of an evaluation. 0: the whole validation split', least=0)
  checkpoint_every: Int = key(250, 'steps between checkpoints; also at the end', above=0)
  keep_checkpoints: Int = key(
    2, 'newest checkpoints to keep, besides the best by eval/loss', above=0
  )
  ema: Float = key(
    0.0,
    'decay of a moving average of the parameters, also evaluated, as eval/ema_…. 0: none',
    least=0,
    below=1,
  )
  drop_groups: Float = key(
    0.0,
    'probability that a step trains only the first groups of parameter tokens, so that each number '
    'of them serves alone: see steps/elastic.py',
    least=0,
    most=1,
  )
  max_skipped_steps: Int = key(
    20,
    'skipped steps in a row after which the run stops; an outlier by optim.skip_deviations is made '
    'in the place of the last of them',
    above=0,
  )
  check_devices: Int = key(
    0,
    'steps between those that also look for devices that compute wrong, without an error. 0: none',
    least=0,
  )
  device_checker: Literal['repeat', 'sdc_checker'] = key(
    'repeat',
    'how: compute the step twice and compare the bits; or by the SDC checker of the TPU compiler',
  )
  sample_tokens: Int = key(64, 'length of the text written at each evaluation. 0: none', least=0)
  sample_prompt: Str = key('', "the start of that text. '': a new document")
  remat: Literal['auto', 'everything', 'score_inputs', 'dots', 'attention', 'full', 'offload'] = (
    key(
      'auto', 'the values to save for the backward pass: see model/stack.py. auto: as many as fit'
    )
  )
  layers: Literal['auto', 'scan', '2', '4', '8', 'unrolled'] = key(
    'auto',
    'a loop over layers, with one in its body (scan), or at most 2, 4 or 8; or all without a loop. '
    'auto: the fastest that fits',
  )
  attention: Literal['auto', 'xla', 'cudnn', 'splash'] = key(
    'auto', 'the kernel: see model/kernels.py'
  )
  compiler_options: Literal['auto', 'deterministic', 'none'] = key(
    'auto', "options for the devices, or XLA's defaults (none): see steps/compiler.py"
  )
  receptive_field: Float = key(
    0.75,
    'where the last layer attends to all positions and knows none of them, the most that the '
    'windows before it may reach, as a part of data.sequence_length (HWFA). 0: not checked',
    least=0,
  )
  loss_chunk: Int = key(
    256, 'positions of each sequence whose logits are in memory at once', above=0
  )
  profile_steps: Str = key(
    '', "'FIRST:LAST' writes a profile of these steps into the work directory"
  )
  trackers: Annotated[tuple[Tracker, ...], AfterValidator(_once)] = key(
    ('tensorboard',),
    'what shows the figures beside metrics.jsonl, several with commas between (docs/commands.md)',
  )
  compilation_cache: Str = key('', "directory of compiled programs. '': none")


def profile_range(train: TrainConfig) -> tuple[int, int] | None:
  """Return the first and the last step to profile, or None.

  Raises:
    UserError: the value has another form, or the run ends before these steps.
  """
  if not train.profile_steps:
    return None
  first, _, last = train.profile_steps.partition(':')
  if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
    raise UserError(
      f'config.train.profile_steps is {train.profile_steps!r}; it must be FIRST:LAST, two step '
      'numbers from 1 on of which the last is not below the first, for example 10:13'
    )
  if int(first) > train.steps and not (train.epochs or train.examples):
    raise UserError(
      f'config.train.profile_steps is {train.profile_steps}, and the run ends at step '
      f'{train.steps} before the first of them; take earlier ones, or leave it out'
    )
  return int(first), int(last)


@section
class DistillConfig:
  """A trained language model whose probabilities a run learns besides the targets.

  The loss is weight · T² · (cross-entropy to the teacher's probabilities) + (1 − weight) ·
  (cross-entropy to the targets), where both models' logits are divided by the temperature T in the
  first term. T² keeps the size of its gradient (Hinton et al. 2015, arXiv 1503.02531). A weight of
  0.25 is that of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961).
  """

  teacher: Str = key('', "a trained run, DIR or DIR@STEP. '': none")
  weight: Float = key(
    0.25,
    "of the cross-entropy to the teacher's probabilities; that of the targets has the rest",
    least=0,
    most=1,
  )
  temperature: Float = key(
    1.0, 'divides the logits of both models before their probabilities are compared', above=0
  )
  init: Literal['no', 'yes'] = key(
    'no',
    "whether the run begins with the teacher's arrays, wherever both models have the same: "
    'embedding, attention, norms, head',
  )
