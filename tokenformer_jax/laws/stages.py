"""Read the sizes that a chain may have, with the cost of a token at each."""

import csv
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import growth, mixing, points, runs
from tokenformer_jax.laws.analysis import Analysis
from tokenformer_jax.laws.fit import Fit
from tokenformer_jax.laws.growth import Stage
from tokenformer_jax.laws.runs import FinishedRun

_COLUMNS = ('parameters', 'tokens_per_second', 'chips')
_HOUR = 3600.0


def from_sizes(sizes: Sequence[float], analysis: Analysis) -> tuple[list[Stage], str]:
  """Return stages whose tokens cost FLOPs, and the unit."""
  found = []
  for size in sizes:
    cost = float(analysis.compute.flops(np.float64(size), np.float64(1)))
    found.append(Stage(size, (cost, cost)))
  return found, 'FLOPs'


def read_file(path: str) -> tuple[list[Stage], str]:
  """Return stages whose tokens cost chip-hours, and the unit.

  The file is the JSON file of `plan --grow`, whose step times are a range, or a CSV file with the
  columns parameters, tokens_per_second and, if there are several, chips.

  Raises:
    UserError: the file is neither.
  """
  try:
    with open(path, encoding='utf-8-sig') as file:
      text = file.read()
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(f'--stages={path} cannot be read ({reason})') from error
  if text.lstrip().startswith(('{', '[')):
    return [_parse_plan(plan, path) for plan in _plans(text, path)], 'chip-hours'
  reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
  rows = list(reader)
  points.check_columns(reader.fieldnames or (), _COLUMNS, f'--stages={path}')
  if not rows or not {'parameters', 'tokens_per_second'} <= rows[0].keys():
    raise UserError(
      f'--stages={path} is neither the JSON file of plan --grow nor a CSV file with the columns '
      'parameters and tokens_per_second'
    )
  return [_parse_row(row, line, path) for line, row in enumerate(rows, start=2)], 'chip-hours'


def _plans(text: str, path: str) -> list[dict[str, Any]]:
  try:
    content = json.loads(text)
  except ValueError:
    content = None
  found = content.get('stages', [content]) if isinstance(content, dict) else None
  if not (isinstance(found, list) and found and all(map(_is_plan, found))):
    raise UserError(
      f'--stages={path} is not the JSON file of plan; write it by plan --grow=… --json={path}'
    )
  return found


def _is_plan(value: Any) -> bool:
  return isinstance(value, dict) and 'step_seconds' in value


def _parse_plan(plan: dict[str, Any], path: str) -> Stage:
  try:
    data = plan['config']['data']
    tokens = data['batch_size'] * data['sequence_length']
    fast, slow = (plan['chips'] * seconds / tokens / _HOUR for seconds in plan['step_seconds'])
    return Stage(float(plan['parameters']), (fast, slow))
  except (KeyError, TypeError, ValueError) as error:
    raise UserError(f'--stages={path} lacks {error} of a plan; write it anew by plan') from error


def _parse_row(row: dict[str, str], line: int, path: str) -> Stage:
  numbers = []
  for name in _COLUMNS:
    text = row.get(name) or ('1' if name == 'chips' else '')
    if (value := points.positive(text)) is None:
      raise UserError(
        f'line {line} of --stages={path} has {name}={text!r}; it must be a number above 0'
      )
    numbers.append(value)
  parameters, speed, chips = numbers
  cost = chips / speed / _HOUR
  return Stage(parameters, (cost, cost))


Before = tuple[float, float]  # a size and tokens


def check_grown(grown: Sequence[FinishedRun]) -> None:
  """Check that runs have grown, and ended with a decay and with a loss that is a number above 0.

  Raises:
    UserError: one has not.
  """
  for run in grown:
    if run.growth is None:
      raise UserError(
        f'--grown names {run.name}, which has not grown; name runs that continue from a growth'
      )
    if not run.decayed:
      raise UserError(
        f'--grown names {run.name}, whose learning rate has not decayed, so its loss is above what '
        'a decay would reach; name a run that ends with its decay'
      )
    if not (math.isfinite(run.loss) and run.loss > 0):
      raise UserError(
        f'--grown names {run.name}, whose loss is {run.loss:g}, and a law needs finite losses '
        'above 0; leave this run out, or train it again'
      )


def legs(grown: Sequence[FinishedRun], count: str) -> list[tuple[Before, Before, float]]:
  """Return for each run the size and the tokens before its last growth, those after it, its loss.

  Raises:
    UserError: `check_grown` raised it.
  """
  check_grown(grown)
  found = []
  for run in grown:
    before = (_count(run.growth.size, count), float(run.growth.tokens))
    found.append((before, (_count(run.size, count), float(run.tokens - before[1])), run.loss))
  return found


def handovers(
  grown: Sequence[FinishedRun], main: Fit, count: str, decay_share: float
) -> tuple[np.ndarray, np.ndarray]:
  """Return the handover c of each grown run, and for each draw the median over the runs.

  Raises:
    UserError: `check_grown` raised it, or a loss is out of the law's reach.
  """
  central, drawn = [], []
  for run, (before, after, loss) in zip(grown, legs(grown, count), strict=True):
    c = float(growth.handover(main.values, before, after, loss, decay_share))
    if not np.isfinite(c):
      raise UserError(
        f'the law never reaches the loss {run.loss:.4g} of {run.name} at its size, so it says '
        'nothing about the handover; leave this run out, or fit runs of larger sizes'
      )
    central.append(c)
    drawn.append(growth.handover(main.drawn, before, after, loss, decay_share))
  together = np.array(drawn)
  together = np.where(np.isfinite(together), together, np.array(central)[:, None])
  return np.array(central), np.median(together, axis=0)


def left_out(
  grown: Sequence[FinishedRun], main: Fit, count: str, decay_share: float
) -> tuple[float, float]:
  """Return the errors of the losses of grown runs by the others, by mixing and by the handover.

  They are root mean squares of the log of the loss; infinite where the handover is out of reach.
  """
  known, one = legs(grown, count), {name: np.array([value]) for name, value in main.values.items()}
  errors: list[tuple[float, float]] = []
  for number, (before, after, loss) in enumerate(known):
    others = known[:number] + known[number + 1 :]
    gamma = mixing.exponent(one, others)
    with np.errstate(invalid='ignore'):
      c = np.median([growth.handover(main.values, *other, decay_share) for other in others])
      assumed = growth.Assumptions(float(c), decay_share)
      by_loss = growth.chain_loss(one, [before, after], assumed)
    by_mixing = mixing.chain_loss(one, [before, after], gamma)
    errors.append(tuple(float(np.log(x[0] / loss)) for x in (by_mixing, by_loss)))
  by_mixing, by_loss = np.sqrt(np.mean(np.square(errors), axis=0))
  return float(by_mixing), float(by_loss) if np.isfinite(by_loss) else float('inf')


def _count(size: runs.Size, count: str) -> float:
  return float(size.active if count == 'all' else size.active_without_embeddings)
