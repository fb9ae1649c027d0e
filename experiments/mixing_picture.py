"""Draw what growth by the default saves, and how far it is ahead of the small model trained on.

  python experiments/mixing_picture.py experiments/mixing_20.csv docs/growth_saves.png

The figures are those of mixing_report.py, with intervals of 95 % of a saving and the standard
deviation of what a grown model is ahead.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import mixing_report
import recipes
from mixing_report import Runs


def draw(all_runs: Sequence[Runs], path: Path) -> None:
  """Draw both by the share of the tokens before growth, at the length of most grown runs."""
  import matplotlib  # noqa: PLC0415 (only for the picture)

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt  # noqa: PLC0415

  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
  for number, runs in enumerate(all_runs):
    shift = 0.008 * (number - (len(all_runs) - 1) / 2)
    label = f'{runs.scale}: {recipes.SCALES[runs.scale].parameters:,} parameters in its layers'
    style = {'fmt': 'osD'[number % 3], 'color': f'C{number}', 'capsize': 3}
    found = {
      point: mixing_report.grown(runs, 'default', runs.main, point)
      for point in runs.points('default', runs.main)
    }
    for point, one in found.items():
      if one is not None:
        value, (low, high) = 100 * one.saving, (100 * end for end in one.saving_interval)
        error = [[value - low], [high - value]]
        left.errorbar([point + shift], [value], yerr=error, label=label, **style)
      if ahead := mixing_report.ahead_of_small(runs, 'default', runs.main, point):
        mean, deviation = statistics.mean(ahead), statistics.stdev(ahead)
        right.errorbar([point + shift], [mean], yerr=[deviation], label=label, **style)
  left.set(ylabel='saved FLOPs at equal loss, %')
  right.set(ylabel='bits a byte less than the small\nmodel with as many FLOPs')
  for axis in (left, right):
    axis.axhline(0, color='0.8', zorder=0)
    axis.set(xlabel='share of the tokens before growth', xlim=(0, 0.8))
  marks, labels = left.get_legend_handles_labels()
  known = dict(zip(labels, marks, strict=True))
  # Below both panels, where no mark is.
  figure.legend(known.values(), known.keys(), frameon=False, loc='outside lower center', ncols=3)
  figure.savefig(path, dpi=110)


def main() -> None:
  """Draw the picture."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('runs', type=Path)
  parser.add_argument('picture', type=Path)
  args = parser.parse_args()
  rows = [row for row in mixing_report.read(args.runs) if row.optimizer == 'adamw']
  all_runs = [
    Runs(scale, 'adamw', [row for row in rows if row.scale == scale]) for scale in recipes.SCALES
  ]
  draw([runs for runs in all_runs if runs.rows], args.picture)


if __name__ == '__main__':
  main()
