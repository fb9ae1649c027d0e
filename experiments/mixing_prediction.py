"""Compare the committed prediction of growth at 20 tokens a parameter with the runs made after it.

  python experiments/mixing_prediction.py experiments/mixing_20.csv experiments/mixing_runs.csv

`experiments/mixing_predicted.json` has the prediction, of two laws that were fitted to runs at 60
tokens a parameter. The first file has the runs at 20, whose η is that of mixing_report.py. Where it
has no other length from scratch, a saving takes how far the large model falls from 20 to 40 tokens
from the second file, at the rate ½ that has three seeds at both. A law hits where the intervals of
95 % of the prediction and of the runs overlap.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import mixing
import mixing_report
import numpy as np
import trials
from mixing_report import Frontier, Grown, Runs

LENGTH, LONGER, RATE = 20, 40, 0.5
PREDICTED = Path(__file__).with_name('mixing_predicted.json')
Interval = tuple[float, float]


def frontier(runs: Runs, others: Sequence[mixing_report.Row]) -> Frontier | None:
  """Return the large model at both lengths if the runs have only one; None if they have more."""
  if len(runs.lengths(mixing.LARGE)) != 1:
    return None

  def at(length: float) -> dict[int, float]:
    chosen = (runs.scale, runs.optimizer, mixing.LARGE, length, RATE)
    keys = ((row.scale, row.optimizer, row.arm, row.length, row.rate) for row in others)
    return {row.seed: row.loss for row, key in zip(others, keys, strict=True) if key == chosen}

  short, long, (_, best) = at(LENGTH), at(LONGER), runs.scratch(mixing.LARGE, LENGTH)

  def of(seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    first = np.mean([best[seed] for seed in seeds])
    fall = np.mean([short[seed] - long[seed] for seed in seeds])
    return np.array([LENGTH, LONGER], float), np.array([first, first - fall])

  return of


def measured(runs: Runs, others: Sequence[mixing_report.Row], point: float) -> Grown | None:
  """Return the figures of the default growth at 20 tokens a parameter."""
  return mixing_report.grown(runs, 'default', LENGTH, point, frontier=frontier(runs, others))


def exponential(predicted: dict, point: float) -> tuple[float, Interval]:
  """Return η by the exponential in tokens, and its interval."""
  low, high = predicted['mixing_time_interval']
  at = [
    1 - float(np.exp(-(1 - point) * LENGTH / time))
    for time in (predicted['mixing_time'], high, low)
  ]
  return at[0], (at[1], at[2])


def overlap(one: Interval, other: Interval) -> bool:
  """Return whether two intervals have a value in common."""
  return max(one[0], other[0]) <= min(one[1], other[1])


def table(rows: Sequence[mixing_report.Row], others: Sequence[mixing_report.Row]) -> None:
  """Print the prediction and the runs at every scale and point."""
  predicted = json.loads(PREDICTED.read_text())
  title = ['scale', 'grown at', 'η', 'by the power', '', 'by the exponential', '']
  lines = [[*title, 'saves', 'by the power', '']]
  for scale in mixing.SCALES:
    mine = [row for row in rows if (row.scale, row.optimizer) == (scale, 'adamw')]
    runs = Runs(scale, 'adamw', mine)
    for point in mixing.POINTS:
      if (found := measured(runs, others, point)) is None:
        continue
      expected = predicted[f'at {LENGTH} tokens a parameter'][f'{scale} at {point:g}']
      closed, saved = found.shown
      line = [scale, f'{point:g}', closed]
      by_power = expected['closure'], expected['closure_interval']
      for value, interval in (by_power, exponential(predicted, point)):
        hit = 'hit' if overlap(interval, found.closure_interval) else 'miss'
        line += [mixing_report.closure(value, interval), hit]
      line.append(saved)
      if 'saving' in expected:
        interval = expected['saving_interval']
        hit = 'hit' if overlap(interval, found.saving_interval) else 'miss'
        line += [mixing_report.saving(expected['saving'], interval), hit]
      lines.append([*line, *[''] * (len(lines[0]) - len(line))])
  trials.table(lines)


def main() -> None:
  """Print the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('runs', type=Path)
  parser.add_argument('others', type=Path)
  args = parser.parse_args()
  table(mixing_report.read(args.runs), mixing_report.read(args.others))


if __name__ == '__main__':
  main()
