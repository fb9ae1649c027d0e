"""Fit a law by the least Huber loss on logs, from many starts, with bootstrap intervals.

The optimizer is Levenberg and Marquardt's for M-estimators: each step solves the normal equations
with the weights min(1, δ/|r|) of the Huber loss, and stays inside the bounds of the law. All starts
run as one jitted program in float64. `optax.lbfgs`, vmapped, takes more than ten times as long,
because all starts wait for the slowest line search; both end at the same objective
(tests/laws/test_fit.py).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas

DELTA = 1e-3  # of the Huber loss, on logs (Hoffmann et al. 2022)
LEVEL = 0.95  # of intervals
_CHUNK = 256  # starts that run together; the others wait for the slowest of them
_FIRST, _LAST = 60, 3000  # the most iterations from all starts, and from the best ones
_BEST = 32  # starts that go on to the end
_DRAW_STARTS, _DRAWN = 4, 300  # of each draw of the bootstrap: starts, and the most iterations
_TOLERANCE = 1e-14  # relative decrease of the objective that ends a run


@dataclasses.dataclass(frozen=True)
class Fit:
  """A fitted law."""

  theta: np.ndarray  # the parameters [P]
  objective: float  # the sum of Huber losses
  residuals: np.ndarray  # log of the measured loss minus log of the law's, [n]
  draws: np.ndarray  # parameters of bootstrap samples, [draws, P]
  # The number of starts, and how many of the best ones ended at this objective.
  starts: tuple[int, int]

  @property
  def values(self) -> dict[str, float]:
    """The parameters by their published names."""
    return {name: float(value) for name, value in formulas.values(self.theta).items()}

  @property
  def drawn(self) -> dict[str, np.ndarray]:
    """The parameters of each bootstrap sample by their published names."""
    return formulas.values(self.draws)

  @property
  def intervals(self) -> dict[str, tuple[float, float]]:
    """The interval of each parameter."""
    return {name: interval(values) for name, values in self.drawn.items()}

  @property
  def spread(self) -> float:
    """The standard deviation of the residuals, by their median: outliers do not raise it."""
    return float(1.4826 * np.median(np.abs(self.residuals)))

  def scattered(self, log_losses: np.ndarray) -> np.ndarray:
    """Return losses of new runs, given the logs that the law has for them in each draw.

    A residual is drawn for each run, larger by √(n/(n − P)) because the fit has made them small.
    """
    count, dimensions = len(self.residuals), len(self.theta)
    wider = np.sqrt(count / max(1, count - dimensions))
    rng = np.random.default_rng(0)
    return np.exp(log_losses + wider * rng.choice(self.residuals, log_losses.shape))


def interval(draws: np.ndarray) -> tuple[float, float]:
  """Return the central interval that has a share `LEVEL` of the draws; NaN counts as infinite."""
  known = np.where(np.isnan(draws), np.inf, draws)
  low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method='nearest')
  return float(low), float(high)


def fit(
  logs: Mapping[str, np.ndarray],
  loss: np.ndarray,
  draws: int = 1000,
  starts: np.ndarray | None = None,
) -> Fit:
  """Fit the law to the logs of its inputs and the measured losses, each [n].

  `draws` is the number of bootstrap samples of the points, and `starts` has other θ to start from
  than the paper's.
  """
  y, starts = np.log(np.asarray(loss, float)), formulas.starts() if starts is None else starts
  if len(y) < starts.shape[1]:
    raise UserError(
      f'{formulas.FORMULA} has {starts.shape[1]} parameters, and there are {len(y)} points; give '
      'at least as many runs as parameters'
    )
  with jax.enable_x64():
    x = {name: jnp.asarray(values, jnp.float64) for name, values in logs.items()}
  run = functools.partial(_descend_all, x, y)
  everywhere = np.ones((1, len(y)))
  theta, objective = run(everywhere, starts, _FIRST)
  theta, objective = run(everywhere, theta[np.argsort(objective)[:_BEST]], _LAST)
  order = np.argsort(objective)
  best, least = theta[order[0]], float(objective[order[0]])
  agreeing = int(np.sum(objective <= least * (1 + 1e-6) + 1e-300))
  rng = np.random.default_rng(0)
  counts = rng.multinomial(len(y), np.full(len(y), 1 / len(y)), size=draws)
  near = theta[_different(theta, order)]
  drawn, reached = run(np.repeat(counts, len(near), axis=0), np.tile(near, (draws, 1)), _DRAWN)
  chosen = reached.reshape(draws, -1).argmin(axis=1)
  drawn = drawn.reshape(draws, len(near), -1)[np.arange(draws), chosen]
  law = formulas.loss(formulas.values(best), np.exp(logs['n']), np.exp(logs['d']))
  return Fit(best, least, y - np.log(law), drawn, (len(starts), agreeing))


def _different(thetas: np.ndarray, order: np.ndarray) -> np.ndarray:
  """Return the first index of an order, and up to three whose θ differs from those before."""
  kept: list[int] = []
  for i in order:
    if all(np.abs(thetas[i] - thetas[j]).max() > 1e-3 for j in kept):
      kept.append(int(i))
  return np.array([*kept, *[kept[0]] * _DRAW_STARTS][:_DRAW_STARTS])


def _descend_all(
  x: Mapping[str, jax.Array],
  y: np.ndarray,
  weights: np.ndarray,
  starts: np.ndarray,
  iterations: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Return the end and the objective of every start, [S, P] and [S].

  `x` and `y` are logs of the inputs and of the losses. The points have weights [S, n] or [1, n].
  """
  weights = np.broadcast_to(weights, (len(starts), len(y)))
  ends, objectives = [], []
  with jax.enable_x64():
    for first in range(0, len(starts), _CHUNK):  # The last chunk is filled up: one program for all.
      rows = np.minimum(np.arange(first, first + _CHUNK), len(starts) - 1)
      end, objective = _descend_chunk(
        x,
        jnp.asarray(y),
        jnp.asarray(weights[rows], jnp.float64),
        jnp.asarray(starts[rows], jnp.float64),
        iterations,
      )
      ends.append(np.asarray(end))
      objectives.append(np.asarray(objective))
  return np.concatenate(ends)[: len(starts)], np.concatenate(objectives)[: len(starts)]


@jax.jit
def _descend_chunk(
  x: Mapping[str, jax.Array],
  y: jax.Array,
  weights: jax.Array,
  starts: jax.Array,
  iterations: int,
) -> tuple[jax.Array, jax.Array]:
  return jax.vmap(functools.partial(_descend, x, y, iterations))(weights, starts)


def _descend(
  x: Mapping[str, jax.Array],
  y: jax.Array,
  iterations: int,
  weights: jax.Array,
  start: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Return the end of one start and its objective; infinite if it is not a number."""
  limits = jnp.asarray(formulas.BOUNDS, start.dtype).T

  def evaluate(theta: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the objective, its Gauss-Newton matrix and its gradient."""

    def residual(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
      r = formulas.log_loss(theta, x) - y
      return r, r

    jacobian, r = jax.jacfwd(residual, has_aux=True)(theta)
    size = jnp.abs(r)
    inside = size <= DELTA
    linear = jnp.where(inside, 0.0, DELTA * (size - 0.5 * jnp.where(inside, 0.0, DELTA)))
    objective = jnp.sum(weights * jnp.where(inside, 0.5 * r * r, linear))
    w = weights * jnp.where(inside, 1.0, DELTA / jnp.where(inside, 1.0, size))
    weighted = jacobian * w[:, None]
    return objective, weighted.T @ jacobian, weighted.T @ r

  def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
    count, theta, (value, matrix, gradient), damping, _ = state
    diagonal = jnp.diagonal(matrix)
    floor = 1e-12 * jnp.max(diagonal) + 1e-300
    damped = matrix + damping * jnp.diag(jnp.maximum(diagonal, floor))
    trial = jnp.clip(theta - jnp.linalg.solve(damped, gradient), *limits)
    new = evaluate(trial)
    better = new[0] < value  # False for NaN.
    small = jnp.isfinite(value) & (value - new[0] <= _TOLERANCE * value)
    ended = better & small | (damping > 1e14) | (value == 0)
    theta, new = jax.tree.map(
      lambda a, b: jnp.where(better, a, b), (trial, new), (theta, (value, matrix, gradient))
    )
    damping = jnp.where(better, jnp.maximum(damping / 5, 1e-14), damping * 4)
    return count + 1, theta, new, damping, ended

  def goes_on(state: tuple[Any, ...]) -> jax.Array:
    return (state[0] < iterations) & ~state[-1]

  # The first step accepts the start itself, because its gradient is 0 and its objective infinite.
  size = len(start)
  unevaluated = (jnp.asarray(jnp.inf, start.dtype), jnp.eye(size), jnp.zeros(size))
  first = (0, start, unevaluated, jnp.asarray(5e-2, start.dtype), jnp.asarray(False))
  _, theta, (value, *_), *_ = jax.lax.while_loop(goes_on, step, first)
  return theta, jnp.where(jnp.isfinite(value), value, jnp.inf)
