"""Read from a lineage which parts of a model its last growth added, for the optimizer.

This module compares configs and array shapes. It needs none of the code that grows a model.
"""

import dataclasses
from typing import Any

import jax

from tokenformer_jax.config import Config, ModelConfig, matching
from tokenformer_jax.config import pattern as pattern_lib
from tokenformer_jax.config.groups import adds_groups
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Definition, ParamInfo, Params
from tokenformer_jax.runs.checkpoint_meta import Lineage, last_addition
from tokenformer_jax.steps.entries import NO_NEW_EXPERTS, Entries, LastGrowth, old_entries


def last_growth(lineage: Lineage, model: ModelConfig) -> LastGrowth | None:
  """Return the last growth of a model, or None if its lineage has none.

  After an action that takes something out, or that writes a matrix as tokens, all of the model is
  old, and the count of the growth before it stays.
  """
  growth, later = last_addition(lineage)
  if growth is None:
    return None
  if not later:
    neurons = growth.grow.method.kind == 'neurons'
    return growth_from(growth.model, model, growth.grow.place, growth.updates, neurons=neurons)
  restarted = any(entry.grow.step == 'restart' for entry in later)
  return growth_from(model, model, updates=0 if restarted else growth.updates)


def growth_from(
  before: ModelConfig,
  model: ModelConfig,
  place: str = 'between',
  updates: int = 0,
  *,
  neurons: bool = False,
) -> LastGrowth:
  """Return the growth from the model `before` to `model`; `place` is its `grow.place`.

  Added `neurons` are behind the old ones of each MLP.
  """
  new = matching.new_layers(before, model, place) if before.repeats != model.repeats else ()
  definition = models.define(model)
  old = models.define(matching.as_deep(matching.routed(before, model), model))
  counts = matching.old_expert_counts(before, model)
  experts = _old_experts(definition, model, counts) if counts else None
  tokens = definition.counts_in(old)
  entries = old_entries(definition.info, tokens, new, experts)
  if neurons:
    entries = jax.tree.map(_with_old_neurons, entries, definition.abstract, old.abstract)
  return LastGrowth(updates, entries, before)


def _with_old_neurons(entries: Entries, array: Any, before: Any) -> Entries:
  sizes = zip(entries.axes, array.shape, before.shape, strict=True)
  ranges = {axis: ((0, size),) for axis, now, size in sizes if 'hidden' in axis and size < now}
  return dataclasses.replace(entries, ranges={**entries.ranges, **ranges})


def frozen_base(growth: LastGrowth | None, config: Config) -> ModelConfig | None:
  """Return the model before a growth if the run trains only the groups of tokens that it added."""
  if growth is None or growth.before is None or config.optim.old_tokens != 'freeze':
    return None
  return growth.before if adds_groups(growth.before, config.model) else None


def _old_experts(
  definition: Definition, model: ModelConfig, counts: dict[str, tuple[int, int]]
) -> Params:
  """Return the number of old experts of each array, given `matching.old_expert_counts`."""
  names = pattern_lib.names(model.repeats)

  def count(info: ParamInfo) -> int:
    name = names[info.depth[0] - 1] if isinstance(info.depth, tuple) else ''
    if info.expert_axis is None or name not in counts:
      return NO_NEW_EXPERTS
    experts, routes = counts[name]
    return routes if info.axes[info.expert_axis] == 'routes' else experts

  return jax.tree.map(count, definition.info)
