"""Compare the committed prediction of growth at 20 tokens a parameter with the runs made after it.

  python experiments/mixing_prediction.py experiments/mixing_20.csv

`experiments/mixing_predicted.json` has the prediction, of two laws that were fitted to runs at 60
tokens a parameter. The file has the runs at 20, whose figures are those of mixing_report.py. A law
hits where the intervals of 95 % of the prediction and of the runs overlap.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import mixing_report
import numpy as np
import recipes
import trials
from mixing_report import Runs

LENGTH = 20
PREDICTED = Path(__file__).with_name('mixing_predicted.json')
Interval = tuple[float, float]


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


def table(rows: Sequence[mixing_report.Row]) -> None:
  """Print the prediction and the runs at every scale and point."""
  predicted = json.loads(PREDICTED.read_text())
  title = ['scale', 'grown at', 'η', 'by the power', '', 'by the exponential', '']
  lines = [[*title, 'saves', 'by the power', '']]
  for scale in recipes.SCALES:
    mine = [row for row in rows if (row.scale, row.optimizer) == (scale, 'adamw')]
    runs = Runs(scale, 'adamw', mine)
    for point in recipes.POINTS:
      if (found := mixing_report.grown(runs, 'default', LENGTH, point)) is None:
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
  table(mixing_report.read(parser.parse_args().runs))


if __name__ == '__main__':
  main()
