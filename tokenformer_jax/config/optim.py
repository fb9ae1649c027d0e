"""The section `optim`: the optimizer, its learning rate, and the loss that it minimizes."""

import math
from typing import Literal

from tokenformer_jax.config.section import Bool, Float, Int, Long, Str, key, section
from tokenformer_jax.errors import UserError


@section
class OptimConfig:
  """An optimizer, and a learning rate that warms up and then follows a schedule."""

  name: Literal['adamw', 'muon', 'adafactor', 'lion'] = key(
    'adamw', 'the optimizer: see steps/optimizers.py'
  )
  learning_rate: Float = key(1e-3, 'the peak of the learning rate', above=0)
  warmup_steps: Int = key(100, 'updates in which the rate rises from 0 to the peak', least=0)
  warmup_epochs: Float = key(0.0, 'instead of warmup_steps, if greater than 0', least=0)
  warmup_examples: Long = key(0, 'instead of warmup_steps, if greater than 0', least=0)
  final_fraction: Float = key(
    0.1, 'the floor of the decay, as a fraction of the peak', least=0, most=1
  )
  schedule: Literal['cosine', 'linear', 'wsd', 'constant'] = key(
    'cosine', 'the rate after the warm-up; wsd stays at the peak until its decay'
  )
  decay_share: Float = key(
    0.2,
    'the share of all steps in which the rate decays, unless train.decay_from says where',
    above=0,
    most=1,
  )
  decay_shape: Literal['linear', 'one_minus_sqrt'] = key(
    'linear', 'how it decays: linearly, or as 1 − √t'
  )
  # Adam divides by 1 − β.
  beta1: Float = key(
    0.9, "decay of Adam's mean of gradients; of lion, their weight in an update", least=0, below=1
  )
  beta2: Float = key(
    0.95, "decay of Adam's mean of squared gradients; of lion's mean of gradients", least=0, below=1
  )
  epsilon: Float = key(1e-8, "added to Adam's denominator", above=0)
  momentum: Float = key(0.95, "decay of muon's mean of gradients", least=0, below=1)
  weight_decay: Float = key(0.1, 'decay of matrices; norms and biases have none', least=0)
  clip_norm: Float = key(1.0, 'largest norm of the whole gradient. 0: no clipping', least=0)
  skip_deviations: Float = key(
    0.0,
    'skip a step whose loss or gradient norm lies more standard deviations than this above the '
    'mean of the last good steps. 0: skip only those that are not finite',
    least=0,
  )
  skip_window: Int = key(128, 'the number of these good steps', least=4)
  accumulation_steps: Int = key(1, 'parts of a batch, computed one after the other', above=0)
  z_loss: Float = key(0.0, "weight of log² of the softmax's denominator in the loss", least=0)
  layer_decay: Float = key(
    1.0,
    "factor on a block's rate for each block above it (arXiv 2106.08254). 1: all rates are equal",
    above=0,
    most=1,
  )
  mixup: Float = key(0.0, 'α of the Beta distribution that weights two images. 0: none', least=0)
  cutmix: Float = key(
    0.0, 'α as for mixup, for areas; with both, half of the batches each', least=0
  )
  label_smoothing: Float = key(0.0, 'probability to spread over all classes', least=0, below=1)
  drop_path: Float = key(
    0.0, 'probability of dropping a branch of the last block', least=0, below=1
  )
  restart_schedule: Literal['', 'yes', 'no'] = key(
    '',
    "warm up again after the last growth: yes, no, or ('') if the schedule decays from its start",
  )
  old_tokens: Str = key('train', 'everything older than the last growth: train, freeze or scale:X')
  new_token_warmup: Int = key(
    100, 'updates in which the rate of new tokens and layers rises to that of the old ones', least=0
  )
  new_token_correction: Bool = key(
    False, "for new tokens, count Adam's bias correction from the growth on"
  )
  frozen_groups: Str = key(
    '',
    "numbers of the groups of parameter tokens that do not train, counted from 1, as in '1 2'. "
    "'': none",
  )


def skip_window(optim: OptimConfig) -> int:
  """Return the number of good steps whose statistics a run keeps; 0: none."""
  return optim.skip_window if optim.skip_deviations else 0


def restarts_schedule(optim: OptimConfig) -> bool:
  """Return whether the learning rate warms up, and later decays, anew after a growth.

  By default only the schedules whose rate falls right after the warm-up do, because the rate that
  they have at a growth depends on the length of the run before it.
  """
  if optim.restart_schedule:
    return optim.restart_schedule == 'yes'
  return optim.schedule in ('cosine', 'linear')


def old_token_rate(optim: OptimConfig) -> float:
  """Return the factor of `optim.old_tokens` on updates of parameters older than the last growth.

  Raises:
    UserError: the value has another form.
  """
  if optim.old_tokens in ('train', 'freeze'):
    return float(optim.old_tokens == 'train')
  name, _, factor = optim.old_tokens.partition(':')
  try:
    rate = float(factor)
  except ValueError:
    rate = math.nan
  if name != 'scale' or not 0 < rate < math.inf:
    raise UserError(
      f"config.optim.old_tokens is {optim.old_tokens!r}; it must be 'train', 'freeze' or 'scale:X' "
      'with a factor X greater than 0, for example scale:0.1'
    )
  return rate
