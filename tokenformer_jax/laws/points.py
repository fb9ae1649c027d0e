"""Finished runs, or the rows of a table, as points of a law: arrays of sizes, tokens and losses."""

import csv
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.laws import formulas, runs
from tokenformer_jax.laws.runs import FinishedRun

_NUMBERS = ('parameters', 'tokens', 'loss')  # the columns that a table must have


@dataclasses.dataclass(frozen=True)
class Points:
  """Runs of several sizes and lengths; each array is [n]."""

  names: tuple[str, ...]  # of the runs
  parameters: np.ndarray  # N of the law
  tokens: np.ndarray  # the tokens seen, D
  loss: np.ndarray  # the final loss, in nats a token
  notes: tuple[str, ...] = ()  # sentences on runs that were left out or are unusual

  def __len__(self) -> int:
    """Return the number of points."""
    return len(self.names)

  @property
  def flops(self) -> np.ndarray:
    """The FLOPs of training, 6 N D."""
    return formulas.flops(self.parameters, self.tokens)

  def logs(self) -> dict[str, np.ndarray]:
    """Return the logs of the inputs of the law."""
    return {'n': np.log(self.parameters), 'd': np.log(self.tokens)}


def find_runs(arguments: Sequence[str]) -> list[str]:
  """Return the work directories that the arguments name or hold."""
  directories: list[str] = []
  for argument in arguments:
    if not Path(argument).exists() and '://' not in argument:
      raise UserError(f'there is no folder {argument}; name work directories, or a folder of them')
    inside = sorted(_work_directories(argument))
    if not inside and '://' not in argument:
      raise UserError(
        f'{argument} holds no run: no config.json is in it or below it; name work directories of '
        'training runs, or a folder of them'
      )
    directories += inside or [argument]
  return list(dict.fromkeys(directories))


def _work_directories(folder: str) -> Iterator[str]:
  """Yield the folders with a `config.json`, at or below a folder of this machine."""
  for where, below, files in os.walk(folder):
    if 'config.json' in files:
      below.clear()
      yield where


def from_runs(finished: Iterable[FinishedRun], notes: Sequence[str] = ()) -> Points:
  """Return finished runs as points.

  Runs whose rate had not decayed are left out, unless none had.
  """
  kept = sorted(finished, key=lambda run: (run.size.parameters, run.tokens))
  for run in kept:
    check_usable(run)
    if run.growth:
      raise UserError(
        f'{run.name} has grown, and a law needs runs of one size each; name it by --grown, or '
        'leave it out'
      )
  check_same_data(kept)
  notes = list(notes)
  notes += [
    f'the runs have {name}={value}: this is a law of such runs, not of plain ones'
    for name, value in kept[0].data.items()
    if value and name in runs.SPECIAL_TRAINING
  ]
  if stable := [run.name for run in kept if not run.decayed]:
    some = len(stable) < len(kept)
    what = 'left out' if some else 'taken as they are, above what a decay would reach'
    listed = f'{counted(len(stable), "run")} whose learning rate had not decayed'
    notes.append(f'{listed} {"is" if len(stable) == 1 else "are"} {what}')
    kept = [run for run in kept if run.decayed] if some else kept
  return Points(
    names=tuple(run.name for run in kept),
    parameters=np.array([run.size.parameters for run in kept], float),
    tokens=np.array([run.tokens for run in kept], float),
    loss=np.array([run.loss for run in kept], float),
    notes=tuple(notes),
  )


def read_table(path: str) -> Points:
  """Read a CSV table of runs: `parameters`, `tokens` and `loss` of each, and maybe its `name`.

  Other columns are not read, and a note names them.

  Raises:
    UserError: the file cannot be read, or a column or a value is missing or wrong.
  """
  try:
    with open(path, newline='', encoding='utf-8-sig') as file:
      reader = csv.reader(file, skipinitialspace=True, strict=True)
      lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
  except (OSError, UnicodeDecodeError, csv.Error) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(f'{path} cannot be read as a CSV file in UTF-8 ({reason})') from error
  header, *rows = [(line, row) for line, row in lines if any(row)] or [(1, [])]
  columns = header[1]
  _check_columns(columns, path)
  runs_of_table: list[tuple[float, float, float, str]] = []
  for line, row in rows:
    if len(row) != len(columns):
      raise UserError(
        f'line {line} of {path} has {counted(len(row), "value")} for '
        f'{counted(len(columns), "column")}; write numbers without thousands separators'
      )
    cells = dict(zip(columns, row, strict=True))
    numbers = [positive(cells[name]) for name in _NUMBERS]
    for name, number in zip(_NUMBERS, numbers, strict=True):
      if number is None:
        raise UserError(
          f'line {line} of {path} has {name} {cells[name]!r}; it must be a finite number above 0, '
          'without thousands separators'
        )
    size, tokens, loss = (number or math.nan for number in numbers)
    runs_of_table.append((size, tokens, loss, cells.get('name') or f'line {line}'))
  runs_of_table.sort()
  sizes, tokens, losses = np.array([run[:3] for run in runs_of_table], float).reshape(-1, 3).T
  notes = [
    'a table does not state the data, the unit of losses or the learning rates: its losses are '
    'taken as nats a token on one validation text, of dense runs whose rate had decayed'
  ]
  if other := [column for column in columns if column not in (*_NUMBERS, 'name')]:
    notes.append(f'columns of the table that are not read: {", ".join(other)}')
  return Points(tuple(run[3] for run in runs_of_table), sizes, tokens, losses, tuple(notes))


def _check_columns(columns: Sequence[str], path: str) -> None:
  """Check the header of a table: known columns, each once, and those of numbers present."""
  allowed = f'a table has the columns {", ".join(_NUMBERS)}, separated by commas, and may have name'
  for column in columns:
    if columns.count(column) > 1:
      raise UserError(f'{path} has {counted(columns.count(column), "column")} {column}; {allowed}')
  if missing := [name for name in _NUMBERS if name not in columns]:
    present = ', '.join(map(repr, columns)) or 'no header'
    raise UserError(f'{path} has no column {missing[0]}, but {present}; {allowed}: rename them')


def check_usable(run: FinishedRun) -> None:
  """Check that a run has a finite loss and a dense model."""
  if not (math.isfinite(run.loss) and run.loss > 0):
    raise UserError(
      f'the loss of {run.name} is {run.loss:g}, and a law needs finite losses above 0; leave this '
      'run out, or train it again'
    )
  if run.size.active != run.size.parameters:
    raise UserError(
      f'{run.name} is a mixture of experts, and the law is one of dense models; leave it out'
    )


def read_all(arguments: Sequence[str]) -> tuple[list[FinishedRun], list[str]]:
  """Return the runs in work directories, or below folders, and a sentence on those left out.

  Grown runs below a folder are left out, unless all have grown.
  """
  finished = [runs.read(name) for name in find_runs(arguments)]
  grown = [run.name for run in finished if run.growth and run.name not in arguments]
  if not grown or len(grown) == len(finished):
    return finished, []
  text = f'{counted(len(grown), "grown run")} left out: {", ".join(grown)}'
  return [run for run in finished if run.name not in grown], [text]


def check_same_data(finished: Sequence[FinishedRun]) -> None:
  """Raise a UserError if two runs have other data, or were trained differently."""
  first = finished[0]
  for other in finished[1:]:
    for name, value in first.data.items():
      if (others := other.data[name]) != value:
        raise UserError(
          f'{first.name} and {other.name} have other values of {name} ({value or "none"} and '
          f'{others or "none"}), so their losses cannot be compared; fit runs of one kind at a time'
        )


def positive(text: str) -> float | None:
  """Parse a text as a finite number above 0; return None for any other text."""
  try:
    value = math.nan if '_' in text else float(text)  # Python reads 1_000 as a number.
  except ValueError:
    return None
  return value if 0 < value < math.inf else None
