r"""Compute what is left of the gap for the ways to grow of `growth.py`, and compare laws of it.

  python experiments/mixing_methods.py experiments/growth_means.csv experiments/mixing_runs.csv \
    --pictures=docs

The first file has the means of the three seeds of each arm of `growth.py` that
docs/growth_trials.md names, with their standard deviation; the scale `large` has one seed. The
second has the runs of `mixing.py`. All runs of `growth.py` spend equal FLOPs, so a grown one has
seen D tokens, between those of the small and of the large model. Both sizes from scratch are
interpolated to D in the log of the tokens. η is the part of the gap between them that the grown
model has closed, and γ the exponent of 1 − η = f^γ, where f is the share of D before the growth.
Intervals hold 95 % of draws of all means by their standard errors; the seeds that arms share are
not paired.
"""

import argparse
import csv
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import growth
import mixing_report
import numpy as np
import recipes
import trials

SEEDS = 3
DRAWS = 4000
MOST = 12.0  # γ; a gap that closes faster is closed
OF_SMALL = {  # by kind: the small model, with one budget and with half of one
  'tokenformer': ('no growth', 'no growth, half the budget'),
  'muon': ('muon, no growth', 'muon, no growth, half the budget'),
}
OF_LARGE = {  # by kind and size
  ('tokenformer', growth.Size(4)): 'scratch',
  ('tokenformer', growth.Size(1, 4)): 'scratch, depth',
  ('tokenformer', growth.Size(2, 2)): 'scratch, tokens and depth',
  ('muon', growth.Size(4)): 'scratch, muon',
  ('muon', growth.Size(2, 2)): 'scratch, muon, tokens and depth',
}
DEFAULT = 'tokens and depth, copies'  # the growth that mixing.py measures
FITTED = 'small, 60'
LEFT_OUT = ('no growth', 'scale only', 'group ×2 ×2', 'group, keys')

Mean = tuple[float, float]  # a mean, and its standard error


def read(path: Path) -> dict[tuple[str, str, str], Mean]:
  """Return means by scale, arm and budget."""
  found = {}
  with path.open() as file:
    for line in csv.DictReader(file):
      error = float(line['deviation'] or 0) / math.sqrt(SEEDS)
      found[line['scale'], line['arm'], line['budget']] = float(line['mean']), error
  return found


@dataclasses.dataclass(frozen=True)
class Point:
  """A grown model. Arrays have a value for each draw, first that of the means.

  Attributes:
    scale: of `growth.SCALES`.
    arm: its name.
    share: of its tokens before the growth.
    length: its tokens for each parameter of the layers.
    cost: the FLOPs of a token of the large model, over those of the small one.
    closure: η.
    needed: the length with which the large model reaches its loss from scratch.
  """

  scale: str
  arm: str
  share: float
  length: float
  cost: float
  closure: np.ndarray
  needed: np.ndarray

  @property
  def family(self) -> np.ndarray | None:
    """Return what a family of both sizes saves, at equal loss for both, of the FLOPs apart.

    Apart, both sizes see the tokens with which the large one reaches the loss of the grown one. In
    the family the small one sees as many; it leaves the trunk for its decay, at the growth at the
    earliest. None: it would have to decay before.
    """
    trunk, rest = self.share * self.length, (1 - self.share) * self.length
    if trunk > (1 - growth.DECAY) * self.needed[0]:
      return None
    return 1 - (self.needed + rest * self.cost) / (self.needed * (1 + self.cost))

  @property
  def gamma(self) -> np.ndarray:
    """Return γ of each draw."""
    left = np.clip(1 - self.closure, self.share**MOST, 1)
    return np.log(left) / math.log(self.share)


def points(means: Mapping[tuple[str, str, str], Mean], scale: str) -> list[Point]:
  """Return the grown models of a scale whose sizes from scratch are known."""
  rng = np.random.default_rng(0)
  plan = growth.Plan(Path(), growth.SCALES[scale], ())
  step_flops, drawn = functools.cache(plan.step_flops), {}
  for (of, arm, budget), (mean, error) in means.items():
    if of == scale:
      drawn[arm, budget] = np.concatenate([[mean], mean + error * rng.standard_normal(DRAWS)])
  found = []
  for name, arm in {**growth.ARMS, **growth.POINTS}.items():
    large = OF_LARGE.get((arm.kind, arm.size))
    small = OF_SMALL.get(arm.kind, ())
    sides = {(large, '0.5'), (large, '1'), *((one, '') for one in small), (name, '')}
    if large is None or name.startswith(LEFT_OUT) or not sides <= drawn.keys():
      continue
    costs = [step_flops(arm.kind, size) for size in (growth.Size(), arm.size)]
    budget = growth.BUDGET * plan.scale.steps * costs[0]
    before = round((arm.stages[0][0] if arm.stages else growth.POINT) * plan.scale.steps)
    steps = before + (arm.part * budget - before * costs[0]) / costs[1]
    whole, half = (drawn[one, ''] for one in small)
    of_small = _between([(budget / costs[0] / 2, half), (budget / costs[0], whole)], steps)
    known = [(float(part) * budget / costs[1], drawn[large, part]) for part in ('0.5', '1', '2')]
    of_large = _between(known, steps)
    closure = (of_small - drawn[name, '']) / (of_small - of_large)
    a_parameter = recipes.TOKENS / recipes.SCALES[scale].parameters
    needed = a_parameter * _reached(known, drawn[name, ''])
    share, length = before / steps, steps * a_parameter
    found.append(Point(scale, name, share, length, costs[1] / costs[0], closure, needed))
  return found


def _between(curve: Sequence[tuple[float, np.ndarray]], steps: float) -> np.ndarray:
  """Return the loss at some steps in each draw: see `mixing_report.loss_at`."""
  return mixing_report.loss_at(*zip(*curve, strict=True), steps)


def _reached(curve: Sequence[tuple[float, np.ndarray]], losses: np.ndarray) -> np.ndarray:
  """Return the steps at which a curve reaches a loss in each draw, by the same lines."""
  steps = np.array([x for x, _ in curve])
  each = zip(losses, np.stack([y for _, y in curve], axis=1), strict=True)
  return np.array([mixing_report.equal_length(steps, known, loss) for loss, known in each])


def family_table(found: Sequence[Point], runs: Path) -> None:
  """Print what a family of the small and the large model saves at equal losses."""
  rows = [['grown at a share of', 'scale', 'tokens a parameter', 'r', 'saves of both sizes apart']]
  for one in found:
    if one.arm.startswith(DEFAULT) and len(set(one.closure)) > 1 and one.family is not None:
      low, high = np.quantile(one.family[1:], (0.025, 0.975))
      saved = [mixing_report.percent(value) for value in (one.family[0], low, high)]
      figures = [f'{one.share:.2f}', one.scale, f'{one.length:.0f}', f'{one.cost:.2f}']
      rows.append([*figures, f'{saved[0]} ({saved[1]} … {saved[2]})'])
  small = mixing_report.Runs('small', 'adamw', mixing_report.read(runs))
  ratio = small.flops(recipes.LARGE) / small.flops(recipes.SMALL)
  for share in recipes.POINTS:
    one = mixing_report.grown(small, 'default', 60, share, tuned=True)
    savings = np.array([one.saving, *one.saving_interval])
    needed = small.cost('default', 60, share) / (1 - savings)
    point = Point('small', 'default', share, 60, ratio, savings, needed)
    if point.family is not None:
      saved = [mixing_report.percent(value) for value in point.family]
      rows.append(
        [f'{share:g}', 'small', '60', f'{ratio:.2f}', f'{saved[0]} ({saved[1]} … {saved[2]})']
      )
  trials.table(rows)


def interval(values: np.ndarray) -> str:
  """Return the first value, and the ends of the others."""
  low, high = np.quantile(values[1:], (0.025, 0.975))
  return f'{values[0]:.2f} ({low:.2f} … {high:.2f})'


def by_method(found: Sequence[Point]) -> None:
  """Print η and γ of every arm, for each scale."""
  rows = [['way to grow', 'scale', 'tokens a parameter', 'f', 'η', 'γ']]
  for point in sorted(found, key=lambda one: (one.arm.split(' at ')[0], one.scale, one.share)):
    exact = len(set(point.closure)) > 1
    figures = [interval(x) if exact else f'{x[0]:.2f}' for x in (point.closure, point.gamma)]
    shown = [f'{point.length:.0f}', f'{point.share:.2f}', *figures]
    rows.append([point.arm, point.scale, *shown])
  trials.table(rows)


@dataclasses.dataclass(frozen=True)
class Known:
  """η of the default growth at all scales, lengths and points."""

  groups: np.ndarray  # names of a scale and length
  length: np.ndarray
  share: np.ndarray
  closure: np.ndarray

  @property
  def names(self) -> list[str]:
    """Return the groups, each once."""
    return list(dict.fromkeys(self.groups))

  def fit(self, form: Callable, start: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the parameters of a form that fit some points best."""
    data = self.share[chosen], self.length[chosen], 1 - self.closure[chosen]
    return mixing_report.fit_form(form, start, *data)

  def errors(self, form: Callable, theta: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return how far a form is off at some points."""
    return form(theta, self.share[chosen], self.length[chosen]) - (1 - self.closure[chosen])


def default_points(found: Sequence[Point], runs: Path) -> Known:
  """Return η of the default growth, by `growth.py` and `mixing.py`."""
  small = mixing_report.Runs('small', 'adamw', mixing_report.read(runs))
  known = []
  for share in recipes.POINTS:
    one = mixing_report.grown(small, 'default', 60, share, tuned=True)
    if one is not None:
      known.append((FITTED, 60.0, share, one.closure))
  for one in found:
    if one.arm.startswith(DEFAULT):
      name = f'{one.scale}, {"half" if "half" in one.arm else "one"} budget'
      known.append((name, one.length, one.share, one.closure[0]))
  numbers = np.array([row[1:] for row in known], float).T
  return Known(np.array([row[0] for row in known]), *numbers)


def by_form(known: Known) -> None:
  """Print how forms predict scales and lengths that they are not fitted to."""
  first, every = known.groups == FITTED, np.full(len(known.groups), fill_value=True)
  title = ['what is left of the gap', f'fitted to {FITTED}']
  title += [f'error of η: {name}' for name in known.names]
  rows = [[*title, 'fitted to all', 'error of all', 'of groups left out']]
  for name, form, start in mixing_report.FORMS:
    row = [name, *[''] * (1 + len(known.names))]
    if len(start) == 1:
      theta = known.fit(form, start, first)
      row[1] = _shown(name, theta)
      row[2:] = [_root(known.errors(form, theta, known.groups == one)) for one in known.names]
    theta = known.fit(form, start, every)
    left = [
      known.errors(form, known.fit(form, start, known.groups != one), known.groups == one)
      for one in known.names
    ]
    row += [_shown(name, theta), _root(known.errors(form, theta, every))]
    rows.append([*row, _root(np.concatenate(left))])
  trials.table(rows)
  print(f'γ of all, by draws of scales and lengths: {_of_groups(known)}\n')


def _of_groups(known: Known) -> str:
  """Return γ of all points, and its interval over bootstrap samples of the groups."""
  _, form, start = mixing_report.FORMS[0]
  rng = np.random.default_rng(0)
  drawn = [known.fit(form, start, np.arange(len(known.groups)))[0]]
  for _ in range(400):
    names = rng.choice(known.names, len(known.names))
    drawn.append(
      known.fit(
        form, start, np.concatenate([np.flatnonzero(known.groups == one) for one in names])
      )[0]
    )
  return interval(np.array(drawn))


def _root(errors: np.ndarray) -> str:
  return f'{np.sqrt(np.mean(errors**2)):.3f}'


def _shown(name: str, theta: np.ndarray) -> str:
  """Return the parameters of a form."""
  if name.startswith('exponential in tokens'):
    return f'M = {math.exp(theta[0]):.3g}'
  if name.startswith('power of f:'):
    return f'γ = {theta[0]:.3g}'
  return ', '.join(f'{value:.3g}' for value in theta)


def draw(found: Sequence[Point], known: Known, path: Path) -> None:
  """Draw what the default leaves of the gap by the share of tokens, and η by the way to grow."""
  import matplotlib  # noqa: PLC0415 (only for the picture)

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt  # noqa: PLC0415

  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout='constrained')
  share = np.linspace(0.02, 1, 99)
  for gamma in (1.5, 2, 3):
    left.plot(share, share**gamma, color='0.75', linewidth=1)
    left.annotate(f'γ = {gamma:g}', (0.93, 0.93**gamma), color='0.5', fontsize=8)
  for number, name in enumerate(known.names):
    at = known.groups == name
    low, high = min(known.length[at]), max(known.length[at])
    tokens = f'{low:.0f}' if round(low) == round(high) else f'{low:.0f} to {high:.0f}'
    label = f'{name.partition(",")[0]}, {tokens} tokens a parameter'
    left.plot(known.share[at], 1 - known.closure[at], 'os^vDP'[number % 6], label=label)
  left.axhline(0, color='0.9', zorder=0)
  left.set(xlabel='share of the tokens before growth', ylabel='left of the gap, 1 − η')
  left.legend(frameon=False, fontsize=8)
  # The point at which all ways were tried: about one half of the tokens.
  arms = {
    one.arm: one.closure[0] for one in found if one.arm in growth.ARMS and one.scale == 'small'
  }
  names = sorted(arms, key=arms.get, reverse=True)
  for shift, (scale, mark) in zip((-0.12, 0.12), (('small', 'o'), ('tiny', 's')), strict=True):
    for one in found:
      if one.arm in names and one.scale == scale:
        ends = np.quantile(one.closure[1:], (0.025, 0.975))
        error = np.abs(ends - one.closure[0])[:, None]
        place = names.index(one.arm) + shift
        colour = 'C0' if scale == 'small' else 'C1'
        label = scale if one.arm == names[0] else None
        right.errorbar([one.closure[0]], [place], xerr=error, fmt=mark, color=colour, label=label)
  right.set_yticks(range(len(names)), names, fontsize=8)
  right.axvline(1, color='0.8')
  right.invert_yaxis()
  right.set(xlabel='η: closed of the gap, grown at about half of the tokens')
  right.legend(frameon=False, fontsize=8)
  figure.savefig(path, dpi=110)


def main() -> None:
  """Print the tables; draw the picture."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('means', type=Path)
  parser.add_argument('runs', type=Path)
  parser.add_argument('--pictures', type=Path)
  args = parser.parse_args()
  means = read(args.means)
  found = [point for scale in growth.SCALES for point in points(means, scale)]
  by_method(found)
  known = default_points(found, args.runs)
  by_form(known)
  family_table(found, args.runs)
  if args.pictures:
    draw(found, known, args.pictures / 'growth_mixing.png')


if __name__ == '__main__':
  main()
