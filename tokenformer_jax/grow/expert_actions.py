"""Take experts out of a run, for the command `grow` and for `Run`."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from tokenformer_jax.config import GrowConfig, ModelConfig
from tokenformer_jax.config.groups import as_text
from tokenformer_jax.grow import actions, expert_arrays, experts, parts, verify
from tokenformer_jax.grow.actions import Source, Target
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params
from tokenformer_jax.parallel import messages
from tokenformer_jax.steps.step import State
from tokenformer_jax.tasks import Batch


def remove(
  source: Source, numbers: Sequence[int], config: GrowConfig, target: Target
) -> int | None:
  """Take the experts of these numbers out of each layer; those behind them get lower numbers.

  Args:
    source: the run.
    numbers: of the experts, from 1 on.
    config: how to treat moments and step.
    target: the place of the new run.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: a layer has no such expert, or would keep too few.
  """
  after = experts.without(source.model, numbers, '--experts')
  definition = models.define(source.model)
  kept = expert_arrays.without(definition.info, definition.abstract, numbers)

  def smaller(old: State) -> State:
    return parts.take_experts(old, source.model, kept, config)

  text = as_text(numbers)
  return actions.rewrite(
    source, after, smaller, 'remove', config, target, actions.MEASURED, experts=text
  )


def shrink(
  source: Source, counts: Mapping[str, int], examples: int, config: GrowConfig, target: Target
) -> int | None:
  """Keep only the experts that tokens of held-out examples choose most, in each layer.

  Args:
    source: the run.
    counts: the numbers of experts to keep, by the name of the layer.
    examples: the number of sequences or images to measure the load on.
    config: how to treat moments and step.
    target: the place of the new run.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: the counts are not smaller, or there is no room.
  """
  after = experts.smaller(source.model, counts, '--experts=N')

  def smaller(old: State) -> State:
    batch, name = actions.held_out(source, examples)
    kept = _most_used(source, after, old['params'], batch, name)
    return parts.take_experts(old, source.model, kept, config)

  of = range(examples, examples + 1)
  return actions.rewrite(source, after, smaller, 'shrink', config, target, of)


def _most_used(
  source: Source, after: ModelConfig, params: Params, batch: Batch, name: str
) -> Params:
  """Return the experts to keep; report how often tokens choose the others."""
  info = models.define(source.model).info
  task = verify.exact_task(source.meta.config, experts.balanced_by_bias(source.model))
  loads = jax.jit(lambda params, batch: expert_arrays.loads(task, params, batch))(params, batch)
  kept = expert_arrays.most_used(loads, info, models.define(after).abstract)
  shares = [
    jnp.sum(jnp.take_along_axis(load, numbers, axis=-1), axis=-1)
    for load, numbers in zip(jax.tree.leaves(loads), jax.tree.leaves(kept), strict=True)
    if load.ndim
  ]
  lost = 1 - float(jnp.mean(jnp.concatenate(shares)))
  messages.say(f'the experts that go have {lost:.1%} of the choices of {name}')
  return kept
