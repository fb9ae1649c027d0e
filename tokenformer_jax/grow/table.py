"""The table of changes that the grow command prints."""

import collections

from tokenformer_jax.config import (
  MeshConfig,
  ModelConfig,
  OptimConfig,
  PattentionConfig,
  pattentions,
  pattern,
  token_counts,
  token_groups,
  with_groups,
)
from tokenformer_jax.grow import widen
from tokenformer_jax.model import flops, models
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps.step import bytes_on_a_device

_PLAIN = OptimConfig()
_TILE = 128  # the width of a TPU's matrix unit


def render(
  before: ModelConfig, after: ModelConfig, length: int, optim: OptimConfig = _PLAIN
) -> str:
  """Return a table of quantities before and after a growth.

  Args:
    before: the model before it.
    after: the model after it.
    length: the positions that FLOPs are for.
    optim: names the optimizer whose state takes memory beside the parameters.
  """
  rows = [('', 'before', 'after', '')]
  if before.groups != after.groups:
    rows += _layers(before, after)
  if old := pattentions(before):
    new = pattentions(after)
    for name, one in old.items():
      rows.append(_row(f'{name} tokens', one.tokens, new[name].tokens))
    for name, one in old.items():
      rows.append(_groups_row(name, one, new[name]))
  else:
    names = ('width', 'heads', 'feed-forward width')
    rows += map(_row, names, widen.sizes(before), widen.sizes(after))
  definitions = [models.define(model) for model in (before, after)]
  rows.append(_row('parameters', *(one.count for one in definitions)))
  one_device = sharding.abstract_mesh(MeshConfig(), 1)
  sizes = (sum(bytes_on_a_device(one_device, one, optim)) for one in definitions)
  rows.append(_row(f'MiB with state of {optim.name}', *(size / 2**20 for size in sizes)))
  work = (flops.train_flops(model, length) / 1e6 for model in (before, after))
  rows.append(_row(f'training MFLOP {flops.unit(before)}', *work))
  widths = [max(len(row[i]) for row in rows) for i in range(4)]
  return '\n'.join(
    '  '.join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip()
    for row in rows
  )


def _groups_row(
  name: str, before: PattentionConfig, after: PattentionConfig
) -> tuple[str, str, str, str]:
  """Return the row of a projection's reference counts, or of its groups if there are several."""
  both = [with_groups(one, token_groups(one)) for one in (before, after)]
  if not any(one.groups for one in both):
    return _row(f'{name} reference count (τ²)', *(one.reference for one in both))
  texts = (one.groups or f'{one.tokens}:{one.reference}' for one in both)
  return (f'{name} groups (tokens:τ²)', *texts, '')


def _layers(before: ModelConfig, after: ModelConfig) -> list[tuple[str, str, str, str]]:
  """Return rows of the number of layers, and of those of each name if there are several."""
  old, new = (collections.Counter(pattern.names(model.groups)) for model in (before, after))
  named = [_row(f'{name} layers', old[name], count) for name, count in new.items()]
  return [_row('layers', before.depth, after.depth), *(named if len(new) > 1 else [])]


def advice(model: ModelConfig) -> list[str]:
  """Return a sentence for every count of tokens that does not fill a TPU's matrix unit."""
  return [
    f"{name}={count} is not a multiple of {_TILE}, the width of a TPU's matrix unit; "
    f'{-(-count // _TILE) * _TILE} costs it the same time'
    for name, count in token_counts(model).items()
    if count % _TILE
  ]


def _row(name: str, before: float, after: float) -> tuple[str, str, str, str]:
  factor = '' if before == after or not before else f'× {after / before:.2f}'
  texts = (f'{x:,}' if isinstance(x, int) else f'{x:,.1f}' for x in (before, after))
  return (name, *texts, factor)
