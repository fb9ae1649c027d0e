r"""Measure what families of sizes save, at equal loss for every size.

  python experiments/families.py --csv=experiments/growth_runs.csv       the tables in docs
  python experiments/families.py --csv=runs.csv --out=runs/growth --scales=tiny
  python experiments/families.py --csv=runs.csv --out=runs/growth --parts=methods

Apart, each size sees as many tokens as it needs for the loss that it has in the family: lengths
between those of its own frontier from scratch (growth.py), at its best rate.

  GROWTHS  four sizes from one trunk that grows from each to the next; each size but the last leaves
           the trunk for its decay. The law of mixing says the same from the sizes apart alone.
  methods  those of `tokenformer family` for 1, 2 and 4 times the parameter tokens, with its
           defaults but `--rate_power=0`

A family has one rate, the best by the mean over sizes and seeds. Intervals hold 95 % of bootstrap
samples of the seeds.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import growth
import numpy as np
import trials
from growth import MAIN, Losses, Maker, Row, Runs

from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family import make, result
from tokenformer_jax.family.jobs import Family as Sizes
from tokenformer_jax.laws import grid_runs
from tokenformer_jax.laws.mixing import TYPICAL

FAMILY = ('1x1', '2x1', '2x2', '4x2')  # each with twice the parameters of the one before
BY_TOKENS, SIZES = ('2x1', '2x2', '2x4'), (1.0, 2.0, 4.0)
GROWTHS = {  # the shares of the tokens at which the trunk grows to each size
  'family': (0.0, 1 / 6, 1 / 3, 1 / 2),
  'late family': (0.0, 1 / 4, 1 / 2, 3 / 4),
  'early and late family': (0.0, 0.1, 0.65, 0.775),
}
METHODS = {
  'bottom_up': {},
  'bottom_up, growths at 1/4 and 1/2': {'method': 'bottom_up', 'grow_at': (1 / 4, 1 / 2)},
  'top_down': {},
  'top_down, an eighth of the tokens': {'method': 'top_down', 'share': 1 / 8},
  'elastic': {},
}
METHODS_CSV = Path(__file__).with_name('family_methods.csv')


def make_family(maker: Maker, name: str) -> Iterator[Row]:
  """Yield the sizes of a family: a trunk that grows, and the decays of all but the smallest.

  After n growths the rate has the factor x^(n/3), with each x of the rates.
  """
  begin, steps = maker.begin(MAIN), maker.scale.steps
  at = [steps(share * MAIN) for share in GROWTHS[name]]
  for seed, factor in itertools.product(maker.seeds, maker.rates):
    source = maker.constant(f'{name}/constant/{seed}', FAMILY[0], 1.0, seed, [at[1]])[at[1]]
    for n, shape in enumerate(FAMILY[1:], 1):
      rate, ends = factor ** (n / (len(FAMILY) - 1)), [*at[n + 1 : n + 2], begin]
      path = f'{name}/{factor:g}/constant {shape}/{seed}'
      trunk = maker.constant(path, shape, rate, seed, ends, source)
      arm, point = f'{name} {shape}', round(at[n] / steps(MAIN), 3)
      row = maker.decayed(f'{arm}/{factor:g}', shape, rate, trunk[begin], MAIN)
      yield dataclasses.replace(row, arm=arm, point=point, rate=factor)
      source = trunk[ends[0]]


@dataclasses.dataclass(frozen=True)
class Family:
  """A family of four sizes at one rate (0: by the law), and the losses of each size by seed."""

  runs: Runs
  name: str
  rate: float
  losses: Sequence[Losses]

  @property
  def seeds(self) -> list[int]:
    """The seeds that all sizes have, also from scratch."""
    apart = [self.runs.best(shape, MAIN)[1] for shape in FAMILY]
    return sorted(set.intersection(*(set(one) for one in (*self.losses, *apart))))

  @property
  def starts(self) -> list[float]:
    """The tokens a parameter at which each size begins."""
    steps = growth.SCALES[self.runs.scale].steps
    return [MAIN * steps(share * MAIN) / steps(MAIN) for share in GROWTHS[self.name]]

  def needed(self, seeds: Sequence[int]) -> list[float]:
    """Return the length with which each size reaches its loss from scratch."""
    means = [float(np.mean([losses[seed] for seed in seeds])) for losses in self.losses]
    return needed(self.runs, FAMILY, means, seeds)

  def savings(self, seeds: Sequence[int]) -> tuple[float, float, float]:
    """Return the shares of the FLOPs saved of all sizes, and of the largest and smallest alone."""
    costs = [self.runs.flops(shape) for shape in FAMILY]
    lengths, starts = self.needed(seeds), self.starts
    spent = sum((MAIN - start) * cost for start, cost in zip(starts, costs, strict=True))
    apart = [length * cost for length, cost in zip(lengths, costs, strict=True)]
    alone = 1 - self.chain(len(costs) - 1) / apart[-1]
    return 1 - spent / sum(apart), alone, 1 - MAIN / lengths[0]

  def chain(self, n: int) -> float:
    """Return what it costs to make size n alone, in FLOPs of a token times the length."""
    starts, ends = self.starts[: n + 1], [*self.starts[1 : n + 1], MAIN]
    legs = zip(starts, ends, FAMILY, strict=False)
    return sum((end - start) * self.runs.flops(shape) for start, end, shape in legs)

  def size_before(self, n: int, seeds: Sequence[int]) -> float:
    """Return the loss of the size before n, from scratch with the FLOPs of the chain to size n."""
    equal = self.chain(n) / self.runs.flops(FAMILY[n - 1])
    return growth.loss_at(*self.runs.frontier(seeds, FAMILY[n - 1]), equal)


def needed(
  runs: Runs, shapes: Sequence[str], losses: Sequence[float], seeds: Sequence[int]
) -> list[float]:
  """Return the length with which each shape reaches a loss from scratch."""
  return [
    growth.equal_length(*runs.frontier(seeds, shape), loss)
    for shape, loss in zip(shapes, losses, strict=True)
  ]


def families(runs: Runs, name: str) -> list[Family]:
  """Return a family at each rate, the best rate first."""
  made, (smallest, *larger) = [], FAMILY

  def losses(arm: str, rate: float) -> Losses:
    rows = [row for row in runs.rows if (row.arm, row.length, row.rate) == (arm, MAIN, rate)]
    return {row.seed: row.loss for row in rows}

  for rate in sorted({row.rate for row in runs.rows if row.arm == f'{name} {larger[0]}'}):
    sides = [losses(smallest, 1.0), *(losses(f'{name} {shape}', rate) for shape in larger)]
    if all(sides):
      made.append(Family(runs, name, rate, sides))
  return sorted(made, key=lambda one: statistics.mean(x for s in one.losses for x in s.values()))


def by_law(runs: Runs, name: str) -> Family:
  """Return a family whose sizes have the losses that the law of mixing says.

  The gap between two sizes from scratch closes as a power of the share at which the trunk grew from
  one to the other.
  """
  apart = [runs.best(shape, MAIN)[1] for shape in FAMILY]
  left, losses = dict.fromkeys(apart[0], 0.0), [apart[0]]
  for small, large, share in zip(apart, apart[1:], GROWTHS[name][1:], strict=False):
    left = {seed: left[seed] + (small[seed] - large[seed]) * share**TYPICAL for seed in small}
    losses.append({seed: large[seed] + left[seed] for seed in small})
  return Family(runs, name, 0.0, losses)


def report_families(runs: Runs) -> None:
  """Print the sizes of each family at its best rate, and what families save at each rate."""
  head = ['size', 'FLOPs a token', 'grown at', 'bits a byte', 'from scratch', 'the same loss at']
  rows = [[*head, 'the size before, as many FLOPs']]
  saves = [['family', 'all four save', 'the largest alone', 'the smallest alone']]
  for name in GROWTHS:
    made = families(runs, name)
    for family in made[:1]:
      seeds, lengths = family.seeds, family.needed(family.seeds)
      for n, shape in enumerate(FAMILY):
        cost = runs.flops(shape) / runs.flops(FAMILY[0])
        both = [family.losses[n], runs.best(shape, MAIN)[1]]
        shown = [trials.spread(side[seed] for seed in seeds) for side in both]
        grown = [f'{family.starts[n] / MAIN:.2f}', f'{family.size_before(n, seeds):.3f}']
        start, before = grown if n else ('', '')
        line = [f'{runs.scale} {shape}', f'{cost:.2f}', start, *shown]
        rows.append([*line, f'{lengths[n]:.1f}', before])
    for family in (*made, by_law(runs, name)):
      figures = growth.with_interval(family.savings, family.seeds)
      how = f'×{family.rate:g}' if family.rate else f'by the law, γ = {TYPICAL:g}'
      saves.append([f'{runs.scale}, {name}, {how}', *(growth.saving(*one) for one in figures)])
  trials.table(rows)
  trials.table(saves)


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of a family by `tokenformer family`; its loss is in bits a byte."""

  scale: str
  method: str
  rate: float
  seed: int
  size: float
  loss: float
  flops: float  # of its own runs
  flops_alone: float  # of all runs that it needs


def make_method(maker: Maker, name: str) -> Iterator[Size]:
  """Yield the sizes of families by one method."""
  tokens = maker.scale.steps(MAIN) * growth.TOKENS
  for rate, seed in itertools.product(maker.rates, maker.seeds):
    changes = {'optim__learning_rate': maker.scale.rate * rate, 'train__seed': seed}
    changes['optim__schedule'] = {'kind': 'wsd', 'final_fraction': 0.0}
    base = growth.config(maker.name, BY_TOKENS[0], train__sample_tokens=0, **changes)
    path = maker.branches.out / maker.name / 'families' / name / f'{rate:g}_{seed}'
    folder = str(path.absolute())
    family = Sizes(SIZES, tokens, **{'method': name, 'rate_power': 0.0, **METHODS[name]})
    jobs = jobs_lib.list_jobs(base, family, folder)
    if not grid_runs.make_missing(jobs, folder, make.make, make.is_done):
      raise SystemExit('stopped; run the same command to continue')
    for one in result.members(jobs, folder):
      figures = (one.size, float(one.loss / np.log(2)), one.flops, one.flops_alone)
      yield Size(maker.name, name, rate, seed, *figures)  # A byte is a token.


def report_methods(runs: Runs, sizes: Sequence[Size]) -> None:
  """Print the sizes of each method at its best rate, and what they save."""
  lines = [['method', 'rate', *[f'×{size:g}, the same loss from scratch after' for size in SIZES]]]
  lines[0] += ['saves of all', 'of the largest alone', 'of the smallest alone']
  apart = [runs.best(shape, MAIN) for shape in BY_TOKENS]
  shown = [f'{trials.spread(losses.values())} (×{rate:g})' for rate, losses in apart]
  lines.append(['apart', '', *shown, '', '', ''])
  for method in METHODS:
    by_rate: dict[float, dict[tuple[float, int], Size]] = {}
    for one in sizes:
      if (one.scale, one.method) == (runs.scale, method):
        by_rate.setdefault(one.rate, {})[one.size, one.seed] = one
    most = max(map(len, by_rate.values()), default=0)
    whole = {rate: mine for rate, mine in by_rate.items() if len(mine) == most}
    for rate in sorted(whole, key=lambda r: statistics.mean(x.loss for x in whole[r].values())):
      lines.append([method, f'×{rate:g}', *_method_row(runs, whole[rate])])
  trials.table(lines)


def _method_row(runs: Runs, sizes: dict[tuple[float, int], Size]) -> list[str]:
  seeds = sorted({seed for _, seed in sizes})
  length_tokens = growth.SCALES[runs.scale].steps(MAIN) * growth.TOKENS / MAIN

  def mean(name: str, size: float, chosen: Sequence[int]) -> float:
    return float(np.mean([getattr(sizes[size, seed], name) for seed in chosen]))

  def lengths(chosen: Sequence[int]) -> list[float]:
    return needed(runs, BY_TOKENS, [mean('loss', size, chosen) for size in SIZES], chosen)

  def savings(chosen: Sequence[int]) -> tuple[float, float, float]:
    both = zip(lengths(chosen), BY_TOKENS, strict=True)
    apart = [length * length_tokens * runs.flops(shape) for length, shape in both]
    spent = sum(mean('flops', size, chosen) for size in SIZES)
    smallest, *_, largest = (mean('flops_alone', size, chosen) for size in SIZES)
    return 1 - spent / sum(apart), 1 - largest / apart[-1], 1 - smallest / apart[0]

  row = []
  for size, length in zip(SIZES, lengths(seeds), strict=True):
    row.append(f'{trials.spread(sizes[size, s].loss for s in seeds)}, {length / MAIN:.2f}')
  return row + [growth.saving(*one) for one in growth.with_interval(savings, seeds)]


def main() -> None:
  """Make the runs, and print the tables."""
  parser = growth.flags(__doc__.splitlines()[0])
  parser.add_argument('--parts', default='late family', help='GROWTHS or `methods`; by commas')
  parser.add_argument('--methods', default=';'.join(METHODS), help='separated by ;')
  parser.add_argument('--methods_csv', type=Path, default=METHODS_CSV)
  args = parser.parse_args()
  rows = trials.read(args.csv, Row) if args.csv and args.csv.exists() else []
  sizes = trials.read(args.methods_csv, Size) if args.methods_csv.exists() else []
  for maker in growth.makers(args) if args.out else ():
    for part in args.parts.split(','):
      for shape in BY_TOKENS if part == 'methods' else FAMILY:
        rows += maker.scratch(shape, maker.scale.lengths)
      if part == 'methods':
        for name in args.methods.split(';'):
          sizes += make_method(maker, name)
        trials.write(list(dict.fromkeys(sizes)), args.methods_csv)
      else:
        rows += make_family(maker, part)
    if args.csv:
      trials.write(trials.latest(rows), args.csv)
  for runs in growth.runs_by_scale(rows):
    if all(runs.best(shape, MAIN)[1] for shape in FAMILY):
      report_families(runs)
    if all(runs.best(shape, MAIN)[1] for shape in BY_TOKENS):
      report_methods(runs, sizes)


if __name__ == '__main__':
  main()
