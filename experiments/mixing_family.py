"""Print what a family of four sizes from one trunk saves, at equal loss for every size.

  python experiments/mixing.py --data=DATA.npz --out=runs/mixing --scales=tiny --parts=family
  python experiments/mixing_family.py runs/mixing

Apart, each size sees as many tokens as it needs for the loss that it has in the family: lengths
between those of its own frontier from scratch, at the best of equally many rates. In the family the
smallest size is the trunk with its decay, and every other size grows from the one before. The
family has one rate after its growths, the best by the mean over sizes. Intervals hold 95 % of
bootstrap samples of the seeds, in which all runs of a seed stay together. Beside them is what the
law of mixing says, from the sizes from scratch alone; it says so for families without runs as well.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import mixing_report
import numpy as np
import recipes
import trials
from mixing_report import Losses, Runs

from tokenformer_jax.laws.mixing import TYPICAL


@dataclasses.dataclass(frozen=True)
class Family:
  """The runs of a family at one rate.

  Attributes:
    runs: of its scale.
    way: a key of `recipes.FAMILIES`.
    rate: the factor after all growths.
    losses: of each size, by seed.
  """

  runs: Runs
  way: str
  rate: float
  losses: Sequence[Losses]

  @property
  def seeds(self) -> list[int]:
    """The seeds that all sizes have, also from scratch."""
    length = self.runs.main
    apart = [self.runs.scratch(shape, length)[1] for shape in recipes.FAMILY]
    return sorted(set.intersection(*(set(one) for one in (*self.losses, *apart))))

  @property
  def starts(self) -> list[float]:
    """The tokens at which each size begins, by whole chunks, in tokens a parameter."""
    scale, length = recipes.SCALES[self.runs.scale], self.runs.main
    at = [scale.steps(part * length) for part in recipes.FAMILIES[self.way]]
    return [length * steps / scale.steps(length) for steps in at]

  def needed(self, seeds: Sequence[int]) -> list[float]:
    """Return the length with which each size reaches its loss from scratch."""
    found = []
    for shape, losses in zip(recipes.FAMILY, self.losses, strict=True):
      frontier = self.runs.frontier(seeds, shape)
      loss = float(np.mean([losses[seed] for seed in seeds]))
      found.append(mixing_report.equal_length(*frontier, loss))
    return found

  def savings(self, seeds: Sequence[int]) -> tuple[float, float, float]:
    """Return the parts of the FLOPs saved of all sizes, and of the largest and smallest alone."""
    costs = [self.runs.flops(shape) for shape in recipes.FAMILY]
    needed, starts = self.needed(seeds), self.starts
    length = self.runs.main
    spent = sum((length - start) * cost for start, cost in zip(starts, costs, strict=True))
    apart = sum(length * cost for length, cost in zip(needed, costs, strict=True))
    alone = 1 - self.chain(len(costs) - 1) / (needed[-1] * costs[-1])
    return 1 - spent / apart, alone, 1 - length / needed[0]

  def chain(self, n: int) -> float:
    """Return what it costs to make size n alone, in FLOPs of a token times the length."""
    starts, ends = self.starts[: n + 1], [*self.starts[1 : n + 1], self.runs.main]
    parts = zip(starts, ends, recipes.FAMILY, strict=False)
    return sum((end - start) * self.runs.flops(shape) for start, end, shape in parts)

  def smaller(self, n: int, seeds: Sequence[int]) -> float:
    """Return the loss of the size before n, from scratch with the FLOPs of the chain to size n."""
    shape = recipes.FAMILY[n - 1]
    equal = self.chain(n) / self.runs.flops(shape)
    return float(mixing_report.loss_at(*self.runs.frontier(seeds, shape), equal))


def families(runs: Runs, way: str = 'family') -> list[Family]:
  """Return the families of a scale and a way to grow them, the best rate first."""
  length, found = runs.main, []
  (smallest, *larger), rows = recipes.FAMILY, runs.rows

  def losses(arm: str, rate: float) -> Losses:
    return {
      row.seed: row.loss for row in rows if (row.arm, row.length, row.rate) == (arm, length, rate)
    }

  for rate in sorted({row.rate for row in rows if row.arm == f'{way} {larger[0]}'}):
    of_sizes = [losses(smallest, 1.0), *(losses(f'{way} {shape}', rate) for shape in larger)]
    if all(of_sizes):
      found.append(Family(runs, way, rate, of_sizes))
  means = {
    one.rate: statistics.mean(x for side in one.losses for x in side.values()) for one in found
  }
  return sorted(found, key=lambda one: means[one.rate])


def by_law(runs: Runs, way: str) -> Family:
  """Return a family whose sizes have the losses that the law of mixing says.

  The gap between two sizes from scratch closes as a power of the share at which the trunk grew from
  one to the other, with the γ that `tokenformer laws` takes.
  """
  apart = [runs.scratch(shape, runs.main)[1] for shape in recipes.FAMILY]
  left, losses = dict.fromkeys(apart[0], 0.0), [apart[0]]
  for small, large, share in zip(apart, apart[1:], recipes.FAMILIES[way][1:], strict=False):
    left = {seed: left[seed] + (small[seed] - large[seed]) * share**TYPICAL for seed in small}
    losses.append({seed: large[seed] + left[seed] for seed in small})
  return Family(runs, way, 0.0, losses)


def table(family: Family) -> None:
  """Print the sizes of a family, and what it saves."""
  runs, seeds = family.runs, family.seeds
  length, needed = runs.main, family.needed(family.seeds)
  rows = [['size', 'FLOPs a token', 'grown at', 'bits a byte', 'from scratch', 'the same loss at']]
  rows[0].append('the size before, as many FLOPs')
  for n, shape in enumerate(recipes.FAMILY):
    cost = runs.flops(shape) / runs.flops(recipes.FAMILY[0])
    rate, scratch = runs.scratch(shape, length)
    shown = [trials.spread(side[seed] for seed in seeds) for side in (family.losses[n], scratch)]
    shown[1] += f' ({rate})'
    start = f'{family.starts[n] / length:.2f}' if n else ''
    smaller = f'{family.smaller(n, seeds):.3f}' if n else ''
    rows.append(
      [f'{runs.scale} {shape}', f'{cost:.2f}', start, *shown, f'{needed[n]:.1f}', smaller]
    )
  trials.table(rows)
  draws = np.array([family.savings(chosen) for chosen in mixing_report.draws(seeds)])
  low, high = np.quantile(draws, (0.025, 0.975), axis=0)
  names = ('all four', 'the largest alone', 'the smallest alone')
  head = f'{family.way}, {runs.scale}, {length:g} tokens a parameter, '
  head += f'×{family.rate:g}' if family.rate else f'by the law with γ = {TYPICAL:g}'
  rows = [[head, 'saves']]
  for name, value, least, most in zip(names, family.savings(seeds), low, high, strict=True):
    rows.append([name, mixing_report.saving(value, (least, most))])
  trials.table(rows)


def main() -> None:
  """Print the tables of all scales that have a family."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('runs', type=Path, nargs='+')
  args = parser.parse_args()
  rows = [row for path in args.runs for row in mixing_report.read(path)]
  for scale in recipes.SCALES:
    mine = [row for row in rows if (row.scale, row.optimizer) == (scale, 'adamw')]
    runs = Runs(scale, 'adamw', mine)
    if not all(runs.scratch(shape, runs.main)[1] for shape in recipes.FAMILY):
      continue
    for way in recipes.FAMILIES:
      for family in (*families(runs, way), by_law(runs, way)):
        table(family)


if __name__ == '__main__':
  main()
