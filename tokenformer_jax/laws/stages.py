"""Read the sizes that a chain may have, with the cost of a token at each."""

import csv
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import growth, points, runs
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
    found = content.get('stages', [content])
    assert found and all('step_seconds' in plan for plan in found)
  except (ValueError, TypeError, KeyError, AssertionError) as error:
    raise UserError(
      f'--stages={path} is not the JSON file of plan; write it by plan --grow=… --json={path}'
    ) from error
  return found


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


def handovers(
  grown: Sequence[FinishedRun], main: Fit, count: str, decay_share: float
) -> tuple[np.ndarray, np.ndarray]:
  """Return the handover c of each grown run, and for each draw the median over the runs.

  Raises:
    UserError: a run has not grown, or its loss is not finite or out of the law's reach.
  """
  central, drawn = [], []
  for run in grown:
    if run.growth is None:
      raise UserError(
        f'--grown names {run.name}, which has not grown; name runs that continue from a growth'
      )
    before = (_count(run.growth.size, count), float(run.growth.tokens))
    after = (_count(run.size, count), float(run.tokens - run.growth.tokens))
    arguments = (before, after, run.loss, decay_share)
    c = float(growth.handover(main.values, *arguments))
    if not np.isfinite(c):
      raise UserError(
        f'the law never reaches the loss {run.loss:.4g} of {run.name} at its size, so it says '
        'nothing about the handover; leave this run out, or fit runs of larger sizes'
      )
    central.append(c)
    drawn.append(growth.handover(main.drawn, *arguments))
  together = np.array(drawn)
  together = np.where(np.isfinite(together), together, np.array(central)[:, None])
  return np.array(central), np.median(together, axis=0)


def _count(size: runs.Size, count: str) -> float:
  return float(size.active if count == 'all' else size.active_without_embeddings)
