"""The shares of the sources of a mixture (`data.mixture`), fixed or by stages of steps.

A source has its own store, order and epochs, and a share of the samples: its weight. The weights of
all sources add up to 1 at every step.
"""

import dataclasses
import fractions
from typing import Any, NamedTuple

from tokenformer_jax.config.data import DataConfig, Sources, TextConfig
from tokenformer_jax.config.points import parse
from tokenformer_jax.config.section import Str, section
from tokenformer_jax.errors import UserError

_TOLERANCE = fractions.Fraction(1, 10**6)  # of a sum of weights, for thirds in decimals
BLOCK = 10_000  # samples of the order, of which each source has a whole number
_OF_SOURCE = ('source', 'validation_source', 'rows', 'store')


@section
class MixedConfig(TextConfig):
  """The config of a source of a mixture, as that of a run on it alone.

  Attributes:
    mixture: the other sources.
    name: the name of the source.
  """

  name: Str = ''

  def setting(self, key: str) -> str:
    return f'config.data.mixture.{self.name}.{key}' if key in _OF_SOURCE else super().setting(key)


def source_configs(data: DataConfig) -> dict[str, MixedConfig]:
  """Return the config of each source of a mixture by name, in the order of the alphabet."""
  fields: dict[str, Any] = {
    field.name: getattr(data, field.name) for field in dataclasses.fields(data)
  }
  configs = {}
  for name in sorted(data.mixture):
    own = {key: getattr(data.mixture[name], key) for key in _OF_SOURCE}
    others = Sources({key: one for key, one in data.mixture.items() if key != name})
    values: dict[str, Any] = fields | own | {'mixture': others}
    values |= {'packing': 'cut'} if own['rows'] == 'text' else {'document_separator': ''}
    configs[name] = MixedConfig(**values, name=name)
  return configs


class Shares(NamedTuple):
  """The weights of all sources, each a number of samples in a block of `BLOCK`.

  Attributes:
    names: the sources, in the order of the alphabet, so that the order of a file has no effect.
    steps: where weights begin, ascending; the first ones hold from the start.
    counts: the samples of each source in a block, from each of these steps on.
  """

  names: tuple[str, ...]
  steps: tuple[int, ...]
  counts: tuple[tuple[int, ...], ...]

  @property
  def last(self) -> dict[str, float]:
    """The weights in the end, by source."""
    counts = zip(self.names, self.counts[-1], strict=True)
    return {name: count / BLOCK for name, count in counts}


def shares(sources: Sources) -> Shares:
  """Return the weights of a mixture."""
  names = tuple(sorted(sources))
  points = {name: _points(sources, name) for name in names}
  steps = sorted({step for of_source in points.values() for step in of_source})
  rows = []
  for step in steps:
    row = [_at(points[name], step) for name in names]
    if abs(sum(row) - 1) > _TOLERANCE:
      spelled = ', '.join(f'{name} {float(w):g}' for name, w in zip(names, row, strict=True))
      where = f' at step {step}' if len(steps) > 1 else ''
      raise UserError(
        f'the weights of config.data.mixture add up to {float(sum(row)):g}{where} ({spelled}); '
        'make them add up to 1'
      )
    rows.append(_counts(row))
  return Shares(names, tuple(steps), tuple(rows))


def _counts(weights: list[fractions.Fraction]) -> tuple[int, ...]:
  """Return the samples of each source in a block; the largest remainders are rounded up."""
  exact = [weight * BLOCK / sum(weights) for weight in weights]
  counts = [int(count) for count in exact]
  remainders = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
  for i in remainders[: BLOCK - sum(counts)]:
    counts[i] += 1
  return tuple(counts)


def _points(sources: Sources, name: str) -> dict[int, fractions.Fraction]:
  """Return the weight of a source from each of its points on; a fixed weight is one at step 0."""
  source, path = sources[name], f'config.data.mixture.{name}'
  setting, points = f'{path}.weight is {source.weight}', {0: fractions.Fraction(str(source.weight))}
  if source.weight_by_step:
    setting = f'{path}.weight_by_step is {source.weight_by_step!r}'
    if source.weight:
      raise UserError(f'{setting}, and {path}.weight is {source.weight}; give one of them')
    points = parse(
      source.weight_by_step, f'{path}.weight_by_step', fractions.Fraction, '0:0.5 1000:0.9'
    )
  if not 0 <= min(points.values()) <= max(points.values()) <= 1:
    raise UserError(f'{setting}; a weight must be from 0 to 1')
  if any(0 < weight * BLOCK < 1 for weight in points.values()):
    raise UserError(f'{setting}; a weight must be 0 or at least {1 / BLOCK:g}')
  return points


def _at(points: dict[int, fractions.Fraction], step: int) -> fractions.Fraction:
  """Return the weight of a source at a step."""
  return points[max((known for known in points if known <= step), default=min(points))]


def check(data: DataConfig) -> None:
  """Check the sources of a mixture and their weights, and that no other source is named."""
  path = 'config.data.mixture'
  for name, source in data.mixture.items():
    if not source.source:
      raise UserError(
        f"{path}.{name}.source is '', which names no source; name one, or leave {name} out"
      )
  shares(data.mixture)
  for key in ('source', 'validation_source'):
    value, default = getattr(data, key), getattr(TextConfig(), key)
    if value not in (default, *(getattr(source, key) for source in data.mixture.values())):
      raise UserError(
        f'config.data.{key} is {value}, which is not in {path} and would not be read; add it '
        f'there, or set config.data.{key}={default or repr(default)}'
      )
