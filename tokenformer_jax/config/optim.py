"""The section `optim`: the optimizer, its learning rate, and the loss that it minimizes."""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tokenformer_jax.config.section import Bool, Float, Int, OneOf, Str, key, section, table
from tokenformer_jax.errors import UserError


@section
class ConstantSchedule:
  """The rate stays at its peak."""

  kind: ClassVar[str] = 'constant'


@section
class CosineSchedule:
  """The rate falls as a cosine over the whole run."""

  kind: ClassVar[str] = 'cosine'

  final_fraction: Float = key(
    0.1, 'the floor of the decay, as a fraction of the peak', least=0, most=1
  )


@section
class LinearSchedule(CosineSchedule):
  """The rate falls linearly over the whole run."""

  kind = 'linear'


@section
class WSDSchedule(CosineSchedule):
  """The rate stays at its peak until its decay (warm up, stable, decay)."""

  kind = 'wsd'

  decay_share: Float = key(
    0.2,
    'the share of all steps in which the rate decays, unless train.decay_from says where',
    above=0,
    most=1,
  )
  decay_shape: Literal['linear', 'one_minus_sqrt'] = key(
    'linear', 'how it decays: linearly, or as 1 − √t'
  )


SCHEDULES = table(CosineSchedule, LinearSchedule, WSDSchedule, ConstantSchedule)
Schedule = Annotated[
  CosineSchedule | LinearSchedule | WSDSchedule | ConstantSchedule, OneOf(SCHEDULES)
]


@section
class OptimConfig:
  """The keys of every optimizer, with a learning rate that warms up and then follows a schedule."""

  kind: ClassVar[str]
  new_token_correction = False  # a key of AdamW

  learning_rate: Float = key(1e-3, 'the peak of the learning rate', above=0)
  warmup_steps: Int = key(100, 'updates in which the rate rises from 0 to the peak', least=0)
  warmup_epochs: Float = key(0.0, 'instead of warmup_steps, if greater than 0', least=0)
  schedule: Schedule = key(CosineSchedule(), 'the rate after the warm-up')
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
  restart_schedule: Literal['', 'yes', 'no'] = key(
    '',
    "warm up again after the last growth: yes, no, or ('') if the schedule decays from its start",
  )
  old_tokens: Str = key(
    'train',
    'parameters from before the last growth: train, freeze, or scale:X (multiply their updates by '
    'X)',
  )
  new_token_warmup: Int = key(
    100, 'updates in which the rate of new tokens and layers rises to that of the old ones', least=0
  )

  if TYPE_CHECKING:  # A checker does not know the kind.

    def __getattr__(self, name: str) -> Any: ...


@section
class AdafactorConfig(OptimConfig):
  """Adafactor: factored second moments, no momentum."""

  kind = 'adafactor'


@section
class LionConfig(OptimConfig):
  """Lion: the sign of a mean of gradients."""

  kind = 'lion'

  beta1: Float = key(0.9, 'weight of the mean of gradients in an update', least=0, below=1)
  beta2: Float = key(0.95, 'decay of the mean of gradients', least=0, below=1)


@section
class _AdamConfig(OptimConfig):
  # Adam divides by 1 − β.
  beta1: Float = key(0.9, 'decay of the mean of gradients', least=0, below=1)
  beta2: Float = key(0.95, 'decay of the mean of squared gradients', least=0, below=1)
  epsilon: Float = key(1e-8, "added to Adam's denominator", above=0)


@section
class AdamWConfig(_AdamConfig):
  """AdamW."""

  kind = 'adamw'

  new_token_correction: Bool = key(
    False, "for new tokens, count Adam's bias correction from the growth on"
  )


@section
class MuonConfig(_AdamConfig):
  """Muon for matrices of hidden layers, AdamW for the rest."""

  kind = 'muon'

  momentum: Float = key(0.95, "decay of muon's mean of gradients", least=0, below=1)


OPTIMIZERS = table(AdamWConfig, MuonConfig, AdafactorConfig, LionConfig)
Optim = Annotated[OptimConfig, OneOf(OPTIMIZERS)]


def as_wsd(schedule: Schedule) -> WSDSchedule:
  """Return the schedule that stays constant and then decays to the same floor as another one."""
  if isinstance(schedule, WSDSchedule) or not isinstance(schedule, CosineSchedule):
    return schedule if isinstance(schedule, WSDSchedule) else WSDSchedule()
  return WSDSchedule(final_fraction=schedule.final_fraction)


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
  return optim.schedule.kind in ('cosine', 'linear')


def old_token_rate(optim: OptimConfig) -> float:
  """Return the factor of `optim.old_tokens` on updates of parameters older than the last growth."""
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
