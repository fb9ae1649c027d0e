r"""Print the tables of mixing.py, and fit the laws of mixing.

  python experiments/mixing_report.py experiments/mixing_runs.csv
  python experiments/mixing_report.py runs/mixing runs/more --csv=runs.csv

A folder holds `runs.jsonl`; `experiments/mixing_runs.csv` and `mixing_20.csv` have the runs in
docs/growth.md. With `--csv=FILE` the command writes such a file: a line for each run with its
held-out loss, and its training loss at every sixteenth part of its steps.

η is the part of the gap between the small and the large model that a grown one has closed, all
three at their best of equally many rates on the same tokens. A saving compares FLOPs with those of
the large model from scratch at equal loss, between the lengths of its frontier. Intervals hold 95 %
of bootstrap samples of the seeds, in which all three models of a seed stay together.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import recipes
import trials

from tokenformer_jax.model import flops
from tokenformer_jax.training import sizes

PARTS = 16  # of a curve in the CSV file
DRAWS = 2000
COLUMNS = ('scale', 'optimizer', 'arm', 'length', 'point', 'rate', 'seed', 'loss', 'curve')


@dataclasses.dataclass(frozen=True)
class Row:
  """A run that has ended; `arm` is the shape for runs from scratch, whose point is 0 or 1."""

  scale: str
  optimizer: str
  arm: str
  length: float
  point: float
  rate: float
  seed: int
  loss: float
  curve: tuple[float, ...] = ()


Losses = Mapping[int, float]  # by seed


def read(path: Path) -> list[Row]:
  """Return the runs of a file or folder."""
  if path.suffix == '.csv':
    with path.open() as file:
      return [_from_csv(line) for line in csv.DictReader(file)]
  found: dict[str, Row] = {}
  for line in (path / 'runs.jsonl').read_text().splitlines():
    row = _from_record(json.loads(line))
    if row is not None:
      found.setdefault(json.loads(line)['name'], row)
  return list(found.values())


def _from_record(record: Mapping) -> Row | None:
  """Return a run of `mixing.py`; None for one that another continues."""
  program, arm, *numbers = record['name'].split('/')
  if arm == 'trunk' or 'between' in record['name'] or 'annealed/' in record['name']:
    return None
  scale, *shape, optimizer = program.split()
  length, *point, rate, seed = numbers
  loss = float('inf') if record['loss'] is None else record['loss']
  curve = record['curve']
  at = [curve[(len(curve) - 1) * part // PARTS] for part in range(1, PARTS + 1)]
  return Row(
    scale,
    optimizer,
    shape[0] + arm.removeprefix('scratch') if shape else arm,
    float(length),
    float(point[0]) if point else 0.0,
    float(rate),
    int(seed),
    loss,
    tuple(at),
  )


def _from_csv(line: Mapping[str, str]) -> Row:
  numbers = {name: float(line[name]) for name in ('length', 'point', 'rate', 'loss')}
  names = {name: line[name] for name in ('scale', 'optimizer', 'arm')}
  curve = tuple(map(float, line['curve'].split()))
  return Row(**names, **numbers, seed=int(line['seed']), curve=curve)


def write(rows: Sequence[Row], path: Path) -> None:
  """Write the runs as CSV."""
  with path.open('w', newline='') as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(COLUMNS)
    for row in rows:
      values = [getattr(row, name) for name in COLUMNS[:-1]]
      values = [f'{value:g}' if isinstance(value, float) else value for value in values]
      curve = ' '.join(f'{value:.3f}' for value in row.curve)
      writer.writerow([*values[:-1], f'{row.loss:.5f}', curve])


@dataclasses.dataclass(frozen=True)
class Runs:
  """The runs of one scale and optimizer."""

  scale: str
  optimizer: str
  rows: Sequence[Row]

  @property
  def main(self) -> float:
    """The length of most grown runs; that of the scale if there are none."""
    grown = Counter(row.length for row in self.rows if row.point)
    return max(grown, key=grown.get, default=recipes.SCALES[self.scale].main)

  def best(self, arm: str, length: float, point: float = 0.0) -> tuple[float, Losses]:
    """Return the best rate by the mean over seeds, and the losses at it; {} if there are none."""
    by_rate: dict[float, dict[int, float]] = {}
    for row in self.rows:
      if (row.arm, row.length, row.point) == (arm, length, point):
        by_rate.setdefault(row.rate, {})[row.seed] = row.loss
    most = max(map(len, by_rate.values()), default=0)
    whole = {rate: losses for rate, losses in by_rate.items() if len(losses) == most}
    if not whole:
      return 0.0, {}
    rate = min(whole, key=lambda rate: statistics.mean(whole[rate].values()))
    return rate, whole[rate]

  def scratch(self, shape: str, length: float) -> tuple[str, Losses]:
    """Return the best rate and decay of a size from scratch in words, and the losses at it."""
    found = {}
    for way in ('', ' without decay'):
      rate, losses = self.best(shape + way, length)
      found[f'×{rate:g}{way}'] = losses
    most = max(map(len, found.values()))
    found = {name: losses for name, losses in found.items() if losses and len(losses) == most}
    if not found:
      return '–', {}
    return min(found.items(), key=lambda item: statistics.mean(item[1].values()))

  def lengths(self, arm: str) -> list[float]:
    """Return the lengths of an arm."""
    return sorted({row.length for row in self.rows if row.arm == arm})

  def points(self, arm: str, length: float) -> list[float]:
    """Return the points of growth of an arm."""
    return sorted({row.point for row in self.rows if (row.arm, row.length) == (arm, length)})

  def flops(self, shape: str) -> float:
    """Return the FLOPs of a token."""
    config = sizes.fill_in(recipes.config(f'{self.scale} {shape} {self.optimizer}'))
    return flops.train_flops(config.model, config.data.sequence_length)

  def cost(self, arm: str, length: float, point: float) -> float:
    """Return what a grown run costs, in FLOPs of a token of its last model times the length."""
    recipe, steps = recipes.RECIPES[arm], recipes.SCALES[self.scale].steps
    shapes = (recipe.trunk.shape, *recipe.between, recipe.shape)
    parts = [point * number / (len(shapes) - 1) for number in range(len(shapes))]
    at = [steps(part * length) / steps(length) for part in parts] + [1.0]
    spent = [(at[n + 1] - at[n]) * self.flops(shape) for n, shape in enumerate(shapes)]
    if recipe.teacher:  # whose forward pass is a third of its step
      spent.append((1 - at[1]) * self.flops(recipe.trunk.shape) / 3)
    return length * sum(spent) / self.flops(recipe.shape)

  @property
  def untuned(self) -> float:
    """How much less the large model loses at a rate that only some seeds have tried; 0: not less.

    It is the mean over lengths of the difference on the same seeds.
    """
    found = []
    for length in self.lengths(recipes.LARGE):
      rate, losses = self.best(recipes.LARGE, length)
      tried = [row for row in self.rows if (row.arm, row.length) == (recipes.LARGE, length)]
      for other in {row.rate for row in tried if row.rate != rate}:
        few = {row.seed: row.loss for row in tried if row.rate == other}
        if len(few) < len(losses):
          found.append(statistics.mean(losses[seed] - loss for seed, loss in few.items()))
    return max(0.0, statistics.mean(found)) if found else 0.0

  def frontier(
    self, seeds: Sequence[int], shape: str = recipes.LARGE
  ) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of a size from scratch and its mean losses at them."""
    known = [(length, self.scratch(shape, length)[1]) for length in self.lengths(shape)]
    known = [(length, losses) for length, losses in known if losses]
    means = [np.mean([losses[seed] for seed in seeds]) for _, losses in known]
    return np.array([length for length, _ in known]), np.array(means)


def equal_length(lengths: np.ndarray, losses: np.ndarray, loss: float) -> float:
  """Return the length at which the large model reaches a loss, by lines in the log of the length.

  Beyond the ends, the last line goes on.
  """
  logs = np.log(lengths)
  at = int(np.clip(np.searchsorted(-losses, -loss), 1, len(losses) - 1))
  slope = (logs[at] - logs[at - 1]) / (losses[at] - losses[at - 1])
  return float(np.exp(logs[at] + slope * (loss - losses[at])))


def loss_at(lengths: Sequence[float], losses: Sequence, length: float) -> Any:
  """Return the loss at a length, by lines in the log of the length; the first and last go on."""
  at = int(np.clip(np.searchsorted(lengths, length), 1, len(lengths) - 1))
  part = np.log(length / lengths[at - 1]) / np.log(lengths[at] / lengths[at - 1])
  return losses[at - 1] + part * (losses[at] - losses[at - 1])


@dataclasses.dataclass(frozen=True)
class Grown:
  """An arm at a length and a point: its figures, and their intervals."""

  rate: float
  losses: Losses
  closure: float
  closure_interval: tuple[float, float]
  saving: float
  saving_interval: tuple[float, float]

  @property
  def shown(self) -> list[str]:
    """Return η and the saving with their intervals."""
    return [
      closure(self.closure, self.closure_interval),
      saving(self.saving, self.saving_interval),
    ]


def closure(value: float, interval: tuple[float, float]) -> str:
  """Return η with its interval."""
  return f'{value:.2f} ({interval[0]:.2f} … {interval[1]:.2f})'.replace('-', '−')


def saving(value: float, interval: tuple[float, float]) -> str:
  """Return a saving with its interval."""
  return f'{percent(value)} ({percent(interval[0])} … {percent(interval[1])})'


def grown(
  runs: Runs,
  arm: str,
  length: float,
  point: float,
  *,
  tuned: bool = False,
) -> Grown | None:
  """Return the figures of an arm; None if runs are missing.

  With `tuned`, the large model from scratch loses less by `Runs.untuned` at all lengths.
  """
  rate, losses = runs.best(arm, length, point)
  recipe = recipes.RECIPES[arm]
  last = recipe.large
  small, large = (runs.scratch(shape, length)[1] for shape in (recipe.small, last))
  seeds = sorted(losses.keys() & small.keys() & large.keys())
  if not seeds or len(runs.lengths(last)) < 2:
    return None
  cost, less = runs.cost(arm, length, point), runs.untuned if tuned else 0.0

  def figures(chosen: Sequence[int]) -> tuple[float, float]:
    mean = [np.mean([side[seed] for seed in chosen]) for side in (small, large, losses)]
    closed = (mean[0] - mean[2]) / (mean[0] - mean[1] + less)
    lengths, scratch = runs.frontier(chosen, last)
    return closed, 1 - cost / equal_length(lengths, scratch - less, mean[2])

  drawn = np.array([figures(chosen) for chosen in draws(seeds)])
  low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
  closed, saved = figures(seeds)
  return Grown(rate, losses, closed, (low[0], high[0]), saved, (low[1], high[1]))


def draws(seeds: Sequence[int]) -> Iterator[tuple[int, ...]]:
  """Yield bootstrap samples of the seeds: all of them if they are few."""
  if len(seeds) <= 4:
    yield from itertools.product(seeds, repeat=len(seeds))
    return
  rng = np.random.default_rng(0)
  yield from (tuple(rng.choice(seeds, len(seeds))) for _ in range(DRAWS))


def percent(value: float) -> str:
  """Return a share in words, with the sign of docs/growth.md."""
  return f'{100 * value:.0f} %'.replace('-', '−')


def frontier_table(all_runs: Sequence[Runs]) -> None:
  """Print the sizes from scratch."""
  rows = [['from scratch, bits a byte', 'tokens a parameter', 'small', 'large', 'best rates']]
  for runs in all_runs:
    for length in runs.lengths(recipes.LARGE):
      found = [runs.scratch(shape, length) for shape in (recipes.SMALL, recipes.LARGE)]
      rates = ', '.join(rate for rate, _ in found)
      losses = [trials.spread(one.values()) for _, one in found]
      rows.append([f'{runs.scale}, {runs.optimizer}', f'{length:g}', *losses, rates])
  trials.table(rows)


def recipe_table(runs: Runs, *, tuned: bool) -> None:
  """Print all arms at the length that all have, by the point of growth."""
  length = runs.main
  rows = [[f'{runs.scale}, {length:g} tokens a parameter, large − {tuned * runs.untuned:.3f}']]
  rows[0] += [f'{word} at {p:.0%}' for p in recipes.POINTS for word in ('η', 'saves')]
  for arm in recipes.RECIPES:
    row = [arm]
    for point in recipes.POINTS:
      found = grown(runs, arm, length, point, tuned=tuned)
      if found is None:
        row += ['', '']
        continue
      row += found.shown
    if any(row[1:]):
      rows.append(row)
  trials.table(rows)


def against_default(runs: Runs) -> None:
  """Print each arm's paired difference from the default, at its best rate."""
  length = runs.main
  rows = [['bits a byte less than the default', *[f'at {p:.0%}' for p in recipes.POINTS]]]
  for arm in recipes.RECIPES:
    row = [arm]
    for point in recipes.POINTS:
      _, losses = runs.best(arm, length, point)
      _, default = runs.best('default', length, point)
      seeds = losses.keys() & default.keys()
      row.append(trials.spread(default[s] - losses[s] for s in seeds) if seeds else '')
    if arm != 'default' and any(row[1:]):
      rows.append(row)
  trials.table(rows)


def ahead_of_small(runs: Runs, arm: str, length: float, point: float) -> list[float]:
  """Return how many bits an arm is ahead of the small model with as many FLOPs, for each seed.

  The small model lies between the lengths of its frontier from scratch, or at most half as far
  again behind the last one; [] if it does not.
  """
  losses, recipe = runs.best(arm, length, point)[1], recipes.RECIPES[arm]
  seeds = sorted(losses.keys() & runs.scratch(recipe.small, length)[1].keys())
  if not seeds:
    return []
  known = runs.frontier(seeds, recipe.small)[0]
  per_token = runs.flops(recipe.small) / runs.flops(recipe.shape)
  equal = runs.cost(arm, length, point) / per_token
  if len(known) < 2 or equal > 1.5 * known[-1]:
    return []
  return [loss_at(*runs.frontier([seed], recipe.small), equal) - losses[seed] for seed in seeds]


def against_small(runs: Runs) -> None:
  """Print how far each arm is ahead of the small model with as many FLOPs, where that is known."""
  rows = [['bits a byte less than the small model with as many FLOPs', 'at', '']]
  for arm in recipes.RECIPES:
    for point in runs.points(arm, runs.main):
      if ahead := ahead_of_small(runs, arm, runs.main, point):
        rows.append([arm, f'{point:g}', trials.spread(ahead)])
  trials.table(rows)


def default_table(all_runs: Sequence[Runs], arm: str, *, tuned: bool) -> None:
  """Print an arm at all lengths and points."""
  rows = [[arm, 'tokens a parameter', 'grown at', 'rate', 'bits a byte', 'η', 'saves']]
  for runs in all_runs:
    for length in runs.lengths(arm):
      for point in runs.points(arm, length):
        if (found := grown(runs, arm, length, point, tuned=tuned)) is None:
          continue
        row = [f'{runs.scale}, {runs.optimizer}', f'{length:g}', f'{point:.0%}', f'×{found.rate:g}']
        rows.append([*row, trials.spread(found.losses.values()), *found.shown])
  if len(rows) > 1:
    trials.table(rows)


# What is left of the gap, 1 − η, as a function of the point f, the length D, and one or two
# parameters: name, function, starts.
Form = tuple[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], np.ndarray]
FORMS: tuple[Form, ...] = (
  ('power of f: f^γ', lambda t, f, d: f ** t[0], np.array([2.5])),
  (
    'exponential in tokens: exp(−(1 − f) D / M)',
    lambda t, f, d: np.exp(-(1 - f) * d / np.exp(t[0])),
    np.array([3.0]),
  ),
  (
    'exponential, M ∝ D^p',
    lambda t, f, d: np.exp(-(1 - f) * d / np.exp(t[0] + t[1] * np.log(d))),
    np.array([1.0, 0.5]),
  ),
  (
    'power of f, γ ∝ D^p',
    lambda t, f, d: f ** np.exp(t[0] + t[1] * np.log(d)),
    np.array([0.5, 0.1]),
  ),
  (
    'power of tokens since: (1 + (1 − f) D / M)^−γ',
    lambda t, f, d: (1 + (1 - f) * d / np.exp(t[0])) ** -np.exp(t[1]),
    np.array([2.0, 0.5]),
  ),
  (
    'power of f beside its decay: (f / (f + 0.9 (1 − f)))^γ',
    lambda t, f, d: (f / (f + np.exp(t[1]) * (1 - f))) ** np.exp(t[0]),
    np.array([1.0, 0.0]),
  ),
)


def forms_table(all_runs: Sequence[Runs], arm: str = 'default', *, tuned: bool) -> None:
  """Print how well each form fits 1 − η, and how it predicts runs that were left out."""
  found = [
    (runs.scale, length, point, one.closure)
    for runs in all_runs
    for length in runs.lengths(arm)
    for point in runs.points(arm, length)
    if (one := grown(runs, arm, length, point, tuned=tuned)) is not None
  ]
  if len(found) < 3:
    return
  groups = np.array([f'{scale} {length}' for scale, length, _, _ in found])
  length, point, closure = np.array([row[1:] for row in found], float).T
  rows = [['what is left of the gap, 1 − η', 'parameters', 'error of η', 'of η left out']]
  for name, form, start in FORMS:
    theta = fit_form(form, start, point, length, 1 - closure)
    error = np.sqrt(np.mean((form(theta, point, length) - (1 - closure)) ** 2))
    left = []
    for group in dict.fromkeys(groups):
      kept, out = groups != group, groups == group
      if not kept.any():
        continue
      other = fit_form(form, start, point[kept], length[kept], 1 - closure[kept])
      left += list(form(other, point[out], length[out]) - (1 - closure[out]))
    parameters = ', '.join(f'{value:.3g}' for value in theta)
    rest = f'{np.sqrt(np.mean(np.square(left))):.3f}' if left else ''
    rows.append([name, parameters, f'{error:.3f}', rest])
  trials.table(rows)


def fit_form(form: Callable, start: np.ndarray, f: np.ndarray, d: np.ndarray, left: np.ndarray):
  """Return the parameters of least squares."""
  from scipy import optimize  # noqa: PLC0415 (a dependency of jax)

  return optimize.least_squares(lambda t: form(t, f, d) - left, start).x


def main() -> None:
  """Print the tables; write the CSV file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('runs', type=Path, nargs='+')
  parser.add_argument('--csv', type=Path)
  args = parser.parse_args()
  rows = [row for path in args.runs for row in read(path)]
  if args.csv:
    write(rows, args.csv)
  kinds = dict.fromkeys((row.scale, row.optimizer) for row in rows)
  all_runs = [
    Runs(*kind, [row for row in rows if (row.scale, row.optimizer) == kind]) for kind in kinds
  ]
  frontier_table(all_runs)
  for runs in all_runs:
    against_default(runs)
    against_small(runs)
  for tuned in (False, True) if any(runs.untuned for runs in all_runs) else (False,):
    for runs in all_runs:
      recipe_table(runs, tuned=tuned)
    for arm in ('default', recipes.TO_EIGHT):
      default_table(all_runs, arm, tuned=tuned)
    forms_table([runs for runs in all_runs if runs.optimizer == 'adamw'], tuned=tuned)


if __name__ == '__main__':
  main()
