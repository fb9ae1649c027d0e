"""Fit every law that the points allow, and list what they leave undetermined."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import fit, formulas, frontier
from tokenformer_jax.laws.fit import Fit, interval
from tokenformer_jax.laws.formulas import Compute, Law
from tokenformer_jax.laws.frontier import Frontier
from tokenformer_jax.laws.growth import Plan
from tokenformer_jax.laws.points import Points

LEAST_DISTINCT = 3  # sizes and lengths that a law with an exponent and a limit needs
_NARROW = 10.0  # a range of sizes or lengths below this factor is narrow
_WIDE = 2.0  # an interval whose ends differ by more than this factor tells little
_FAR = 10.0  # a budget beyond the largest run by more than this factor
_EXPLAINED = 0.5  # a share of the residuals that follows from size and length
_SAME = 1e-3  # relative; sizes and lengths that differ by less are one
_TOGETHER = 0.95  # correlation of log N and log D above which the two cannot be separated


@dataclasses.dataclass(frozen=True)
class Analysis:
  """The laws of one set of points."""

  points: Points  # with N as Chinchilla counts it
  compute: Compute  # how compute follows from N and D
  main: Fit  # Chinchilla's law, or the one of mixtures of experts
  kaplan: dict[str, Fit]  # Kaplan's laws by name, with N as `kaplan_points` counts it
  kaplan_points: Points
  not_fitted: dict[str, str]  # the reason by the name of each law that the points do not allow
  envelope: Frontier  # approach 1
  isoflop: Frontier  # approach 2

  @property
  def exponent(self) -> tuple[float, tuple[float, float]]:
    """Approach 3's a of N* ∝ C^a, and its interval."""
    a, _ = formulas.exponents(self.main.values, self.compute)
    drawn, _ = formulas.exponents(self.main.drawn, self.compute)
    return float(a), interval(drawn)


@dataclasses.dataclass(frozen=True)
class Optimum:
  """The best size and length for a budget, and the loss there, each with its interval."""

  flops: float
  parameters: float
  tokens: float
  loss: float
  parameters_interval: tuple[float, float]
  tokens_interval: tuple[float, float]
  loss_interval: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Prediction:
  """The loss of a run before it is made; the interval includes the scatter of runs."""

  parameters: float
  tokens: float
  active: float
  flops: float
  loss: float
  interval: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class ChainPrediction:
  """The loss of a grown run before it is made; the interval includes the scatter of runs."""

  legs: tuple[tuple[float, float], ...]  # its sizes, and the tokens trained at each
  loss: float
  interval: tuple[float, float]

  @property
  def tokens(self) -> float:
    """The length of the chain."""
    return sum(tokens for _, tokens in self.legs)


def analyse(
  points: Points,
  kaplan_points: Points,
  *,
  compute: str = '6ND',
  delta: float = fit.DELTA,
  draws: int = 1000,
) -> Analysis:
  """Fit every law that the points allow.

  Args:
    points: with N as Chinchilla counts it.
    kaplan_points: with N as Kaplan counts it.
    compute: `6ND` or `exact`.
    delta: of the Huber loss on logs; infinite: least squares.
    draws: the number of bootstrap samples.

  Raises:
    UserError: there are fewer points than Chinchilla's law has parameters, or `Points.compute`
      raised it.
  """
  relation = points.compute(compute)
  law = formulas.CHINCHILLA if points.is_dense else formulas.EXPERTS
  main = fit.fit(law, points.logs(), points.loss, delta=delta, draws=draws)
  kaplan: dict[str, Fit] = {}
  not_fitted: dict[str, str] = {}
  for kaplan_law, chosen, reason in _kaplan_laws(kaplan_points):
    if reason:
      not_fitted[kaplan_law.name] = reason
      continue
    logs, loss = kaplan_points.logs(chosen), kaplan_points.loss[chosen]
    try:
      kaplan[kaplan_law.name] = fit.fit(kaplan_law, logs, loss, delta=delta, draws=draws)
    except UserError as error:
      not_fitted[kaplan_law.name] = str(error)
  return Analysis(
    points=points,
    compute=relation,
    main=main,
    kaplan=kaplan,
    kaplan_points=kaplan_points,
    not_fitted=not_fitted,
    envelope=frontier.envelope(points, relation),
    isoflop=frontier.isoflop(points, relation),
  )


def _kaplan_laws(points: Points) -> list[tuple[Law, np.ndarray, str]]:
  """Return Kaplan's laws, the points of each, and the reason why one cannot be fitted."""
  everything = np.arange(len(points))
  found = []
  for law, x, what in (
    (formulas.KAPLAN_N, points.active, 'size'),
    (formulas.KAPLAN_D, points.tokens, 'length'),
  ):
    best = lower_envelope(x, points.loss)
    few = len(best) < LEAST_DISTINCT
    reason = f'too few runs are the best of their {what}: {len(best)}' if few else ''
    found.append((law, best, reason))
  found.append((formulas.KAPLAN_ND, everything, ''))
  if not np.all(np.isfinite(points.steps)):
    found.append((formulas.KAPLAN_NS, everything, 'the CSV has no column steps'))
    return found
  batches = points.tokens / points.steps
  if batches.max() > 1.1 * batches.min():
    found.append((formulas.KAPLAN_NSB, everything, ''))
  else:
    found.append((formulas.KAPLAN_NS, everything, ''))
    reason = 'all runs have the same batch, so B_crit stays unknown, and S stands for S_min'
    found.append((formulas.KAPLAN_NSB, everything, reason))
  return found


def lower_envelope(x: np.ndarray, loss: np.ndarray) -> np.ndarray:
  """Return the points that no point of at most the same x beats, by x."""
  order = np.lexsort((loss, x))
  best = np.minimum.accumulate(loss[order])
  first = np.append(True, best[1:] < best[:-1])
  return order[first]


def optimum(analysis: Analysis, flops: float) -> Optimum:
  """Return the best dense size and length for a budget of FLOPs.

  Raises:
    UserError: an exponent of the law is 0.
  """
  formulas.check_falls(analysis.main.values, f'--budget={flops:g}')

  def at(values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    with np.errstate(all='ignore'):
      n, d = formulas.optimum(values, flops, analysis.compute)
      return n, d, formulas.loss(values, n, d)

  n, d, loss = map(float, at(analysis.main.values))
  intervals = [interval(drawn) for drawn in at(analysis.main.drawn)]
  return Optimum(flops, n, d, loss, *intervals)


def predict(analysis: Analysis, total: float, tokens: float, active: float) -> Prediction:
  """Predict the loss of a run."""
  logs = {name: np.log([x]) for name, x in (('n', active), ('total', total), ('d', tokens))}
  logs = {name: logs[name] for name in analysis.main.law.inputs}
  loss = float(np.exp(analysis.main.log_loss(logs))[0])
  drawn = analysis.main.predicted(logs)[:, 0]
  flops = float(analysis.compute.flops(np.float64(active), np.float64(tokens)))
  return Prediction(total, tokens, active, flops, loss, interval(drawn))


def doubts(
  analysis: Analysis,
  budget: float | None = None,
  predictions: Sequence[Prediction] = (),
  plan: Plan | None = None,
  chain: ChainPrediction | None = None,
) -> list[str]:
  """Return a sentence for each thing that the data leave undetermined.

  `budget` is in FLOPs, and None without a question about its optimum.
  """
  points, main = analysis.points, analysis.main
  found = list(points.notes)
  for what, x in (('sizes', points.active), ('lengths', points.tokens)):
    distinct, ratio = len(np.unique(np.round(np.log(x), 2))), x.max() / x.min()
    if distinct < LEAST_DISTINCT:
      found.append(
        f'there are {distinct} {what}, and an exponent beside a limit needs {LEAST_DISTINCT}: the '
        'fit has no unique answer'
      )
    elif ratio < _NARROW:
      found.append(
        f'the {what} span a factor of {ratio:.3g}, below {_NARROW:g}: too narrow to tell a power '
        'from a constant'
      )
  if len(points) > 2 and np.ptp(points.active) > 0 and np.ptp(points.tokens) > 0:
    together = np.corrcoef(np.log(points.active), np.log(points.tokens))[0, 1]
    if abs(together) > _TOGETHER:
      found.append(
        f'log N and log D have a correlation of {together:.3f}: which of the two lowers the loss '
        'cannot be told; train some sizes on several lengths'
      )
  found += _unbounded(main)
  if (share := _structure(analysis)) > _EXPLAINED:
    found.append(
      f'{share:.0%} of the residuals follow from N and D, so these runs do not lie on a law of '
      'this form: predictions outside of their range carry an error that no interval has; look at '
      'the residuals, and leave out the smallest or shortest runs'
    )
  if len(points) < 2 * len(main.theta):
    found.append(f'{len(points)} points for {len(main.theta)} parameters: intervals are guesses')
  found += _distance(analysis, budget)
  for prediction in predictions:
    found += _outside(points, 'the run', [prediction.active], [prediction.tokens])
  if chain is not None:
    found += _outside(points, '--chain', [size for size, _ in chain.legs], [chain.tokens])
  if plan is not None:
    # The last size ends with the loss that it reaches from scratch after this many tokens.
    lengths = [plan.legs[0].tokens, plan.scratch_last.tokens]
    found += _outside(points, 'the chain', [leg.parameters for leg in plan.legs], lengths)
    scratch = plan.scratch
    found += _outside(points, 'the best run from scratch', [scratch.parameters], [scratch.tokens])
  return found


def _structure(analysis: Analysis) -> float:
  """Return the share of the residuals' variance that a quadratic of log N and log D explains.

  It is adjusted for the number of points; 0 if there are too few.
  """
  r, points = analysis.main.residuals, analysis.points
  n, d = (np.log(x / np.exp(np.log(x).mean())) for x in (points.active, points.tokens))
  columns = np.stack([np.ones_like(n), n, d, n * d, n * n, d * d], axis=1)
  free = len(r) - columns.shape[1]
  if free < columns.shape[1] or not np.ptp(r) > 1e-6:
    return 0.0
  left = r - columns @ np.linalg.lstsq(columns, r, rcond=None)[0]
  return 1 - (left @ left / free) / np.var(r, ddof=1)


def _unbounded(main: Fit) -> list[str]:
  """Return the parameters whose intervals are too wide to use."""
  found = []
  for x, ends in zip(main.theta, main.law.bounds, strict=True):
    if min(abs(x - ends[0]), abs(x - ends[1])) < 1e-6 and ends != formulas.LIMIT:
      found.append(
        'the best fit lies at a bound of the exponents or constants: one of N and D hardly changes '
        'the loss here, so use no prediction of this law'
      )
      break
  bound = math.exp(formulas.LIMIT[0])
  for name, (low, high) in main.intervals.items():
    if name == 'E' and main.values['E'] < 1.01 * bound:
      found.append(
        f'E is not told from zero: the best fit has it at its bound, {bound:.1g}; larger and '
        'longer runs would show the limit'
      )
    elif name == 'E' and low < 0.1 * main.values['E']:
      found.append('E is not told from zero: larger and longer runs would show the limit')
    elif name in ('alpha', 'beta', 'gamma') and (low <= 0 or high / low > _WIDE):
      found.append(f'{name} may be anything from {low:.3g} to {high:.3g}: the data do not fix it')
  return found


def _distance(analysis: Analysis, budget: float | None) -> list[str]:
  points = analysis.points
  if budget is None:
    return []
  largest = float(points.spent(analysis.compute).max())
  found = []
  if budget > _FAR * largest:
    found.append(
      f'a budget of {budget:.3g} FLOPs is {budget / largest:.3g} times that of the largest run: '
      'intervals do not include the error of the law itself so far away'
    )
  n, _ = formulas.optimum(analysis.main.values, budget, analysis.compute)
  return found + _outside(points, 'the optimum', [float(n)], [])


def _outside(
  points: Points, subject: str, sizes: Sequence[float], lengths: Sequence[float]
) -> list[str]:
  """Return sentences on the sizes and lengths of a subject outside of those of the runs."""
  found = []
  for what, x, asked in (('size', points.active, sizes), ('length', points.tokens, lengths)):
    low, high = x.min(), x.max()
    known = (low * (1 - _SAME), high * (1 + _SAME))
    far = dict.fromkeys(f'{value:.3g}' for value in asked if not known[0] <= value <= known[1])
    if far:
      found.append(
        f'{what} {" and ".join(far)} of {subject} lies outside of the {what}s of the runs, '
        f'{low:.3g} to {high:.3g}'
      )
  return found
