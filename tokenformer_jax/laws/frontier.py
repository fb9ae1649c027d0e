"""Find the size and length with the least loss for a budget, in two ways without a law of the loss.

These are approaches 1 and 2 of Hoffmann et al. (2022): the envelope of the curves of all sizes, and
parabolas through runs of equal FLOPs. Both interpolate between the lengths of a size, in the log of
the loss against the log of FLOPs, and extrapolate nowhere.
"""

import dataclasses

import numpy as np

from tokenformer_jax.laws.fit import interval
from tokenformer_jax.laws.formulas import Compute
from tokenformer_jax.laws.points import Points

BUDGETS = 1500  # of the envelope, evenly spaced in the log of FLOPs
PARABOLAS = 9  # IsoFLOP budgets
_EQUAL = 0.03  # runs whose FLOPs differ by less are of one budget
_LEAST_SIZES = 4  # of a parabola


@dataclasses.dataclass(frozen=True)
class Parabola:
  """The losses of several sizes at one budget, with a parabola in the log of the size."""

  flops: float  # the budget
  sizes: np.ndarray  # parameters of each size, [k]
  losses: np.ndarray  # [k]
  coefficients: np.ndarray  # of the parabola, the highest power first
  best: float  # the size with its least loss; NaN if that lies outside of the sizes


@dataclasses.dataclass(frozen=True)
class Frontier:
  """Best sizes by budget, and the exponents of N* ∝ C^a and D* ∝ C^b."""

  flops: np.ndarray  # budgets [k]
  sizes: np.ndarray  # the best size of each [k]
  a: float  # NaN if there are fewer than two budgets or sizes
  b: float
  a_interval: tuple[float, float]  # of bootstrap samples of the runs
  parabolas: tuple[Parabola, ...] = ()  # those of the IsoFLOP approach


def envelope(points: Points, compute: Compute, draws: int = 200) -> Frontier:
  """Return the sizes with the least loss at each of 1,500 budgets (approach 1)."""
  flops, sizes = _envelope(points, compute, np.arange(len(points)))
  samples = _samples(points, draws)
  drawn = [_exponent(*_envelope(points, compute, which)) for which in samples]
  return _frontier(flops, sizes, compute, drawn)


def isoflop(points: Points, compute: Compute, draws: int = 200) -> Frontier:
  """Return the sizes at the bottom of parabolas through runs of equal FLOPs (approach 2)."""
  found = _parabolas(points, compute, np.arange(len(points)))
  samples = _samples(points, draws)
  drawn = [_exponent(*_bottoms(_parabolas(points, compute, which))) for which in samples]
  flops, sizes = _bottoms(found)
  return dataclasses.replace(_frontier(flops, sizes, compute, drawn), parabolas=tuple(found))


def _frontier(
  flops: np.ndarray, sizes: np.ndarray, compute: Compute, drawn: list[float]
) -> Frontier:
  exponent = _exponent(flops, sizes)
  finite = np.array([a for a in drawn if np.isfinite(a)])
  between = interval(finite) if len(finite) > len(drawn) / 2 else (-np.inf, np.inf)
  return Frontier(flops, sizes, exponent, 1 - compute.power * exponent, between)


def _exponent(flops: np.ndarray, sizes: np.ndarray) -> float:
  """Return a of N* ∝ C^a by least squares of logs, or NaN."""
  if len(set(flops)) < 2 or len(set(sizes)) < 2:
    return np.nan
  return float(np.polyfit(np.log(flops), np.log(sizes), 1)[0])


def _samples(points: Points, draws: int) -> list[np.ndarray]:
  """Return bootstrap samples of the points, as indices."""
  rng = np.random.default_rng(0)
  return [np.unique(rng.integers(0, len(points), len(points))) for _ in range(draws)]


def _curves(
  points: Points, compute: Compute, which: np.ndarray
) -> list[tuple[float, np.ndarray, np.ndarray]]:
  """Return the size, the log FLOPs and the log loss of the runs of each size, by FLOPs."""
  flops, found = points.spent(compute), []
  for size in np.unique(points.active[which]):
    mine = which[points.active[which] == size]
    x, first = np.unique(np.log(flops[mine]), return_index=True)
    found.append((float(size), x, np.log(points.loss[mine])[first]))
  return found


def _at(x: np.ndarray, y: np.ndarray, where: np.ndarray) -> np.ndarray:
  """Interpolate; NaN outside."""
  return np.interp(where, x, y, left=np.nan, right=np.nan)


def _envelope(points: Points, compute: Compute, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  curves = [curve for curve in _curves(points, compute, which) if len(curve[1]) > 1]
  if not curves:
    return np.array([]), np.array([])
  ends = [x[[0, -1]] for _, x, _ in curves]
  grid = np.linspace(min(x[0] for x in ends), max(x[1] for x in ends), BUDGETS)
  losses = np.array([_at(x, y, grid) for _, x, y in curves])  # [sizes, budgets]
  # At the ends of the range there is only one size, the smallest or the largest, to choose.
  shared = np.isfinite(losses).sum(axis=0) >= 2
  grid, losses = grid[shared], losses[:, shared]
  if not len(grid):
    return np.array([]), np.array([])
  sizes = np.array([size for size, _, _ in curves])[np.nanargmin(losses, axis=0)]
  return np.exp(grid), sizes


def _parabolas(points: Points, compute: Compute, which: np.ndarray) -> list[Parabola]:
  """Return parabolas at budgets between the lengths of sizes, or else at budgets of the runs."""
  budgets = _interpolated(points, compute, which) or _equal_flops(points, compute, which)
  found = []
  for flops, sizes, losses in budgets:
    logs = np.log(sizes)
    coefficients = np.polyfit(logs, losses, 2)
    bottom = -coefficients[1] / (2 * coefficients[0])
    inside = coefficients[0] > 0 and logs.min() <= bottom <= logs.max()
    best = float(np.exp(bottom)) if inside else np.nan
    found.append(Parabola(flops, sizes, losses, coefficients, best))
  return found


def _equal_flops(
  points: Points, compute: Compute, which: np.ndarray
) -> list[tuple[float, np.ndarray, np.ndarray]]:
  """Return the budgets at which runs of four sizes were made, with these sizes and losses."""
  order = which[np.argsort(points.spent(compute)[which])]
  flops, found, equal = points.spent(compute), [], list(order[:1])
  for i in [*order[1:], None]:
    if i is not None and flops[i] <= flops[equal[0]] * (1 + _EQUAL):
      equal.append(i)
      continue
    if len(set(points.active[equal])) >= _LEAST_SIZES:
      found.append((float(np.mean(flops[equal])), points.active[equal], points.loss[equal]))
    equal = [i]
  return found


def _interpolated(
  points: Points, compute: Compute, which: np.ndarray
) -> list[tuple[float, np.ndarray, np.ndarray]]:
  """Return budgets that lie between the lengths of at least four sizes."""
  curves = [curve for curve in _curves(points, compute, which) if len(curve[1]) > 1]
  if len(curves) < _LEAST_SIZES:
    return []
  low = np.sort([x[0] for _, x, _ in curves])[_LEAST_SIZES - 1]
  high = np.sort([x[-1] for _, x, _ in curves])[-_LEAST_SIZES]
  if low >= high:
    return []
  found = []
  for at in np.linspace(low, high, PARABOLAS):
    losses = np.array([_at(x, y, at) for _, x, y in curves])
    sizes = np.array([size for size, _, _ in curves])
    known = np.isfinite(losses)
    if known.sum() >= _LEAST_SIZES:
      found.append((float(np.exp(at)), sizes[known], np.exp(losses[known])))
  return found


def _bottoms(parabolas: list[Parabola]) -> tuple[np.ndarray, np.ndarray]:
  """Return the budgets and the best sizes of the parabolas with a best size."""
  kept = [parabola for parabola in parabolas if np.isfinite(parabola.best)]
  flops, sizes = ([getattr(parabola, name) for parabola in kept] for name in ('flops', 'best'))
  return np.array(flops), np.array(sizes)
