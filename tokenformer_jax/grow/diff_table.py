"""The table of changes that the grow command prints."""

import collections
from collections.abc import Mapping

from tokenformer_jax.config import (
  AdamWConfig,
  MeshConfig,
  ModelConfig,
  OptimConfig,
  PattentionConfig,
  groups_as_text,
  pattentions,
  pattern,
)
from tokenformer_jax.config.model import BASE
from tokenformer_jax.grow.steps import widen
from tokenformer_jax.model import flops, models
from tokenformer_jax.parallel import messages, sharding
from tokenformer_jax.steps.step import bytes_on_a_device

_PLAIN = AdamWConfig()


def render(
  before: ModelConfig, after: ModelConfig, length: int, optim: OptimConfig = _PLAIN
) -> str:
  """Return a table of quantities before and after a growth; FLOPs are for `length` positions."""
  rows = [('', 'before', 'after', '')]
  if before.repeats != after.repeats:
    rows += _layers(before, after)
  rows += _experts(before, after)
  if new := pattentions(after):
    old = pattentions(before)
    former = {name: _former(name, old, new) for name in new}
    for name, now in new.items():
      was = former[name]
      rows.append(_row(f'{name} tokens', was.tokens if was else 0, now.tokens))
    rows += [_groups_row(name, former[name], now) for name, now in new.items()]
  elif not after.experts or before.width != after.width:
    rows += _widths(widen.sizes(before), widen.sizes(after))
  definitions = [models.define(model) for model in (before, after)]
  rows.append(_row('parameters', *(definition.count for definition in definitions)))
  one_device = sharding.abstract_mesh(MeshConfig(), 1)
  sizes = (sum(bytes_on_a_device(one_device, model, optim)) for model in definitions)
  rows.append(_row(f'MiB with state of {optim.kind}', *(size / 2**20 for size in sizes)))
  work = (flops.train_flops(model, length) / 1e6 for model in (before, after))
  rows.append(_row(f'training MFLOP {flops.unit(before)}', *work))
  return messages.aligned(rows)


def _former(
  name: str, old: Mapping[str, PattentionConfig], new: Mapping[str, PattentionConfig]
) -> PattentionConfig | None:
  """Return what a projection was, also before experts were added beside it or of it."""
  part, _, kind = name.rpartition('.')
  if kind == 'expert' and f'{part}.shared' in new:
    return old.get(name)
  names = (name, part, f'{name}.shared', f'{name}.expert')
  return next((old[one] for one in names if one in old), None)


def _widths(before: widen.Sizes, after: widen.Sizes) -> list[tuple[str, str, str, str]]:
  """Return rows of the sizes of a Transformer."""
  rows = [_row('width', before.width, after.width), _row('heads', before.heads, after.heads)]
  if (after.key_heads, before.key_heads) != (after.heads, before.heads):
    rows.append(_row('heads of keys', before.key_heads, after.key_heads))
  widths = dict.fromkeys(zip(before.hidden, after.hidden, strict=True))
  return [*rows, *(_row('feed-forward width', old, new) for old, new in widths)]


def _groups_row(
  name: str, before: PattentionConfig | None, after: PattentionConfig
) -> tuple[str, str, str, str]:
  """Return the row of a projection's reference counts, or of its groups if there are several."""
  old, new = () if before is None else before.groups, after.groups
  if max(len(old), len(new)) > 1:
    return f'{name} groups (tokens:τ²)', groups_as_text(old), groups_as_text(new), ''
  return _row(f'{name} reference count (τ²)', old[0].reference if old else 0, new[0].reference)


def _experts(before: ModelConfig, after: ModelConfig) -> list[tuple[str, str, str, str]]:
  """Return rows of the numbers of experts, and of the experts of a token where that changes."""
  rows = []
  for name, new in after.experts.items():
    path, old = 'ffn' if name == BASE else f'{name}.ffn', before.experts.get(name)
    rows.append(_row(f'{path} experts', old.count if old else 0, new.count))
    chose = old.router.top_k if old else 0
    if chose != new.router.top_k:
      rows.append(_row(f'{path} experts of a token', chose, new.router.top_k))
  return rows


def _layers(before: ModelConfig, after: ModelConfig) -> list[tuple[str, str, str, str]]:
  """Return rows of the number of layers, and of the layers of each name if there are several."""
  old, new = (collections.Counter(pattern.names(model.repeats)) for model in (before, after))
  named = [_row(f'{name} layers', old[name], count) for name, count in new.items()]
  own = [sum(one.rows * len(one.layers) for one in model.repeats) for model in (before, after)]
  tied = own != [before.depth, after.depth]
  return [
    _row('layers', before.depth, after.depth),
    *([_row('layers with arrays of their own', *own)] if tied else []),
    *(named if len(new) > 1 else []),
  ]


def _row(name: str, before: float, after: float) -> tuple[str, str, str, str]:
  factor = '' if before == after or not before else f'× {after / before:.2f}'
  old, new = (f'{x:,}' if isinstance(x, int) else f'{x:,.1f}' for x in (before, after))
  return name, old, new, factor
