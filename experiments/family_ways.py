"""Compare the ways of `tokenformer family` at equal loss for every size.

  python experiments/mixing.py --data=DATA.npz --out=runs/mixing --scales=tiny --parts=tokens
  python experiments/family_ways.py --out=runs/ways --csv=ways.csv     goes on where it stopped
  python experiments/family_ways.py --out=runs/ways --csv=ways.csv --scale=small --rates=1,0.5
  python experiments/family_ways.py --csv=ways.csv --frontier=runs/mixing     the tables

The sizes are the small model of mixing.py with 1, 2 and 4 times the parameter tokens, on 20 tokens
for each parameter of the layers of the largest. Each way is that of the command with its defaults
but `--rate_power=0`, and tries the same rates; the best is that with the least mean over sizes and
seeds. Apart, each size sees as many tokens as it needs for the loss that it has in the family, at
the best rate of its own. Intervals hold 95 % of bootstrap samples of the seeds.
"""

import argparse
import csv
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import mixing_report
import numpy as np
import recipes
import trials
from mixing_report import Runs

from tokenformer_jax.config import Config, WSDSchedule
from tokenformer_jax.family import make, result, ways
from tokenformer_jax.family.jobs import Family
from tokenformer_jax.laws import grid_runs

SIZES = (1.0, 2.0, 4.0)
LENGTH = 20  # in tokens for each parameter of the layers of the largest
RATES = (1.0, 2.0, 0.5)  # times that of the scale
WAYS = {
  'elastic': {},
  'top_down': {},
  'top_down, an eighth of the tokens': {'way': 'top_down', 'share': 1 / 8},
  'bottom_up': {},
  'bottom_up, growths at 1/4 and 1/2': {'way': 'bottom_up', 'grow_at': (1 / 4, 1 / 2)},
}


@dataclasses.dataclass(frozen=True)
class Row:
  """A size of a finished family; its loss is in bits a byte."""

  scale: str
  way: str
  rate: float
  seed: int
  size: float
  loss: float
  flops: float  # of its own runs
  flops_alone: float  # of all runs that it needs


def base(scale: str, rate: float, seed: int) -> Config:
  """Return the config of the smallest size."""
  config = recipes.config(f'{scale} {recipes.BY_TOKENS[0]} adamw')
  rate *= recipes.SCALES[scale].rate
  wsd = WSDSchedule(final_fraction=0.0)
  optim = dataclasses.replace(config.optim, learning_rate=rate, schedule=wsd, new_token_warmup=100)
  train = dataclasses.replace(config.train, seed=seed)
  return dataclasses.replace(config, optim=optim, train=train)


def train(out: Path, scale: str, way: str, rate: float, seed: int) -> list[Row]:
  """Make a family, as far as it is not finished, and return its sizes."""
  tokens = recipes.SCALES[scale].steps(LENGTH) * recipes.TOKENS
  settings = {'way': way, 'rate_power': 0.0, **WAYS[way]}
  family = Family(SIZES, tokens, **settings)
  at = '_'.join(f'{share:g}' for share in (family.share, *family.grow_at))
  folder = str(out.absolute() / scale / f'{rate:g}_{seed}_{at}')
  jobs = ways.list_jobs(base(scale, rate, seed), family, folder)
  if not grid_runs.make_missing(jobs, folder, make.make, make.is_done):
    raise SystemExit('stopped; run the same command to continue')
  bits = 1 / np.log(2)  # A byte is a token.
  return [
    Row(scale, way, rate, seed, one.size, float(one.loss * bits), one.flops, one.flops_alone)
    for one in result.members(jobs, folder)
  ]


def write(rows: Sequence[Row], path: Path) -> None:
  """Write the sizes of all families as CSV."""
  with path.open('w', newline='') as file:
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow([field.name for field in dataclasses.fields(Row)])
    for row in rows:
      writer.writerow([f'{x:.6g}' if isinstance(x, float) else x for x in vars(row).values()])


def read(path: Path) -> list[Row]:
  """Return the sizes that `write` has written."""
  with path.open() as file:
    return [
      Row(
        line.pop('scale'),
        line.pop('way'),
        seed=int(line.pop('seed')),
        **{k: float(v) for k, v in line.items()},
      )
      for line in csv.DictReader(file)
    ]


@dataclasses.dataclass(frozen=True)
class Found:
  """A way at one rate, and its sizes from scratch."""

  rows: Sequence[Row]
  runs: Runs

  @property
  def seeds(self) -> list[int]:
    """The seeds that are finished."""
    return sorted({row.seed for row in self.rows})

  def of(self, size: float, seeds: Sequence[int], name: str = 'loss') -> float:
    """Return the mean of a figure of a size."""
    by_seed = {row.seed: getattr(row, name) for row in self.rows if row.size == size}
    return float(np.mean([by_seed[seed] for seed in seeds]))

  def needed(self, seeds: Sequence[int]) -> list[float]:
    """Return the tokens a parameter with which each size reaches its loss from scratch."""
    return [
      mixing_report.equal_length(*self.runs.frontier(seeds, shape), self.of(size, seeds))
      for size, shape in zip(SIZES, recipes.BY_TOKENS, strict=True)
    ]

  def savings(self, seeds: Sequence[int]) -> tuple[float, float, float]:
    """Return the parts of the FLOPs saved of all sizes, and of the largest and smallest alone."""
    a_length = recipes.SCALES[self.runs.scale].steps(LENGTH) * recipes.TOKENS / LENGTH  # in tokens
    apart = [
      length * a_length * self.runs.flops(shape)
      for length, shape in zip(self.needed(seeds), recipes.BY_TOKENS, strict=True)
    ]
    spent = sum(self.of(size, seeds, 'flops') for size in SIZES)
    largest, smallest = (self.of(size, seeds, 'flops_alone') for size in (SIZES[-1], SIZES[0]))
    return 1 - spent / sum(apart), 1 - largest / apart[-1], 1 - smallest / apart[0]


def found(rows: Sequence[Row], runs: Runs, way: str) -> Iterator[Found]:
  """Yield a way at each rate that has most seeds, the best one first."""
  rates: dict[float, list[Row]] = {}
  for row in rows:
    if row.way == way:
      rates.setdefault(row.rate, []).append(row)
  most = max(map(len, rates.values()), default=0)
  whole = [mine for mine in rates.values() if len(mine) == most]
  for mine in sorted(whole, key=lambda mine: statistics.mean(row.loss for row in mine)):
    yield Found(mine, runs)


def table(rows: Sequence[Row], runs: Runs) -> None:
  """Print the sizes of each way at its best rate, and what they save."""
  lines = [['way', 'rate', *[f'×{size:g}, the same loss from scratch after' for size in SIZES]]]
  lines[0] += ['saves of all', 'of the largest alone', 'of the smallest alone']
  apart = [runs.scratch(shape, LENGTH) for shape in recipes.BY_TOKENS]
  shown = [f'{trials.spread(losses.values())} ({rate})' for rate, losses in apart]
  lines.append(['apart', '', *shown, '', '', ''])
  for way in WAYS:
    for one in found(rows, runs, way):
      line = [way, f'×{one.rows[0].rate:g}']
      for size, needed in zip(SIZES, one.needed(one.seeds), strict=True):
        losses = [one.of(size, [seed]) for seed in one.seeds]
        line.append(f'{trials.spread(losses)}, {needed / LENGTH:.2f}')
      draws = [one.savings(seeds) for seeds in mixing_report.draws(one.seeds)]
      ends = np.quantile(np.array(draws), (0.025, 0.975), axis=0).T
      saved = zip(one.savings(one.seeds), ends, strict=True)
      lines.append([*line, *[mixing_report.saving(value, tuple(end)) for value, end in saved]])
  trials.table(lines)


def main() -> None:
  """Make the families, or print the tables."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=Path)
  parser.add_argument('--csv', type=Path, required=True)
  parser.add_argument('--frontier', type=Path, help='runs of mixing.py; print the tables')
  parser.add_argument('--scale', choices=recipes.SCALES, default='tiny')
  parser.add_argument('--ways', default=';'.join(WAYS), help='separated by ;')
  parser.add_argument('--rates', default=','.join(map(str, RATES)))
  args = parser.parse_args()
  if args.frontier:
    families = read(args.csv)
    for scale in dict.fromkeys(row.scale for row in families):
      rows = [row for row in mixing_report.read(args.frontier) if row.scale == scale]
      print(f'\n{scale}')
      runs = Runs(scale, 'adamw', [row for row in rows if row.optimizer == 'adamw'])
      table([row for row in families if row.scale == scale], runs)
    return
  jax.config.update('jax_compilation_cache_dir', str((args.out / 'compiled').absolute()))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  rows = read(args.csv) if args.csv.exists() else []
  for rate in map(float, args.rates.split(',')):
    for way in args.ways.split(';'):
      for seed in recipes.SEEDS:
        one = (args.scale, way, rate, seed)
        if not any((row.scale, row.way, row.rate, row.seed) == one for row in rows):
          rows += train(args.out, *one)
          write(rows, args.csv)


if __name__ == '__main__':
  main()
