"""The config of a whole run, and its sections `mesh`, `train`, `preference` and `distill`."""

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from tokenformer_jax.config.data import Data, TextConfig
from tokenformer_jax.config.growth import GrowConfig
from tokenformer_jax.config.model import LMConfig, Model
from tokenformer_jax.config.optim import AdamWConfig, Optim
from tokenformer_jax.config.section import Float, Int, Long, Str, key, section
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


Tracker = Literal['tensorboard', 'wandb', 'trackio', 'mlflow']


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
  """Check that no name stands twice in a list."""
  for name in names:
    if names.count(name) > 1:
      raise PydanticCustomError('twice', 'name {name} once', {'name': name})
  return names


@section
class TrainConfig:
  """The length of the run, what it writes, and how the step is computed."""

  steps: Int = key(1000, 'optimizer updates', least=0)
  epochs: Float = key(
    0.0, 'passes over the training data, instead of steps, if greater than 0', least=0
  )
  examples: Long = key(
    0, 'length of training in sequences or images; exclusive with steps and epochs', least=0
  )
  decay_from: Int = key(
    0,
    'with optim.schedule=wsd, the update from which the rate decays until the last step; a run may '
    'begin there from the checkpoint of a longer one (init_from). 0: as optim.schedule.decay_share '
    'says',
    least=0,
  )
  seed: Int = key(
    0, 'seed of parameters, of the order of the data and of random draws', least=0, order='samples'
  )
  log_every: Int = key(10, 'steps between lines of figures', above=0, quiet=True)
  eval_every: Int = key(
    250, 'steps between evaluations; also at the end. 0: only at the end', least=0
  )
  eval_batches: Int = key(0, 'batches of an evaluation. 0: the whole validation split', least=0)
  checkpoint_every: Int = key(
    250, 'steps between checkpoints; also at the end', above=0, quiet=True
  )
  keep_checkpoints: Int = key(
    2, 'newest checkpoints to keep, besides the best by eval/loss', above=0, quiet=True
  )
  ema: Float = key(
    0.0,
    'decay of a moving average of the parameters, also evaluated, as eval/ema_…. 0: none',
    least=0,
    below=1,
  )
  nested_rows: Int = key(
    0,
    'of so many rows of a batch, one trains each number of first groups of parameter tokens alone, '
    'so that these serve as smaller models: see steps/elastic.py. 0: none',
    least=0,
  )
  max_skipped_steps: Int = key(
    20,
    'skipped steps in a row after which the run stops; an outlier by optim.skip_deviations is made '
    'in the place of the last of them',
    above=0,
  )
  check_devices: Int = key(
    0,
    'steps between those that are computed twice, to find devices that compute wrong without an '
    'error. 0: none',
    least=0,
  )
  sample_tokens: Int = key(
    64, 'length of the text written at each evaluation. 0: none', least=0, quiet=True
  )
  sample_prompt: Str = key('', "the start of that text. '': a new document", quiet=True)
  remat: Literal['auto', 'everything', 'score_inputs', 'dots', 'attention', 'full', 'offload'] = (
    key(
      'auto', 'the values to save for the backward pass: see model/stack.py. auto: as many as fit'
    )
  )
  layers: Literal['auto', 'scan', 'unrolled'] = key(
    'auto', 'a loop over layers, or all without a loop. auto: the fastest that fits'
  )
  attention: Literal['auto', 'xla', 'cudnn', 'splash'] = key(
    'auto', 'the kernel: see model/kernels.py'
  )
  compiler_options: Literal['auto', 'deterministic', 'none'] = key(
    'auto', "options for the devices, or XLA's defaults (none): see steps/compiler.py"
  )
  loss_chunk: Int = key(
    256, 'positions of each sequence whose logits are in memory at once', above=0
  )
  profile_steps: Str = key(
    '', "'FIRST:LAST' writes a profile of these steps into the work directory", quiet=True
  )
  trackers: Annotated[tuple[Tracker, ...], AfterValidator(_once)] = key(
    ('tensorboard',),
    'what shows the figures beside metrics.jsonl, several with commas between (docs/run.md)',
    quiet=True,
  )
  compilation_cache: Str = key('', "directory of compiled programs. '': none", quiet=True)


def profile_range(train: TrainConfig) -> tuple[int, int] | None:
  """Return the first and the last step to profile, or None."""
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
class PreferenceConfig:
  """The loss of pairs of a chosen and a rejected answer (`data.rows=preference`).

  `dpo` is −log σ(β · margin), where the margin is how much more than a reference the model prefers
  the chosen answer, in log-probabilities (arXiv 2305.18290). `orpo` needs no reference: it is the
  mean −log p of the chosen answer's tokens, plus −β log σ(log of the ratio of odds), of the mean
  log-probabilities of both (arXiv 2403.07691, where β is λ).
  """

  loss: Literal['dpo', 'orpo'] = key('dpo', 'of a pair of answers')
  beta: Float = key(0.1, 'β, the scale of rewards, or the weight of the odds ratio', above=0)


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


@section
class Config:
  """The config of a whole run."""

  model: Model = key(LMConfig(), 'what is trained')
  data: Data = key(TextConfig(), 'what it is trained on')
  optim: Optim = key(AdamWConfig(), 'the optimizer: see steps/optimizers.py')
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  dtype: Literal['auto', 'float32', 'bfloat16'] = key(
    'auto', 'dtype of activations. auto: bfloat16 on TPU and GPU, float32 on CPU'
  )
  init_from: Str = key('', "another run's directory, DIR or DIR@STEP, grown to this model")
  grow: GrowConfig = GrowConfig()
  distill: DistillConfig = DistillConfig()
  preference: PreferenceConfig = PreferenceConfig()
