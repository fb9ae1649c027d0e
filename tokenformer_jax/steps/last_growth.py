"""Read from a lineage which parts of a model its last growth added, for the optimizer.

This module compares configs and array shapes. It needs none of the code that grows a model.
"""

import dataclasses

import jax

from tokenformer_jax.config import ModelConfig, matching
from tokenformer_jax.config import pattern as pattern_lib
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Definition, ParamInfo, Params
from tokenformer_jax.runs.checkpoint_meta import Lineage, changes_of_tokens

ALL = -1  # instead of a number of old experts: the array has no new ones


@dataclasses.dataclass(frozen=True)
class LastGrowth:
  """A model's last growth, for the optimizer.

  Attributes:
    updates: the count of updates at the growth.
    old_tokens: a tree like the parameters, with the number of old parameter tokens of each array.
      An array without parameter tokens counts as old, for any number.
    new_layers: the numbers of the layers that are new as a whole: see `ParamInfo.depth`.
    old_experts: a tree like the parameters, with the number of old experts of each array; −1: the
      array has no new ones. None: no experts are new.
  """

  updates: int
  old_tokens: Params
  new_layers: tuple[int, ...] = ()
  old_experts: Params | None = None


def last_growth(lineage: Lineage, model: ModelConfig) -> LastGrowth | None:
  """Return the last growth of a model, or None if its lineage has no entry that changed arrays."""
  if not (lineage := changes_of_tokens(lineage)):
    return None
  last = lineage[-1]
  before = last.model if last.action in ('grow', 'merge') else model
  return growth_from(before, model, last.grow.place, last.updates)


def growth_from(
  before: ModelConfig, model: ModelConfig, place: str = 'between', updates: int = 0
) -> LastGrowth:
  """Return the growth from the model `before` to `model`; `place` is its `grow.place`."""
  new = matching.new_layers(before, model, place) if before.repeats != model.repeats else ()
  old = models.define(matching.as_deep(matching.routed(before, model), model))
  counts = matching.old_expert_counts(before, model)
  old_experts = _old_experts(models.define(model), model, counts) if counts else None
  return LastGrowth(updates, old.token_counts, new, old_experts)


def _old_experts(
  definition: Definition, model: ModelConfig, counts: dict[str, tuple[int, int]]
) -> Params:
  """Return the number of old experts of each array, given `matching.old_expert_counts`."""
  names = pattern_lib.names(model.repeats)

  def count(info: ParamInfo) -> int:
    name = names[info.depth[0] - 1] if info.in_layers else ''
    if info.expert_axis is None or name not in counts:
      return ALL
    experts, routes = counts[name]
    return routes if info.axes[info.expert_axis] == 'routes' else experts

  return jax.tree.map(count, definition.info)
