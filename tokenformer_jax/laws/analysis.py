"""Fit the law to points, predict by it, and list what the points leave undetermined."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tokenformer_jax.laws import fit, formulas, mixing
from tokenformer_jax.laws.chains import Chain
from tokenformer_jax.laws.fit import Fit, interval
from tokenformer_jax.laws.points import Points

_LEAST_DISTINCT = 3  # sizes and lengths that a law with an exponent and a limit needs
_NARROW = 10.0  # a range of sizes or lengths below this factor is narrow
_WIDE = 2.0  # an interval whose ends differ by more than this factor tells little
_NO_LIMIT = 1.01 * math.exp(formulas.LIMIT[0])  # E at its bound
_EXPLAINED = 0.5  # a share of the residuals that follows from size and length
_SAME = 1e-3  # relative; sizes and lengths that differ by less are one
_TOGETHER = 0.95  # correlation of log N and log D above which the two cannot be separated


@dataclasses.dataclass(frozen=True)
class Analysis:
  """Points and the law fitted to them."""

  points: Points
  fit: Fit

  @property
  def exponent(self) -> tuple[float, tuple[float, float]]:
    """The a of N* ∝ C^a, and its interval."""
    drawn = formulas.size_exponent(self.fit.drawn)
    return float(formulas.size_exponent(self.fit.values)), interval(drawn)


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

  legs: tuple[mixing.Leg, ...]  # several of a grown run
  loss: float  # in nats a token
  interval: tuple[float, float]


def analyse(points: Points, draws: int = 1000) -> Analysis:
  """Fit the law; `draws` is the number of bootstrap samples."""
  return Analysis(points, fit.fit(points.logs(), points.loss, draws))


def optimum(analysis: Analysis, flops: float) -> Optimum:
  """Return the best size and length for a budget of FLOPs."""
  formulas.check_falls(analysis.fit.values, f'--budget={flops:g}')

  def at(law: formulas.Values) -> tuple[np.ndarray, ...]:
    with np.errstate(all='ignore'):
      n, d = formulas.optimum(law, flops)
      return n, d, formulas.loss(law, n, d)

  n, d, loss = map(float, at(analysis.fit.values))
  intervals = [interval(drawn) for drawn in at(analysis.fit.drawn)]
  return Optimum(flops, n, d, loss, *intervals)


def predict(
  analysis: Analysis, legs: Sequence[mixing.Leg], gamma: np.ndarray | float = 0.0
) -> Prediction:
  """Predict the loss of a run; one that grows has a mixing exponent, or one for each draw."""
  loss = float(mixing.chain_loss(analysis.fit.values, legs, float(np.median(gamma))))
  drawn = mixing.chain_loss(analysis.fit.drawn, legs, gamma)
  return Prediction(tuple(legs), loss, interval(analysis.fit.scattered(np.log(drawn))))


def doubts(
  analysis: Analysis,
  budget: float | None = None,
  predictions: Sequence[Prediction] = (),
  chain: Chain | None = None,
) -> list[str]:
  """Return a sentence for each thing that the data leave undetermined.

  `budget` is in FLOPs, and None without a question about its optimum.
  """
  points, fitted = analysis.points, analysis.fit
  sentences = list(points.notes)
  for what, x in (('sizes', points.parameters), ('lengths', points.tokens)):
    distinct, ratio = len(np.unique(np.round(np.log(x), 2))), x.max() / x.min()
    if distinct < _LEAST_DISTINCT:
      sentences.append(
        f'there are {distinct} {what}, and an exponent beside a limit needs {_LEAST_DISTINCT}: the '
        'fit has no unique answer'
      )
    elif ratio < _NARROW:
      sentences.append(
        f'the {what} span a factor of {ratio:.3g}, below {_NARROW:g}: too narrow to tell a power '
        'from a constant'
      )
  if len(points) > 2 and np.ptp(points.parameters) > 0 and np.ptp(points.tokens) > 0:
    together = np.corrcoef(np.log(points.parameters), np.log(points.tokens))[0, 1]
    if abs(together) > _TOGETHER:
      sentences.append(
        f'log N and log D have a correlation of {together:.3f}: which of the two lowers the loss '
        'cannot be told; train some sizes on several lengths'
      )
  sentences += _unbounded(fitted)
  if (share := _structure(analysis)) > _EXPLAINED:
    sentences.append(
      f'{share:.0%} of the residuals follow from N and D, so these runs do not lie on a law of '
      'this form: predictions outside of their range carry an error that no interval has; look at '
      'the residuals, and leave out the smallest or shortest runs'
    )
  if budget is not None:
    best_size = float(formulas.optimum(fitted.values, budget)[0])
    sentences += _outside(points, 'the optimum', [best_size])
  for one in predictions:
    subject = '--chain' if len(one.legs) > 1 else 'the run'
    sizes, lengths = zip(*one.legs, strict=True)
    sentences += _outside(points, subject, sizes, [sum(lengths)])
  if chain is not None:
    # The last size ends with the loss that it reaches from scratch after this many tokens.
    lengths = [chain.legs[0].tokens, chain.scratch_last.tokens]
    sentences += _outside(points, 'the chain', [leg.parameters for leg in chain.legs], lengths)
    best = chain.scratch
    sentences += _outside(points, 'the best run from scratch', [best.parameters], [best.tokens])
  return sentences


def _structure(analysis: Analysis) -> float:
  """Return the share of the residuals' variance that a quadratic of log N and log D explains.

  It is adjusted for the number of points; 0 if there are too few.
  """
  r, points = analysis.fit.residuals, analysis.points
  n, d = (np.log(x / np.exp(np.log(x).mean())) for x in (points.parameters, points.tokens))
  columns = np.stack([np.ones_like(n), n, d, n * d, n * n, d * d], axis=1)
  free = len(r) - columns.shape[1]
  if free < columns.shape[1] or not np.ptp(r) > 1e-6:
    return 0.0
  left = r - columns @ np.linalg.lstsq(columns, r, rcond=None)[0]
  return 1 - (left @ left / free) / np.var(r, ddof=1)


def _unbounded(fitted: Fit) -> list[str]:
  """Return the parameters whose intervals are too wide to use."""
  sentences = []
  ends = zip(fitted.theta, formulas.BOUNDS, strict=True)
  if any(np.min(np.abs(x - np.array(b))) < 1e-6 for x, b in ends if b != formulas.LIMIT):
    sentences.append(
      'the best fit lies at a bound of the exponents or constants: one of N and D hardly changes '
      'the loss here, so use no prediction of this law'
    )
  for name, (low, high) in fitted.intervals.items():
    if name == 'E' and (low < 0.1 * fitted.values['E'] or fitted.values['E'] < _NO_LIMIT):
      sentences.append('E is not told from zero: larger and longer runs would show the limit')
    elif name in ('alpha', 'beta') and (low <= 0 or high / low > _WIDE):
      sentences.append(
        f'{name} may be anything from {low:.3g} to {high:.3g}: the data do not fix it'
      )
  return sentences


def _outside(
  points: Points, subject: str, sizes: Sequence[float], lengths: Sequence[float] = ()
) -> list[str]:
  """Return sentences on the sizes and lengths of a subject outside of those of the runs."""
  sentences = []
  for what, x, asked in (('size', points.parameters, sizes), ('length', points.tokens, lengths)):
    low, high = x.min(), x.max()
    known = (low * (1 - _SAME), high * (1 + _SAME))
    far = dict.fromkeys(f'{value:.3g}' for value in asked if not known[0] <= value <= known[1])
    if far:
      sentences.append(
        f'{what} {" and ".join(far)} of {subject} lies outside of the {what}s of the runs, '
        f'{low:.3g} to {high:.3g}'
      )
  return sentences
