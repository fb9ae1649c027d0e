"""The laws of Kaplan et al. (2020) and Hoffmann et al. (2022, "Chinchilla") as functions of logs.

A law maps parameters θ [P] and logs of inputs, each [n], to the log of the loss [n]. The names of
the inputs are `n` (parameters that a token uses), `total` (all parameters), `d` (tokens), `s`
(steps), `b` (tokens of a step) and `l` (the measured loss).
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.errors import UserError

_EXPONENT = (0.0, 3.0)
_LOG_EXPONENT = (-9.0, 1.1)
_LOG = (-20.0, 100.0)  # of a constant
LIMIT = (-20.0, 10.0)  # of log E
_FLAT = 1e-6  # an exponent up to this is at its bound

Logs = Mapping[str, jax.Array]
Values = Mapping[str, np.ndarray]  # of parameters by name; of one fit, or [draws] of a bootstrap


@dataclasses.dataclass(frozen=True)
class Law:
  """A law and how to fit it.

  Attributes:
    name: the name in tables and in JSON.
    log_loss: maps θ and inputs to the log of the loss.
    values: maps θ [..., P] to the parameters by their published names.
    starts: returns θ [S, P] to start from, given the inputs and the log of the loss.
    bounds: of each parameter of θ. Without them, exponents of hundreds can turn the power law into
      steps through a few points.
  """

  name: str
  formula: str
  inputs: tuple[str, ...]
  log_loss: Callable[[jax.Array, Logs], jax.Array]
  values: Callable[[np.ndarray], dict[str, np.ndarray]]
  starts: Callable[[Logs, np.ndarray], np.ndarray]
  bounds: tuple[tuple[float, float], ...]

  @property
  def parameters(self) -> tuple[str, ...]:
    """The published names of the parameters."""
    return tuple(self.values(np.zeros(8)))


def log_sum_exp(*terms: jax.Array) -> jax.Array:
  """Return log Σ eˣ of terms of equal shape."""
  return jax.nn.logsumexp(jnp.stack(jnp.broadcast_arrays(*terms)), axis=0)


def _chinchilla_log_loss(theta: jax.Array, x: Logs) -> jax.Array:
  a, b, e, alpha, beta = theta
  return log_sum_exp(a - alpha * x['n'], b - beta * x['d'], e)


def _chinchilla_values(theta: np.ndarray) -> dict[str, np.ndarray]:
  a, b, e, alpha, beta = (theta[..., i] for i in range(5))
  return {'E': np.exp(e), 'A': np.exp(a), 'B': np.exp(b), 'alpha': alpha, 'beta': beta}


def chinchilla_starts(*unused: object) -> np.ndarray:
  """Return the 4,500 starts of the paper, as (a, b, e, α, β)."""
  del unused
  logs, exponents = np.arange(0, 26, 5), np.arange(0, 2.1, 0.5)
  axes = logs, logs, np.arange(-1, 1.1, 0.5), exponents, exponents
  return np.array(list(itertools.product(*axes)), float)


CHINCHILLA = Law(
  'chinchilla',
  'L(N, D) = E + A/N^alpha + B/D^beta',
  ('n', 'd'),
  _chinchilla_log_loss,
  _chinchilla_values,
  chinchilla_starts,
  (_LOG, _LOG, LIMIT, _EXPONENT, _EXPONENT),
)


def _experts_log_loss(theta: jax.Array, x: Logs) -> jax.Array:
  a, b, e, alpha, beta, gamma = theta
  size_term = a - alpha * x['n'] - gamma * (x['total'] - x['n'])
  return log_sum_exp(size_term, b - beta * x['d'], e)


EXPERTS = Law(
  'experts',
  'L(N, M, D) = E + A/(N^alpha · (M/N)^gamma) + B/D^beta, M all parameters, N those a token uses',
  ('n', 'total', 'd'),
  _experts_log_loss,
  lambda theta: _chinchilla_values(theta) | {'gamma': theta[..., 5]},
  lambda *_: np.concatenate(
    [np.insert(chinchilla_starts(), 5, gamma, axis=1) for gamma in (0.0, 0.2)]
  ),
  (_LOG, _LOG, LIMIT, _EXPONENT, _EXPONENT, (-1.0, 3.0)),
)


def _power(name: str, formula: str, variable: str, names: tuple[str, str]) -> Law:
  """Return a law log L = k − α log x; its constant is x_c = e^(k/α)."""

  def log_loss(theta: jax.Array, x: Logs) -> jax.Array:
    return theta[0] - theta[1] * x[variable]

  def values(theta: np.ndarray) -> dict[str, np.ndarray]:
    return {names[0]: theta[..., 1], names[1]: _constant(theta[..., 0], theta[..., 1])}

  def starts(x: Logs, y: np.ndarray) -> np.ndarray:
    return np.array(
      [[y.mean() + alpha * np.mean(x[variable]), alpha] for alpha in (0.02, 0.1, 0.5)]
    )

  return Law(name, formula, (variable,), log_loss, values, starts, (_LOG, _EXPONENT))


def _constant(k: np.ndarray, alpha: np.ndarray) -> np.ndarray:
  """Return e^(k/α), the size at which a power law has the loss 1."""
  with np.errstate(over='ignore', divide='ignore', invalid='ignore'):
    return np.exp(np.asarray(k) / np.asarray(alpha))


KAPLAN_N = _power('kaplan_n', 'L(N) = (N_c/N)^alpha_N', 'n', ('alpha_N', 'N_c'))
KAPLAN_D = _power('kaplan_d', 'L(D) = (D_c/D)^alpha_D', 'd', ('alpha_D', 'D_c'))


def _kaplan_nd_log_loss(theta: jax.Array, x: Logs) -> jax.Array:
  log_n, log_d, n_c, d_c = theta
  ratio = jnp.exp(log_n - log_d)
  return jnp.exp(log_d) * log_sum_exp(ratio * (n_c - x['n']), d_c - x['d'])


def _kaplan_nd_values(theta: np.ndarray) -> dict[str, np.ndarray]:
  alpha_n, alpha_d, n_c, d_c = np.exp(np.moveaxis(theta[..., :4], -1, 0))
  return {'alpha_N': alpha_n, 'alpha_D': alpha_d, 'N_c': n_c, 'D_c': d_c}


def _kaplan_nd_starts(x: Logs, y: np.ndarray) -> np.ndarray:
  """Return starts at which N and D alone would each explain the mean loss."""
  exponents = (0.03, 0.1, 0.3)
  level = max(float(y.mean()), 0.1)
  found = []
  for alpha_n, alpha_d, part in itertools.product(exponents, exponents, (0.5, 0.9)):
    n_c, d_c = np.mean(x['n']) + part * level / alpha_n, np.mean(x['d']) + part * level / alpha_d
    found.append([np.log(alpha_n), np.log(alpha_d), n_c, d_c])
  return np.array(found)


KAPLAN_ND = Law(
  'kaplan_nd',
  'L(N, D) = [(N_c/N)^(alpha_N/alpha_D) + D_c/D]^alpha_D',
  ('n', 'd'),
  _kaplan_nd_log_loss,
  _kaplan_nd_values,
  _kaplan_nd_starts,
  (_LOG_EXPONENT, _LOG_EXPONENT, _LOG, _LOG),
)


def _kaplan_ns_log_loss(theta: jax.Array, x: Logs) -> jax.Array:
  k_n, alpha_n, k_s, alpha_s = theta[:4]
  return log_sum_exp(k_n - alpha_n * x['n'], k_s - alpha_s * x['s'])


def _kaplan_ns_values(theta: np.ndarray) -> dict[str, np.ndarray]:
  k_n, alpha_n, k_s, alpha_s = np.moveaxis(theta[..., :4], -1, 0)
  n_c, s_c = _constant(k_n, alpha_n), _constant(k_s, alpha_s)
  return {'alpha_N': alpha_n, 'alpha_S': alpha_s, 'N_c': n_c, 'S_c': s_c}


def _kaplan_ns_starts(x: Logs, y: np.ndarray) -> np.ndarray:
  found = []
  for alpha_n, alpha_s, part in itertools.product((0.05, 0.2), (0.2, 0.7), (0.3, 1.0, 2.0)):
    k_n = y.mean() - 0.2 + alpha_n * np.mean(x['n'])
    found.append([k_n, alpha_n, y.mean() - part + alpha_s * np.mean(x['s']), alpha_s])
  return np.array(found)


KAPLAN_NS = Law(
  'kaplan_ns',
  'L(N, S) = (N_c/N)^alpha_N + (S_c/S)^alpha_S',
  ('n', 's'),
  _kaplan_ns_log_loss,
  _kaplan_ns_values,
  _kaplan_ns_starts,
  (_LOG, _EXPONENT, _LOG, _EXPONENT),
)


def _least_steps(theta: jax.Array, x: Logs) -> jax.Array:
  """Return log S_min = log S − log(1 + B_crit/B), where B_crit = B_star/L^(1/alpha_B)."""
  critical = theta[4] - jnp.exp(theta[5]) * x['l']
  return x['s'] - log_sum_exp(jnp.zeros_like(critical), critical - x['b'])


KAPLAN_NSB = Law(
  'kaplan_nsb',
  'L(N, S) = (N_c/N)^alpha_N + (S_c/S_min)^alpha_S, S_min = S/(1 + B_crit/B), '
  'B_crit = B_star/L^(1/alpha_B)',
  ('n', 's', 'b', 'l'),
  lambda theta, x: _kaplan_ns_log_loss(theta, {'n': x['n'], 's': _least_steps(theta, x)}),
  lambda theta: (
    _kaplan_ns_values(theta) | {'B_star': np.exp(theta[..., 4]), 'alpha_B': np.exp(-theta[..., 5])}
  ),
  lambda x, y: np.array(
    [
      [*start, np.mean(x['b']) + shift + np.exp(power) * y.mean(), power]
      for start in _kaplan_ns_starts(x, y)
      for shift in (-2.0, 0.0, 2.0)
      for power in (0.5, 1.5)
    ]
  ),
  (_LOG, _EXPONENT, _LOG, _EXPONENT, _LOG, (-2.0, 3.0)),
)


@dataclasses.dataclass(frozen=True)
class Compute:
  """How training compute follows from size and tokens: C = factor · N^power · D."""

  name: str = '6ND'  # or `exact`, for a fit to exact FLOPs
  factor: float = 6.0
  power: float = 1.0

  def flops(self, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Return the FLOPs of training."""
    return self.factor * n**self.power * d

  def tokens(self, n: np.ndarray, flops: np.ndarray) -> np.ndarray:
    """Return the tokens that a budget of FLOPs pays for."""
    return flops / (self.factor * n**self.power)


def loss(values: Values, n: np.ndarray, d: np.ndarray) -> np.ndarray:
  """Return Chinchilla's loss."""
  return values['E'] + values['A'] * n ** -values['alpha'] + values['B'] * d ** -values['beta']


def tokens_for_loss(values: Values, n: np.ndarray, target: np.ndarray) -> np.ndarray:
  """Return the tokens that a size needs for a loss; infinite if it never reaches it."""
  left = target - values['E'] - values['A'] * n ** -values['alpha']
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    needed = (values['B'] / np.where(left > 0, left, np.nan)) ** (1 / np.float64(values['beta']))
  return np.where(np.isnan(needed), np.inf, needed)


def optimum(
  values: Values, flops: np.ndarray, compute: Compute = Compute()
) -> tuple[np.ndarray, np.ndarray]:
  """Return the size N* and the tokens D* with the least loss for a budget of FLOPs.

  With C = k N^p D it is N* = [(αA/(pβB)) (C/k)^β]^(1/(α+pβ)). For p = 1 and k = 6 that is the
  closed form of Hoffmann et al. (2022), eq. 4. Where an exponent is 0, a size or a length is 0,
  infinite or NaN (`check_falls`).
  """
  alpha, beta = np.float64(values['alpha']), np.float64(values['beta'])
  p, k = compute.power, compute.factor
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    ratio = alpha * values['A'] / (p * beta * values['B'])
    n = (ratio * (flops / k) ** beta) ** (1 / (alpha + p * beta))
    return n, compute.tokens(n, flops)


def exponents(values: Values, compute: Compute = Compute()) -> tuple[np.ndarray, np.ndarray]:
  """Return a and b of N* ∝ C^a and D* ∝ C^b; NaN if both exponents of the law are 0."""
  with np.errstate(invalid='ignore'):
    a = np.float64(values['beta']) / (values['alpha'] + compute.power * values['beta'])
  return a, 1 - compute.power * a


def flat(values: Values) -> list[str]:
  """Return the names of the exponents of a fit that are 0: N or D does not lower its loss."""
  return [name for name in ('alpha', 'beta') if values[name] <= _FLAT]


def check_falls(values: Values, flag: str) -> None:
  """Check that by a fitted law the loss falls with N and with D, as the answer to a flag needs.

  Raises:
    UserError: it does not, so no size or length is the best one.
  """
  if names := flat(values):
    zero = ' and '.join(names) + (' is 0' if len(names) == 1 else ' are 0')
    what = {'alpha': 'larger sizes', 'beta': 'longer runs'}
    who = ' and '.join(what[name] for name in names)
    raise UserError(
      f'{flag} has no answer: the fitted {zero}, so by this law {who} do not lower the loss, and '
      f'no best size or plan follows; give runs in which they do, or leave out {flag.split("=")[0]}'
    )
