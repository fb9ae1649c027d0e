"""Finished runs as points of a law: arrays of sizes, tokens and losses."""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tokenformer_jax.errors import UserError, counted
from tokenformer_jax.laws import formulas, runs
from tokenformer_jax.laws.runs import FinishedRun


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
    value = float(text)
  except ValueError:
    return None
  return value if 0 < value < math.inf else None
