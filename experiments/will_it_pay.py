r"""Fit the law of what a growth saves, and test it on runs that it has not seen.

  python experiments/will_it_pay.py                                   tables of the stored runs
  python experiments/will_it_pay.py --csv=experiments/growth_runs.csv,more.csv
  python experiments/will_it_pay.py --picture=docs/will_it_pay.png

The constants of tokenformer_jax/grow/payoff.py come from here:

  a  of κ = a ln r (d/20)^b, from the cost of grown runs at equal loss
  b  from κ of pairs of sizes from scratch on several lengths, and from β of Chinchilla's law
  spread  the error of the log of the cost, with a of the other scales

Every growth of the default recipe counts: one growth of growth.py, and the first one of each family
of families.py. `always` beside the law is the rule that every growth pays.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import families
import growth
import numpy as np
import trials
from families import FAMILY, GROWTHS
from growth import LARGE, MAIN, SMALL, Runs

from tokenformer_jax.grow import payoff
from tokenformer_jax.grow.payoff import Leg, Payoff
from tokenformer_jax.runs.pictures import styled

HERE = Path(__file__).parent
SHAPES = ('1x1', '2x1', '2x2', '2x4', '4x2', '8x2')
EIGHT = 'from one layer of half the tokens (r = 8)'
LEAST = 0.1  # the share of the tokens before a growth that lies behind the warm-up


@dataclasses.dataclass(frozen=True)
class Point:
  """A growth of the stored runs; savings are shares of FLOPs at equal loss."""

  scale: str
  arm: str
  factor: float
  share: float
  saved: float  # of the larger model from scratch
  ends: tuple[float, float]  # 95 % of bootstrap samples of the seeds

  @property
  def law(self) -> Payoff:
    """What the law says."""
    return expected(self.factor, self.share, MAIN)

  @property
  def work(self) -> float:
    """The share of the FLOPs on as many tokens."""
    return 1 - self.share * (1 - 1 / self.factor)


def expected(factor: float, share: float, length: float) -> Payoff:
  """Return what the law says of a growth, by figures alone."""
  sizes = Leg(1.0, share * length, 1.0), Leg(factor, (1 - share) * length, 1.0)
  return payoff.expect(sizes)


def points(all_runs: Sequence[Runs]) -> Iterator[Point]:
  """Yield the growths of the default recipe from two sizes that were trained from scratch."""
  arms = [('default', SMALL, LARGE), (EIGHT, '1x1', LARGE)]
  arms += [(f'{name} {FAMILY[1]}', *FAMILY[:2]) for name in GROWTHS]
  for runs, (arm, small, large) in itertools.product(all_runs, arms):
    for share in runs.points(arm):
      yield _point(runs, arm, share, small, large)


def _point(runs: Runs, arm: str, share: float, small: str, large: str) -> Point:
  """Return the growth of an arm at a share of the tokens."""
  losses, factor = runs.best(arm, MAIN, share)[1], runs.flops(large) / runs.flops(small)
  cost = MAIN * (1 - share * (1 - 1 / factor))

  def saved(seeds: Sequence[int]) -> list[float]:
    mean = float(np.mean([losses[seed] for seed in seeds]))
    return [1 - cost / growth.equal_length(*runs.frontier(seeds, large), mean)]

  ((value, ends),) = growth.with_interval(saved, sorted(losses))
  return Point(runs.scale, arm, factor, share, value, tuple(ends))


def slope(known: Sequence[Point]) -> float:
  """Return the a that explains the costs of growths best."""
  x = np.array([math.log(one.factor) * one.share**payoff.MIXING for one in known])
  y = np.array([math.log((1 - one.saved) / one.work) for one in known])
  return float(x @ y / (x @ x))


def kappas(runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, float, float, float]]:
  """Yield a pair of sizes, its factor, the length and κ, by lengths of the larger one alone."""
  shapes = [shape for shape in SHAPES if len(runs.lengths(shape)) > 1]
  for small, large in itertools.combinations(shapes, 2):
    lengths, losses = runs.frontier(seeds, large)
    for length, loss in zip(*runs.frontier(seeds, small), strict=True):
      equal = growth.equal_length(lengths, losses, loss)
      factor = runs.flops(large) / runs.flops(small)
      if lengths[0] <= equal <= lengths[-1] and factor > payoff.FACTORS[0] and equal < length:
        yield f'{small} {large}', factor, length, math.log(length / equal)


def exponent(all_runs: Sequence[Runs], seeds: Sequence[int]) -> float:
  """Return the b that explains how κ of each pair of sizes rises with the length."""
  pairs: dict[str, list[tuple[float, float]]] = {}
  for runs in all_runs:
    for name, _, length, kappa in kappas(runs, seeds):
      pairs.setdefault(f'{runs.scale} {name}', []).append((length, kappa))

  def error(b: float) -> float:
    total = 0.0
    for lengths, values in (np.array(one).T for one in pairs.values()):
      x = lengths**b
      total += float(np.sum((values - x * (x @ values) / (x @ x)) ** 2))
    return total

  return float(min(np.arange(0, 1.5, 0.01), key=error))


def report_fit(all_runs: Sequence[Runs], known: Sequence[Point]) -> None:
  """Print a of every scale, by its grown runs and by its sizes from scratch, and b."""
  rows = [['κ = a ln r (d/20)^b', 'a of grown runs', 'a of both sizes from scratch']]
  rng = np.random.default_rng(0)
  for runs in all_runs:
    ratio, small = math.log(runs.flops(LARGE) / runs.flops(SMALL)), runs.best(SMALL, MAIN)[1]
    mean = float(np.mean([*small.values()]))
    equal = growth.equal_length(*runs.frontier([*small], LARGE), mean)
    rows.append([runs.scale, _slope_text(known, runs.scale, rng)])
    rows[-1].append(f'{math.log(MAIN / equal) / ratio:.2f}')
  rows.append(['all', _slope_text(known, '', rng), ''])
  trials.table(rows)
  ((b, (low, high)),) = growth.with_interval(lambda s: [exponent(all_runs, s)], growth.SEEDS)
  print(f'b = {b:.2f} ({low:.2f} … {high:.2f}) by pairs of sizes from scratch; the package has')
  constants = f'a = {payoff.SLOPE:g}, b = {payoff.LENGTH:g}, γ = {payoff.MIXING:g}'
  print(f'{constants}, spread {payoff.SPREAD:g}\n')


def _slope_text(known: Sequence[Point], scale: str, rng: np.random.Generator) -> str:
  """Return a of one scale, or of all for '', with 95 % of bootstrap samples of its growths."""
  mine = [one for one in known if scale in ('', one.scale) and one.share >= LEAST]
  samples = (rng.integers(len(mine), size=len(mine)) for _ in range(2000))
  low, high = np.quantile([slope([mine[i] for i in sample]) for sample in samples], (0.025, 0.975))
  return f'{slope(mine):.2f} ({low:.2f} … {high:.2f})'


def left_out(known: Sequence[Point]) -> list[tuple[Point, float]]:
  """Return each growth, and the saving by a law with the a of the other scales."""
  made = []
  for one in known:
    a = slope([other for other in known if other.scale != one.scale and other.share >= LEAST])
    behind = a * math.log(one.factor) * one.share**payoff.MIXING
    made.append((one, 1 - one.work * math.exp(behind)))
  return made


def score(tested: Sequence[tuple[Point, float]]) -> list[str]:
  """Return how many signs are right by the law and by `always`, how many intervals, the spread."""
  signs = sum((one.saved > 0) == (law > 0) for one, law in tested)
  ends = ((one.saved, *payoff.interval(law)) for one, law in tested)
  held = sum(low <= saved <= high for saved, low, high in ends)
  pays, count = sum(one.saved > 0 for one, _ in tested), len(tested)
  spread = math.sqrt(np.mean([math.log((1 - one.saved) / (1 - law)) ** 2 for one, law in tested]))
  return [*(f'{number} of {count}' for number in (signs, pays, held)), f'{spread:.3f}']


def report_left_out(known: Sequence[Point]) -> None:
  """Print each growth, what a law without its scale says, and the counts."""
  rows = [['scale left out', 'r', 'grown at', 'saves', 'by the other scales', '']]
  tested = left_out(known)
  for one, law in tested:
    low, high = payoff.interval(law)
    hit = '' if low <= one.saved <= high else 'missed'
    marks = ', '.join(filter(None, [hit, 'outside' if one.law.outside else '']))
    figures = [growth.saving(one.saved, one.ends), growth.saving(law, (low, high))]
    rows.append([one.scale, f'{one.factor:.2f}', f'{one.share:.3g}', *figures, marks])
  trials.table(rows)
  rows = [['one scale left out', 'signs by the law', 'by `always`', 'intervals', 'spread']]
  within = [(one, law) for one, law in tested if not one.law.outside]
  rows.append(['inside of what was measured', *score(within)])
  rows.append(['all growths', *score(tested)])
  trials.table(rows)


def report_families(all_runs: Sequence[Runs]) -> None:
  """Print what four sizes on one trunk save, by the law of their first growths too."""
  rows = [['four sizes', 'grown at', 'all save', 'law', 'the largest alone', 'law']]
  for runs, (name, starts) in itertools.product(all_runs, GROWTHS.items()):
    if not (made := families.families(runs, name)):
      continue
    family, ends = made[0], [*starts[1:], 1.0]
    measured = [f'{100 * saved:.0f} %' for saved in family.savings(family.seeds)[:2]]
    costs = [runs.flops(shape) for shape in FAMILY]
    last, spent, apart = growth.SCALES[runs.scale].parameters, 0.0, 0.0
    chain: list[Leg] = []
    for cost, start, end, size in zip(costs, starts, ends, (8, 4, 2, 1), strict=True):
      rest = Leg(cost, (1 - start) * MAIN * last, last / size)
      spent += cost * rest.tokens
      apart += payoff.expect([*chain, rest]).from_scratch
      chain.append(dataclasses.replace(rest, tokens=(end - start) * MAIN * last))
    law = [payoff.with_interval(1 - spent / apart), payoff.percent(payoff.expect(chain).saved)]
    shown = [x for both in zip(measured, law, strict=True) for x in both]
    rows.append([runs.scale, ', '.join(f'{start:.2g}' for start in starts[1:]), *shown])
  trials.table(rows)


@dataclasses.dataclass(frozen=True)
class Outside:
  """A growth of others, or of runs that are not stored.

  `low` and `high` are the ends of its saving; with −1 or 1 only the sign is known.
  """

  source: str
  against: str  # the `larger` model from scratch, or the `smaller` one trained on
  factor: float
  share: float
  length: float  # tokens a parameter
  low: float
  high: float
  guessed: str  # names of columns
  note: str

  @property
  def law(self) -> Payoff:
    """What the law says, which is about the larger model from scratch."""
    return expected(self.factor, self.share, self.length)

  @property
  def measured(self) -> str:
    """The saving as text."""
    if self.low <= -1 or self.high >= 1:
      return 'saves' if self.high > 0 else 'loses'
    ends = dict.fromkeys((self.low, self.high))
    return f'{" … ".join(f"{100 * end:.0f}" for end in ends)} %'


def report_outside(runs: Sequence[Outside]) -> None:
  """Print outside runs, misses included, with what the law and `always` say of their sign."""
  rows = [['outside run', 'against the', 'r', 'grown at', 'tokens a parameter', 'saves', 'law', '']]
  counts = {True: [0, 0, 0], False: [0, 0, 0]}
  for one in runs:
    law, pays = one.law.saved, one.low + one.high > 0
    shown = {name: f'{getattr(one, name):g}' for name in ('factor', 'share', 'length')}
    shown |= {name: f'{shown[name]} (guess)' for name in one.guessed.split()}
    right, within = (law > 0) == pays, not one.law.outside
    for number, add in enumerate((1, right, pays)):
      counts[within][number] += add
    marks = ', '.join(filter(None, ['' if right else 'wrong', '' if within else 'outside']))
    figures = [one.measured, payoff.with_interval(law), marks]
    rows.append([one.source, one.against, *shown.values(), *figures])
  trials.table(rows)
  for within, (count, right, always) in counts.items():
    where = f'{"in" if within else "out"}side of what was measured'
    print(f'{where}: {count}, signs right by the law {right}, by `always` {always}')


@styled()
def draw(known: Sequence[Point], outside: Sequence[Outside], path: Path) -> None:
  """Draw the saving by the tokens a parameter: the law, the stored runs and those of others."""
  import matplotlib.pyplot as plt  # noqa: PLC0415 (only for the picture)

  figure, axis = plt.subplots(figsize=(9, 4.6))
  lengths = np.geomspace(1, 300, 200)
  inside = (lengths >= payoff.TOKENS[0]) & (lengths <= payoff.TOKENS[1])
  for number, (factor, share) in enumerate(((1.5, 0.46), (3.3, 0.25), (3.3, 0.5))):
    laws = np.array([expected(factor, share, length).saved for length in lengths])
    label = f'the law: × {factor:g} at {100 * share:.0f} % of the tokens'
    axis.plot(lengths, 100 * laws, ':', color=f'C{number}')
    axis.plot(lengths[inside], 100 * laws[inside], color=f'C{number}', label=label)
  shown = [one for one in known if one.arm == 'default' and one.share in (0.25, 0.5)]
  for number, one in enumerate(shown):
    at = MAIN * 1.04 ** (number - (len(shown) - 1) / 2)
    error = [[100 * (one.saved - one.ends[0])], [100 * (one.ends[1] - one.saved)]]
    style = {'fmt': 'o', 'color': 'C1' if one.share == 0.25 else 'C2', 'capsize': 2}
    label = 'three scales here, three seeds' if number == 0 else None
    axis.errorbar([at], [100 * one.saved], yerr=error, label=label, **style)
  for prefix, mark, label in MARKS:
    for one in outside:
      if one.source.startswith(prefix) and one.share <= 0.7:
        _mark(axis, one, mark, label)
        label = None
  axis.axhline(0, color='0.6', zorder=0)
  axis.axvspan(*payoff.TOKENS, color='0.95', zorder=-1)
  axis.set(xscale='log', xlabel='tokens for each parameter of the grown layers')
  axis.set_xticks(TICKS, [str(tick) for tick in TICKS])
  axis.set(ylabel='saved FLOPs at equal loss, %', ylim=(-40, 60))
  figure.legend(loc='outside lower center', ncols=3)
  figure.savefig(path)


TICKS = (1, 2, 5, 10, 20, 60, 200)
MARKS = (
  ('this', 's', 'here, one seed each'),
  ('2609', '^', '2609.19107'),
  ('replication', 'v', 'here, its growth replicated'),
  ('marin', 'X', 'marin #7836'),
  ('growlab', 'P', 'growlab'),
)


def _mark(axis: Any, one: Outside, mark: str, label: str | None) -> None:
  """Draw an outside run, with an arrow where only the sign of its saving is known."""
  signed = one.low <= -1 or one.high >= 1
  at = math.copysign(6, one.low + one.high) if signed else 50 * (one.low + one.high)
  color = 'C2' if mark == 's' else 'black'
  axis.plot([one.length], [at], mark, color=color, markerfacecolor='none', label=label)
  if signed:
    arrow = {'arrowstyle': '->'}
    axis.annotate('', (one.length, 4 * at), (one.length, at), arrowprops=arrow)


def main() -> None:
  """Print the tables, and draw the picture."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--csv', default=str(HERE / 'growth_runs.csv'), help='runs; separated by ,')
  parser.add_argument('--outside', type=Path, default=HERE / 'outside_runs.csv')
  parser.add_argument('--picture', type=Path)
  args = parser.parse_args()
  rows = [row for path in args.csv.split(',') for row in trials.read(Path(path), growth.Row)]
  all_runs = [runs for runs in growth.runs_by_scale(rows) if runs.points('default')]
  known, outside = list(points(all_runs)), trials.read(args.outside, Outside)
  report_fit(all_runs, known)
  report_left_out(known)
  report_families(all_runs)
  report_outside(outside)
  if args.picture:
    draw(known, outside, args.picture)


if __name__ == '__main__':
  main()
