"""Match the layers and experts of a model with those of a larger one that was grown from it.

Layers are matched by their names in the pattern, in order: every layer of the larger model is one
of the smaller model, or new. So two patterns and `grow.place` say which layers are new. Experts are
matched by their numbers: new ones lie behind the old ones.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tokenformer_jax.config import pattern as pattern_lib
from tokenformer_jax.config.feed_forward import ExpertsConfig, NoFeedForwardConfig
from tokenformer_jax.config.layer import LayerConfig
from tokenformer_jax.config.model import Layers, ModelConfig
from tokenformer_jax.config.projections import (
  beside_matrices,
  matrices,
  pattentions,
  with_pattentions,
)
from tokenformer_jax.errors import UserError

T = TypeVar('T')
STACKED = ('stacked_copies', 'whole_stacked_copies')  # places of new layers behind the old ones


def shallow(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the target with the source's layers: the model before layers are added."""
  used = pattern_lib.names(target.repeats)
  kept = {
    name: layer
    for name, layer in target.variants.items()
    if name in source.variants or name not in used
  }
  # `untied` comes later. A model of another kind, which has no such key, is refused later.
  head = {'tied_head': True} if source.tied_head and source.kind == target.kind else {}
  return dataclasses.replace(target, pattern=source.pattern, variants=Layers(kept), **head)


def untied(source: ModelConfig, target: ModelConfig | None = None) -> ModelConfig:
  """Return the source with arrays of their own for tied layers, and for the head, as in the target.

  Without a target no layers are tied, and the head is as it was.
  """
  kept = [repeat.layers for repeat in target.repeats if repeat.tied] if target else []
  repeats = [one._replace(tied=one.tied and one.layers in kept) for one in source.repeats]
  head = {'tied_head': False} if target and source.tied_head and not target.tied_head else {}
  pattern = source.pattern if repeats == [*source.repeats] else pattern_lib.as_text(repeats)
  return dataclasses.replace(source, pattern=pattern, **head)


def as_deep(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the source with the target's pattern."""
  variants = Layers({**target.variants, **source.variants})
  return dataclasses.replace(source, pattern=target.pattern, variants=variants)


def old_layers(source: ModelConfig, target: ModelConfig, place: str) -> tuple[int | None, ...]:
  """Return, for each layer of the target, its number in the source, or None if it is new.

  If the target has the source's rows, only more of each, whole rows are new.
  """
  before, after = source.repeats, target.repeats
  numbers: list[int | None] = [None] * target.depth
  same_rows = [group.layers for group in before] == [group.layers for group in after]
  if same_rows and all(old.count <= new.count for old, new in zip(before, after, strict=True)):
    first_old = first_new = 0
    for old, new in zip(before, after, strict=True):
      width = len(old.layers)
      rows = _match([old.layers] * old.count, [old.layers] * new.count, place) or []
      for row, at in enumerate(rows):
        for i in range(width):
          numbers[first_new + at * width + i] = first_old + row * width + i
      first_old, first_new = first_old + old.size, first_new + new.size
    return tuple(numbers)
  at = _match(pattern_lib.names(before), pattern_lib.names(after), place)
  if at is None:
    raise UserError(
      f'model.pattern is {source.pattern!r} in the source and {target.pattern!r} in the target, '
      "which does not have the source's layers in their order; growth only adds layers, so write a "
      'pattern that has them all'
    )
  for layer, new in enumerate(at):
    numbers[new] = layer
  return tuple(numbers)


def _match(old: Sequence[T], new: Sequence[T], place: str) -> list[int] | None:
  """Return the index of each old item among the new ones, in order, or None if one is missing.

  If several indices fit, take the first one with `behind` and stacked copies, and otherwise the
  nearest to the index that spreads the items evenly.
  """
  latest, at = [0] * len(old), len(new)
  for i in reversed(range(len(old))):
    at = next((j for j in reversed(range(at)) if new[j] == old[i]), -1)
    if at < 0:
      return None
    latest[i] = at
  numbers: list[int] = []
  for i, item in enumerate(old):
    first = numbers[-1] + 1 if numbers else 0
    best = first if place in ('behind', *STACKED) else i * len(new) // len(old)
    possible = (j for j in range(first, latest[i] + 1) if new[j] == item)
    numbers.append(min(possible, key=lambda j: abs(j - best)))
  return numbers


def new_layers(source: ModelConfig, target: ModelConfig, place: str) -> tuple[int, ...]:
  """Return the numbers of the target's new layers, from 1 on."""
  numbers = old_layers(source, target, place)
  return tuple(number for number, layer in enumerate(numbers, start=1) if layer is None)


def routed(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the source with the target's experts, and no tokens added yet."""
  after = target.named_layers

  def widened(name: str, layer: LayerConfig) -> LayerConfig:
    old, new = layer.ffn, after[name].ffn if name in after else layer.ffn
    if not isinstance(new, ExpertsConfig):
      return layer
    if isinstance(old, ExpertsConfig):
      ffn = dataclasses.replace(new, expert=old.expert, shared=old.shared)
    else:
      ffn = dataclasses.replace(new, **{'expert' if copies_dense(new) else 'shared': old})
    return dataclasses.replace(layer, ffn=ffn)

  return source.map_layers(widened)


def copies_dense(ffn: ExpertsConfig) -> bool:
  """Return whether each expert is a copy of a dense part, which nothing else continues."""
  return isinstance(ffn.shared, NoFeedForwardConfig)


def with_first_tokens(source: ModelConfig, target: ModelConfig) -> ModelConfig:
  """Return the source with the target's tokens beside matrices that have none in the source."""
  new, bare = pattentions(target), {*matrices(source)} & {*beside_matrices(target)}
  return with_pattentions(source, {name: new[name] for name in bare})


def new_experts(
  source: ModelConfig, target: ModelConfig
) -> Iterator[tuple[str, Any, ExpertsConfig]]:
  """Yield each layer of the target that gets experts: its name, its old and new feed-forward part.

  A layer that the source lacks, or whose part it lacks, gets none.
  """
  before = source.named_layers
  for name, layer in target.named_layers.items():
    old, new = before[name].ffn if name in before else layer.ffn, layer.ffn
    if not isinstance(new, ExpertsConfig) or isinstance(old, NoFeedForwardConfig):
      continue
    if not isinstance(old, ExpertsConfig) or old.count != new.count:
      yield name, old, new


def old_expert_counts(source: ModelConfig, target: ModelConfig) -> dict[str, tuple[int, int]]:
  """Count the old experts, and the old routes to them, of each layer that gets new experts.

  Beside a dense part that stays on as `shared`, no expert is old; of copies of a dense part one is.
  The router of both is new.

  Returns:
    Both counts by the name of the layer in the target.
  """
  return {
    name: (old.count, old.count) if isinstance(old, ExpertsConfig) else (int(copies_dense(new)), 0)
    for name, old, new in new_experts(source, target)
  }
