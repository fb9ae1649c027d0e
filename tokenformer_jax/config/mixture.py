"""The shares of the sources of a mixture (`data.mixture`), fixed or over steps.

A source has its own store, order and epochs, and a part of the samples of every batch: its weight.
The weights of all sources add up to 1 at every step.
"""

import dataclasses
import fractions
import re
from typing import NamedTuple

from tokenformer_jax.config.data import DataConfig, Sources, TextConfig
from tokenformer_jax.config.run import Config
from tokenformer_jax.config.section import Str, section
from tokenformer_jax.errors import UserError

_TOLERANCE = fractions.Fraction(1, 10**6)  # of a sum of weights, for thirds in decimals
_MOST = 10**9  # the largest denominator of a weight
_OF_SOURCE = ('source', 'validation_source', 'rows', 'store')
_POINT = re.compile(r'(\d+):(\d*\.?\d+|\d+\.)')


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
  fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
  configs = {}
  for name in sorted(data.mixture):
    own = {key: getattr(data.mixture[name], key) for key in _OF_SOURCE}
    others = Sources({key: one for key, one in data.mixture.items() if key != name})
    configs[name] = MixedConfig(**fields | own | {'mixture': others}, name=name)
  return configs


class Shares(NamedTuple):
  """The weights of all sources, linear between points and constant outside of them.

  Attributes:
    names: the sources, in the order of the alphabet, so that the order of a file has no effect.
    steps: the steps of the points, ascending.
    weights: the weight of each source, by point; they add up to 1 exactly.
  """

  names: tuple[str, ...]
  steps: tuple[int, ...]
  weights: tuple[tuple[fractions.Fraction, ...], ...]

  @property
  def last(self) -> dict[str, float]:
    """The weights at the last point, by source."""
    return dict(zip(self.names, map(float, self.weights[-1]), strict=True))


def shares(sources: Sources) -> Shares:
  """Return the weights of a mixture.

  Raises:
    UserError: weights have another form, or do not add up to 1.
  """
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
    rows.append(tuple(weight / sum(row) for weight in row))
  return Shares(names, tuple(steps), tuple(rows))


def _points(sources: Sources, name: str) -> dict[int, fractions.Fraction]:
  """Return the weight of a source by step, at its points; a fixed weight is one at step 0."""
  source, path = sources[name], f'config.data.mixture.{name}'
  if not source.weight_by_step:
    return {0: fractions.Fraction(str(source.weight)).limit_denominator(_MOST)}
  found = f'{path}.weight_by_step is {source.weight_by_step!r}'
  if source.weight:
    raise UserError(f'{found}, and {path}.weight is {source.weight}; give one of them')
  points = [_POINT.fullmatch(point) for point in source.weight_by_step.split()]
  steps = [int(point[1]) for point in points if point]
  if not points or None in points or sorted(set(steps)) != steps:
    raise UserError(
      f'{found}; it must be points STEP:WEIGHT with ascending steps, for example "0:0.5 1000:0.9"'
    )
  weights = [fractions.Fraction(point[2]).limit_denominator(_MOST) for point in points]
  if max(weights) > 1:
    raise UserError(f'{found}; a weight must be at most 1')
  return dict(zip(steps, weights, strict=True))


def _at(points: dict[int, fractions.Fraction], step: int) -> fractions.Fraction:
  """Return the weight of a source at a step."""
  before = max((known for known in points if known <= step), default=min(points))
  after = min((known for known in points if known >= step), default=max(points))
  if before >= after:
    return points[before]
  part = fractions.Fraction(step - before, after - before)
  return points[before] + part * (points[after] - points[before])


def check(config: Config) -> None:
  """Check the sources of a mixture: their names, their weights, and the keys that they replace.

  Raises:
    UserError: they do not fit together.
  """
  data, path = config.data, 'config.data.mixture'
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
  if data.rows != 'text':
    raise UserError(
      f'config.data.rows is {data.rows}, and each source of {path} has rows of its own; set '
      f'{path}.NAME.rows'
    )
  if data.store:
    raise UserError(
      f'config.data.store is {data.store}, one token store, and each source of {path} has its own; '
      f'name each in {path}.NAME.store'
    )
  for part, key in (('train', 'epochs'), ('optim', 'warmup_epochs')):
    if value := getattr(getattr(config, part), key):
      raise UserError(
        f'config.{part}.{key} is {value}, and each source of {path} has epochs of its own; give '
        f'{key.replace("epochs", "steps")} or {key.replace("epochs", "examples")}'
      )
