"""The group `train`: the length of a run, what it writes, and how the step is computed."""

import dataclasses

from tokenformer_jax.config.fields import key
from tokenformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The length of the run, what it writes, and how the step is computed."""

  steps: int = key(1000, 'optimizer updates', above=0)
  epochs: float = key(
    0.0, 'passes over the training data, instead of steps, if greater than 0', least=0
  )
  examples: int = key(0, 'sequences or images, instead of steps', least=0, bits=64)
  decay_from: int = key(
    0,
    'with optim.schedule=wsd, the update from which the rate decays until the last step; a run may '
    'begin there from the checkpoint of a longer one (init_from). 0: as optim.decay_share says',
    least=0,
  )
  seed: int = key(0, 'seed of parameters, of the order of the data and of random draws', least=0)
  log_every: int = key(10, 'steps between lines of figures', above=0)
  eval_every: int = key(
    250, 'steps between evaluations; also at the end. 0: only at the end', least=0
  )
  eval_batches: int = key(0, 'batches of an evaluation. 0: the whole validation split', least=0)
  checkpoint_every: int = key(250, 'steps between checkpoints; also at the end', above=0)
  keep_checkpoints: int = key(
    2, 'newest checkpoints to keep, besides the best by eval/loss', above=0
  )
  ema: float = key(
    0.0,
    'decay of a moving average of the parameters, also evaluated, as eval/ema_…. 0: none',
    least=0,
    below=1,
  )
  drop_groups: float = key(
    0.0,
    'probability that a step trains only the first groups of parameter tokens, so that each number '
    'of them serves alone: see steps/elastic.py',
    least=0,
    most=1,
  )
  max_skipped_steps: int = key(20, 'non-finite steps in a row after which the run stops', above=0)
  sample_tokens: int = key(
    64, 'length of the text written at each evaluation. 0: none', least=0, only='lm'
  )
  sample_prompt: str = key('', "the start of that text. '': a new document", only='lm')
  remat: str = key(
    'auto',
    'the values to save for the backward pass: see model/stack.py',
    choices=('auto', 'everything', 'score_inputs', 'dots', 'full', 'offload'),
  )
  layers: str = key(
    'scan', 'one program for all layers, in a loop; or one for each', choices=('scan', 'unrolled')
  )
  attention: str = key(
    'auto', 'the kernel: see model/kernels.py', choices=('auto', 'xla', 'cudnn', 'splash')
  )
  compiler_options: str = key(
    'auto',
    "options for the devices, or XLA's defaults (none): see steps/compiler.py",
    choices=('auto', 'deterministic', 'none'),
  )
  receptive_field: float = key(
    0.75,
    'where the last layer attends to all positions and knows none of them, the most that the '
    'windows before it may reach, as a part of data.sequence_length (HWFA). 0: not checked',
    least=0,
    only='lm',
  )
  loss_chunk: int = key(
    256, 'positions of each sequence whose logits are in memory at once', above=0, only='lm'
  )
  profile_steps: str = key(
    '', "'FIRST:LAST' writes a profile of these steps into the work directory"
  )
  tensorboard: bool = key(True, 'write figures for TensorBoard')
  compilation_cache: str = key('', "directory of compiled programs. '': none")


def profile_range(train: TrainConfig) -> tuple[int, int] | None:
  """Return the first and the last step to profile, or None.

  Raises:
    UserError: the value has another form.
  """
  if not train.profile_steps:
    return None
  first, _, last = train.profile_steps.partition(':')
  if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
    raise UserError(
      f'config.train.profile_steps is {train.profile_steps!r}; it must be FIRST:LAST, two step '
      'numbers from 1 on of which the last is not below the first, for example 10:13'
    )
  return int(first), int(last)
