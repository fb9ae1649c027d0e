"""The law of the loss: Chinchilla's (Hoffmann et al. 2022).

The law maps parameters θ [5] and logs of inputs, each [n], to the log of the loss [n]. The names of
the inputs are `n` (parameters) and `d` (tokens).
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.errors import UserError

FORMULA = 'L(N, D) = E + A/N^alpha + B/D^beta'
_EXPONENT = (0.0, 3.0)
_LOG = (-20.0, 100.0)  # of a constant
LIMIT = (-20.0, 10.0)  # of log E
# Of each parameter of θ. Without bounds, exponents of hundreds can turn the power law into steps
# through a few points.
BOUNDS = (_LOG, _LOG, LIMIT, _EXPONENT, _EXPONENT)
_FLAT = 1e-6  # an exponent up to this is at its bound
_NAMES = ('A', 'B', 'E', 'alpha', 'beta')

Logs = Mapping[str, jax.Array]
Values = Mapping[str, Any]  # of parameters by name; of one fit, or [draws] of a bootstrap


def starts() -> np.ndarray:
  """Return the 4,500 θ that the paper's fit starts from: logs of A, B and E, then exponents."""
  logs, exponents = np.arange(0, 26, 5), np.arange(0, 2.1, 0.5)
  axes = logs, logs, np.arange(-1, 1.1, 0.5), exponents, exponents
  return np.array(list(itertools.product(*axes)), float)


def log_loss(theta: jax.Array, x: Logs) -> jax.Array:
  """Return the log of the loss."""
  a, b, e, alpha, beta = theta
  terms = jnp.broadcast_arrays(a - alpha * x['n'], b - beta * x['d'], e)
  return jax.nn.logsumexp(jnp.stack(terms), axis=0)


def values(theta: np.ndarray) -> dict[str, np.ndarray]:
  """Return the parameters of θ [..., P] by their published names."""
  named = dict(zip(_NAMES, np.moveaxis(theta, -1, 0), strict=False))
  constants = {name: np.exp(named.pop(name)) for name in ('E', 'A', 'B')}
  return constants | named


def loss(law: Values, n: Any, d: Any) -> Any:
  """Return the loss."""
  return law['E'] + law['A'] * n ** -law['alpha'] + law['B'] * d ** -law['beta']


def tokens_for_loss(law: Values, n: Any, target: Any) -> np.ndarray:
  """Return the tokens that a size needs for a loss; infinite if it never reaches it."""
  left = target - law['E'] - law['A'] * n ** -law['alpha']
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    needed = (law['B'] / np.where(left > 0, left, np.nan)) ** (1 / np.float64(law['beta']))
  return np.where(np.isnan(needed), np.inf, needed)


def flops(n: Any, d: Any) -> Any:
  """Return the FLOPs of training as the law counts them, 6 N D."""
  return np.float64(6) * n * d


def optimum(law: Values, budget: float) -> tuple[np.ndarray, np.ndarray]:
  """Return the size N* and the tokens D* with the least loss for a budget of FLOPs.

  N* = [(αA/(βB)) (C/6)^β]^(1/(α+β)) (Hoffmann et al. 2022, eq. 4). Where an exponent is 0, a size
  or a length is 0, infinite or NaN (`check_falls`).
  """
  alpha, beta = np.float64(law['alpha']), np.float64(law['beta'])
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    ratio = alpha * law['A'] / (beta * law['B'])
    n = (ratio * (budget / 6) ** beta) ** (1 / (alpha + beta))
    return n, budget / (6 * n)


def size_exponent(law: Values) -> np.ndarray:
  """Return a of N* ∝ C^a and D* ∝ C^(1 − a); NaN if both exponents of the law are 0."""
  with np.errstate(invalid='ignore'):
    return np.float64(law['beta']) / (law['alpha'] + law['beta'])


def flat(law: Values) -> list[str]:
  """Return the names of the exponents of a fit that are 0: N or D does not lower its loss."""
  return [name for name in ('alpha', 'beta') if law[name] <= _FLAT]


def check_falls(law: Values, flag: str) -> None:
  """Check that by a fitted law the loss falls with N and with D, as the answer to a flag needs."""
  if names := flat(law):
    zero = ' and '.join(names) + (' is 0' if len(names) == 1 else ' are 0')
    what = {'alpha': 'larger sizes', 'beta': 'longer runs'}
    who = ' and '.join(what[name] for name in names)
    raise UserError(
      f'{flag} has no answer: the fitted {zero}, so by this law {who} do not lower the loss, and '
      f'no best size or plan follows; give runs in which they do, or leave out {flag.split("=")[0]}'
    )
