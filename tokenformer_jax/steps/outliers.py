"""Find steps whose loss or gradient norm lies far above those of the last good steps.

The state of a run has a ring buffer of both values of its last `optim.skip_window` good steps. Only
good steps enter it, so a row of outliers does not raise the limit. The statistics are computed from
the buffer at every step, first the mean and then the deviations from it: running sums would lose
digits, and would depend on where a run was interrupted.
"""

import jax
import jax.numpy as jnp

Recent = dict[str, jax.Array]

WATCHED = ('loss', 'grad_norm')


def initial(window: int) -> Recent:
  """Return the statistics of a run that begins.

  `loss` and `grad_norm` are the buffers, of `window` values. `good` counts the values that were
  written since the buffers were empty, and `outliers` the steps that were skipped.
  """
  buffers = {name: jnp.zeros(window, jnp.float32) for name in WATCHED}
  return {**buffers, **{name: jnp.zeros((), jnp.int32) for name in ('good', 'outliers')}}


def accept_step(
  recent: Recent,
  figures: dict[str, jax.Array],
  *,
  finite: jax.Array,
  may_skip: jax.Array,
  deviations: float,
) -> tuple[jax.Array, Recent]:
  """Return whether to make a step, and the statistics after it.

  A finite step is an outlier if one of its values lies more than `deviations` standard deviations
  above the mean of the buffer, which must be half full. If `may_skip` is false, an outlier counts
  as the beginning of something new: it is made, and the buffers begin again with it.

  Args:
    recent: the statistics before the step.
    figures: the values of the step, by the names of `WATCHED`.
    finite: whether they are finite.
    may_skip: whether an outlier may be skipped.
    deviations: the limit.
  """
  window = recent['loss'].size
  known = jnp.arange(window) < recent['good']
  above = [_above(recent[name], known, figures[name], deviations) for name in WATCHED]
  outlier = finite & (recent['good'] >= (window + 1) // 2) & jnp.any(jnp.stack(above))
  skipped = outlier & may_skip
  made = finite & ~skipped
  count = jnp.where(outlier & made, 0, recent['good'])
  slot = count % window
  buffers = {
    name: jnp.where(made, recent[name].at[slot].set(figures[name]), recent[name])
    for name in WATCHED
  }
  return made, {**buffers, 'good': count + made, 'outliers': recent['outliers'] + skipped}


def _above(buffer: jax.Array, known: jax.Array, value: jax.Array, deviations: float) -> jax.Array:
  """Return whether a value is too far above the known ones, of which there are two or more."""
  count = jnp.maximum(jnp.sum(known), 2)
  mean = jnp.sum(jnp.where(known, buffer, 0)) / count
  squares = jnp.where(known, jnp.square(buffer - mean), 0)
  deviation = jnp.sqrt(jnp.sum(squares) / (count - 1))
  rounding = jnp.finfo(jnp.float32).eps * jnp.abs(mean)  # of equal values, whose deviation is 0
  return value - mean > deviations * jnp.maximum(deviation, rounding)
