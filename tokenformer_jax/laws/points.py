"""Read runs and CSV files as points of a law: arrays of sizes, tokens and losses."""

import contextlib
import csv
import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tokenformer_jax.errors import UserError, counted, misspelt
from tokenformer_jax.laws import formulas, runs
from tokenformer_jax.laws.runs import FinishedRun

_COLUMNS = ('parameters', 'tokens', 'loss', 'active', 'name')
_NEEDED = _COLUMNS[:3]


@dataclasses.dataclass(frozen=True)
class Points:
  """Runs of several sizes and lengths; each array is [n]."""

  names: tuple[str, ...]  # of the runs
  total: np.ndarray  # all parameters
  active: np.ndarray  # the parameters that a token uses, N of the law
  tokens: np.ndarray  # the tokens seen, D
  loss: np.ndarray  # the final loss, in nats a token
  notes: tuple[str, ...] = ()  # sentences on input that was left out or is unusual

  def __len__(self) -> int:
    """Return the number of points."""
    return len(self.names)

  @property
  def is_dense(self) -> bool:
    """Whether every token uses all parameters of every model."""
    return bool(np.all(self.total == self.active))

  @property
  def flops(self) -> np.ndarray:
    """The FLOPs of training, 6 N D."""
    return formulas.flops(self.active, self.tokens)

  def logs(self) -> dict[str, np.ndarray]:
    """Return the logs of the inputs of the law."""
    inputs = {'n': self.active, 'total': self.total, 'd': self.tokens}
    return {name: np.log(values) for name, values in inputs.items()}


def find_runs(arguments: Sequence[str]) -> list[str]:
  """Return the work directories that the arguments name or hold."""
  found: list[str] = []
  for argument in arguments:
    if not Path(argument).exists() and '://' not in argument:
      raise UserError(f'there is no folder {argument}; name work directories, or a folder of them')
    inside = sorted(_work_directories(argument))
    if not inside and '://' not in argument:
      raise UserError(
        f'{argument} holds no run: no config.json is in it or below it; name work directories of '
        'training runs, or a folder of them'
      )
    found += inside or [argument]
  return list(dict.fromkeys(found))


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
  return _checked(
    Points(
      names=tuple(run.name for run in kept),
      total=_array(run.size.parameters for run in kept),
      active=_array(run.size.active for run in kept),
      tokens=_array(run.tokens for run in kept),
      loss=_array(run.loss for run in kept),
      notes=tuple(notes),
    )
  )


def read_all(arguments: Sequence[str]) -> tuple[list[FinishedRun], list[str]]:
  """Return the runs in work directories, or below folders, and a sentence on those left out.

  Grown runs below a folder are left out, unless all have grown.
  """
  names = find_runs(arguments)
  grown = [name for name in names if name not in arguments and runs.has_grown(name)]
  if not grown or len(grown) == len(names):
    return [runs.read(name) for name in names], []
  text = f'{counted(len(grown), "grown run")} left out: {", ".join(grown)}'
  return [runs.read(name) for name in names if name not in grown], [text]


def check_same_data(found: Sequence[FinishedRun]) -> None:
  """Raise a UserError if two runs have other data, or were trained in other ways."""
  first = found[0]
  for other in found[1:]:
    for name, value in first.data.items():
      if (others := other.data[name]) != value:
        raise UserError(
          f'{first.name} and {other.name} have other values of {name} ({value or "none"} and '
          f'{others or "none"}), so their losses cannot be compared; fit runs of one kind at a time'
        )


def _array(values: Iterable[float]) -> np.ndarray:
  return np.array(list(values), float)


def _checked(points: Points) -> Points:
  """Return the points; raise a UserError if a loss is not a positive number."""
  for name, loss in zip(points.names, points.loss, strict=True):
    if not (math.isfinite(loss) and loss > 0):
      raise UserError(
        f'the loss of {name} is {loss:g}, and a law needs finite losses above 0; leave this run '
        'out, or train it again'
      )
  return points


def read_csv(path: str) -> Points:
  """Read points from a CSV file.

  Columns are parameters, tokens and loss, and may be active (parameters that a token uses) and
  name.
  """
  try:
    with open(path, newline='', encoding='utf-8-sig') as file:
      reader = csv.DictReader(file, skipinitialspace=True)
      rows = list(reader)
      columns = [name.strip() for name in reader.fieldnames or ()]
  except (OSError, UnicodeDecodeError, csv.Error, AttributeError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(f'--csv={path} cannot be read ({reason})') from error
  if not rows:
    raise UserError(
      f'--csv={path} has no rows; it needs a head {",".join(_NEEDED)} and a row a run'
    )
  check_columns(columns, _COLUMNS, f'--csv={path}')
  for line, row in enumerate(rows, start=2):
    if None in row:
      raise UserError(f'line {line} of --csv={path} has more values than there are columns')
  for name in _NEEDED:
    if name not in columns:
      raise UserError(f'--csv={path} has no column {name!r}; it needs {", ".join(_NEEDED)}')
  table = {
    name: _array(_number(path, line, row, name) for line, row in enumerate(rows, start=2))
    for name in columns
    if name != 'name'
  }
  total = table['parameters']
  active = table.get('active', total)
  if np.any(active > total):
    line = int(np.argmax(active > total)) + 2
    raise UserError(
      f'line {line} of --csv={path} has more active parameters than parameters; active counts '
      'those of all parameters that one token uses'
    )
  names = [row.get('name') or f'line {line} of {path}' for line, row in enumerate(rows, start=2)]
  return _checked(
    Points(
      names=tuple(names),
      total=total,
      active=active,
      tokens=table['tokens'],
      loss=table['loss'],
      notes=('a CSV does not say whether the learning rates had decayed, nor on which text',),
    )
  )


def check_columns(columns: Iterable[str], known: Sequence[str], where: str) -> None:
  """Raise a UserError unless the columns of the CSV file `where` are known and different."""
  for name in (columns := list(columns)):
    if other := next((mark for mark in ';\t|' if mark in name), ''):
      raise UserError(f'{where} separates its columns by {other!r}; separate them by commas')
    if columns.count(name) > 1:
      raise UserError(f'{where} has {columns.count(name)} columns {name!r}; give each name once')
    if name not in known:
      near = misspelt(name, known)
      hint = f'did you mean {near!r}?' if near else f'known columns: {", ".join(known)}'
      raise UserError(f'{where} has a column {name!r}; {hint}')


def positive(text: str) -> float | None:
  """Parse a text as a finite number above 0; return None for any other text."""
  try:
    value = float(text)
  except ValueError:
    return None
  return value if 0 < value < math.inf else None


def positives(flag: str, texts: Sequence[str]) -> list[float]:
  """Return the numbers of a flag; raise a UserError for a text that is no finite number above 0."""
  numbers = []
  for text in texts:
    if (number := positive(text)) is None:
      raise UserError(f'--{flag} has {text!r}; it must be numbers above 0, separated by commas')
    numbers.append(number)
  return numbers


def _number(path: str, line: int, row: dict[str, str], name: str) -> float:
  """Return a value of a row; a loss may be NaN, and is checked later."""
  text = next((value for key, value in row.items() if key and key.strip() == name), None)
  if name == 'loss':
    with contextlib.suppress(ValueError):
      if math.isnan(float(text or '')):
        return math.nan
  if (value := positive(text or '')) is None:
    raise UserError(f'line {line} of --csv={path} has {name}={text!r}; it must be a number above 0')
  return value
