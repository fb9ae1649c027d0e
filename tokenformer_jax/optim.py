"""The optimizer: AdamW with clipping, a warm-up and a cosine decay to a floor."""

import jax
import optax

from tokenformer_jax.config import OptimConfig
from tokenformer_jax.params import Params, is_axes


def learning_rate(config: OptimConfig, steps: int) -> optax.Schedule:
  """From the number of updates made to the learning rate of the next one.

  A linear warm-up to the peak, then a cosine (or nothing) down to `final_fraction` of it.
  """
  if config.schedule == 'constant':
    decay = optax.schedules.constant_schedule(config.learning_rate)
  else:
    decay = optax.schedules.cosine_decay_schedule(
      config.learning_rate, max(1, steps - config.warmup_steps), alpha=config.final_fraction
    )
  # The first update of a warm-up of W steps has the rate peak/W, the last one the peak.
  warmup = optax.schedules.linear_schedule(
    config.learning_rate / max(1, config.warmup_steps),
    config.learning_rate,
    max(1, config.warmup_steps - 1),
  )
  return optax.schedules.join_schedules([warmup, decay], [config.warmup_steps])


def decay_mask(axes: Params) -> Params:
  """Which parameters decay: parameter tokens, embeddings and kernels, not norms and biases."""
  return jax.tree.map(lambda names: 'norm' not in names, axes, is_leaf=is_axes)


def make_optimizer(config: OptimConfig, steps: int, axes: Params) -> optax.GradientTransformation:
  """AdamW (Loshchilov & Hutter 2019) with decoupled decay, on gradients clipped by global norm."""
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
    optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
    optax.add_decayed_weights(config.weight_decay, mask=decay_mask(axes)),
    optax.scale_by_learning_rate(learning_rate(config, steps)),
  )
