"""The learning rate as a function of the number of updates: a linear warm-up, then a decay.

A schedule is a section of `config/optim.py`, a function below, and a line in `SCHEDULES`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tokenformer_jax.config import (
  ConstantSchedule,
  CosineSchedule,
  OptimConfig,
  WSDSchedule,
  restarts_schedule,
)
from tokenformer_jax.steps.entries import LastGrowth


def _constant(peak: float, schedule: ConstantSchedule, length: int) -> optax.Schedule:
  del schedule, length
  return optax.schedules.constant_schedule(peak)


def _cosine(peak: float, schedule: CosineSchedule, length: int) -> optax.Schedule:
  return optax.schedules.cosine_decay_schedule(peak, length, alpha=schedule.final_fraction)


def _linear(peak: float, schedule: CosineSchedule, length: int) -> optax.Schedule:
  return optax.schedules.linear_schedule(peak, schedule.final_fraction * peak, length)


def _wsd(peak: float, schedule: WSDSchedule, length: int) -> optax.Schedule:
  """Return the decay of warmup-stable-decay (Hu et al. 2024, arXiv 2404.06395)."""
  if schedule.decay_shape == 'linear':
    return _linear(peak, schedule, length)
  floor = schedule.final_fraction

  def one_minus_sqrt(count: Any) -> jax.Array:
    return peak * (floor + (1 - floor) * (1 - jnp.sqrt(jnp.clip(count / length, 0, 1))))

  return one_minus_sqrt


# By `optim.schedule.kind`: map the peak, the section and the updates of the decay to the rate from
# its start.
SCHEDULES: dict[str, Callable[[float, Any, int], optax.Schedule]] = {
  'cosine': _cosine,
  'linear': _linear,
  'wsd': _wsd,
  'constant': _constant,
}


def learning_rate(
  config: OptimConfig, steps: int, start: int = 0, decay_from: int = 0
) -> optax.Schedule:
  """Return the schedule from the number of updates made to the learning rate of the next one.

  The rate warms up linearly to the peak. From there `cosine` and `linear` decay to the floor, a
  fraction `final_fraction` of the peak; `constant` stays; `wsd` stays until its decay begins.

  The warm-up starts at update `start`, and the decay ends at update `steps`. The decay of `wsd`
  begins at update `decay_from`; 0: as `decay_share` says.
  """
  peak, warmup_end = config.learning_rate, start + config.warmup_steps
  begin = warmup_end
  if isinstance(config.schedule, WSDSchedule):
    share = config.schedule.decay_share
    begin = decay_from or max(warmup_end, steps - round(share * (steps - start)))
  decay = SCHEDULES[config.schedule.kind](peak, config.schedule, max(1, steps - begin))
  # The first update of a warm-up of W steps has the rate peak/W, the last one the peak.
  warmup = optax.schedules.linear_schedule(
    peak / max(1, config.warmup_steps), peak, max(1, config.warmup_steps - 1)
  )
  stable = optax.schedules.constant_schedule(peak)
  phases, ends = [warmup, decay], [config.warmup_steps]
  if begin > warmup_end:
    phases, ends = [warmup, stable, decay], [config.warmup_steps, begin - start]
  from_zero = optax.schedules.join_schedules(phases, ends)
  return lambda count: from_zero(count - start)


def schedule(
  config: OptimConfig, steps: int, growth: LastGrowth | None = None, decay_from: int = 0
) -> optax.Schedule:
  """Return the `learning_rate` of a run, restarted at the last growth if the config says so."""
  return learning_rate(config, steps, first_update(config, growth), decay_from)


def first_update(config: OptimConfig, growth: LastGrowth | None) -> int:
  """Return the number of updates at which the warm-up starts: 0, or that of the last growth."""
  return growth.updates if growth and restarts_schedule(config) else 0


def fraction_of_peak(rate: optax.Schedule, config: OptimConfig, count: int) -> float:
  """Return the rate after `count` updates as a fraction of the peak."""
  reached: Any = rate(count)
  return float(reached) / config.learning_rate
