"""A law of mixing: what is left of the gap between a grown model and a large one from scratch.

A model of size N grows to M after D_g of its D tokens. With the decay of the rate at the end of
each, its loss lies between those of the two sizes from scratch on the same D tokens:

  L = L(M, D) + (L(N, D) − L(M, D)) (D_g / D)^γ

The mixing exponent γ says how fast the grown model forgets that it was small. The gap closes as a
power of the tokens, with no time scale of its own. In a chain of several sizes, the gap between
each two closes in this way from when the chain has left the smaller one; so two growths at once are
one.
docs/laws.md compares this with the handover of growth.py.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas
from tokenformer_jax.laws.formulas import Values
from tokenformer_jax.laws.growth import (
  Assumptions,
  Leg,
  Plan,
  Stage,
  over_draws,
  tokens_to_reach,
)

LARGEST = 30.0  # γ; a gap that closes faster is closed
TYPICAL = 2.1  # γ of growth to four times the parameters, where none is measured: docs/growth.md
_GRID = np.linspace(0, LARGEST, 3001)
_SHARES = np.linspace(0.02, 0.98, 49)  # of all tokens, at which a chain may grow


def chain_loss(
  values: Values, legs: Sequence[tuple[float, float]], gamma: np.ndarray
) -> np.ndarray:
  """Return the loss that a chain reaches, for every draw of the law.

  The legs are sizes and the tokens trained at each, in the last one with those of the decay.
  """
  tokens = np.cumsum([tokens for _, tokens in legs], axis=0)
  return grown_loss(values, [size for size, _ in legs], tokens[:-1] / tokens[-1], tokens[-1], gamma)


def grown_loss(
  values: Values, sizes: Sequence[float], shares: Sequence, tokens: np.ndarray, gamma: np.ndarray
) -> np.ndarray:
  """Return the loss of chains that grow at shares of all their tokens."""
  alone = [formulas.loss(values, size, tokens) for size in sizes]
  found = alone[-1]
  for before, after, share in zip(alone, alone[1:], shares, strict=False):
    found = found + (before - after) * share**gamma
  return found


def exponent(
  values: Values, grown: Sequence[tuple[tuple[float, float], tuple[float, float], float]]
) -> np.ndarray:
  """Return the γ that explains the losses of grown runs best, for every draw of the law.

  Args:
    values: the law, of one fit or of draws.
    grown: for each run the size and the tokens before its growth, those after it, and its loss.
  """
  draws = np.atleast_1d(values['E'])[:, None]
  column = {name: np.atleast_1d(value)[:, None] for name, value in values.items()}
  errors = np.zeros((len(draws), len(_GRID)))
  for before, after, loss in grown:
    predicted = chain_loss(column, [before, after], _GRID[None])
    errors += np.square(np.log(predicted) - np.log(loss))
  return _GRID[np.argmin(errors, axis=1)]


def plan(
  values: Values,
  draws: Values,
  stages: Sequence[Stage],
  target: float,
  assumed: Assumptions,
) -> Plan:
  """Return the chain of up to three sizes that reaches the loss at the least cost.

  For the arguments see `growth.plan`; `assumed` has the γ of each draw, or one. No chain grows in
  its decay.

  Raises:
    UserError: no size reaches the loss, or an exponent of the law is 0.
  """
  formulas.check_falls(values, f'--target_loss={target:g}')
  gamma = np.broadcast_to(assumed.mixing, draws['E'].shape)
  stages = sorted(stages, key=lambda stage: stage.parameters)
  sizes = np.array([stage.parameters for stage in stages])
  costs = np.array([np.sqrt(low * high) for low, high in (stage.cost for stage in stages)])
  middle = np.array([np.median(gamma)])
  one = {name: np.array([value]) for name, value in values.items()}
  alone = np.array([formulas.tokens_for_loss(values, n, np.asarray(target)) for n in sizes])
  if not np.isfinite(alone).any():
    least = float(np.min(formulas.loss(values, sizes, np.inf)))
    raise UserError(
      f'--target_loss={target:g} is out of reach: by the fitted law the largest of these sizes '
      f'ends at {least:.4g} however long it trains; take a higher loss or larger sizes'
    )
  scratch = np.where(np.isfinite(alone), alone * costs, np.inf)
  first = int(np.argmin(scratch))
  best = (float(scratch[first]), (first,), (), float(alone[first]))
  allowed = _SHARES[1 - assumed.decay_share >= _SHARES]  # none in a decay of nearly all tokens
  for growths in (1, 2):
    shares = np.array(list(itertools.combinations(allowed, growths))).T  # [growths, grid]
    for some in itertools.combinations(range(len(sizes)), growths + 1) if shares.size else ():
      best = min(best, _cheapest(one, sizes, costs, some, shares, target, assumed, middle))
  _, chain, shares, tokens = best
  parts = tokens * np.diff([0.0, *shares, 1.0])
  path = [(float(sizes[index]), float(part)) for index, part in zip(chain, parts, strict=True)]
  legs = []
  for number, (index, (size, part)) in enumerate(zip(chain, path, strict=True)):
    loss = float(chain_loss(one, path[: number + 1], middle)[0])
    price = float(part * costs[index] + assumed.growth_cost * bool(number))
    legs.append(Leg(size, part, loss, price))
  return Plan(
    legs=tuple(legs),
    scratch=_scratch_leg(sizes, costs, alone, first, target),
    scratch_last=_scratch_leg(sizes, costs, alone, chain[-1], target),
    **over_draws(
      draws,
      stages,
      list(zip(chain, parts, strict=True)),
      first,
      target,
      assumed.growth_cost,
      lambda parts: chain_loss(draws, parts, gamma),
    ),
  )


def _scratch_leg(
  sizes: np.ndarray, costs: np.ndarray, tokens: np.ndarray, index: int, target: float
) -> Leg:
  count = float(tokens[index])
  return Leg(float(sizes[index]), count, target, float(count * costs[index]))


def _cheapest(
  values: Values,
  sizes: np.ndarray,
  costs: np.ndarray,
  chain: tuple[int, ...],
  shares: np.ndarray,
  target: float,
  assumed: Assumptions,
  gamma: np.ndarray,
) -> tuple[float, tuple[int, ...], tuple[float, ...], float]:
  """Return the least cost of a chain of sizes, the chain, its shares of the tokens, and its tokens.

  `values` and `gamma` are [1], and `shares` [growths, grid] are those to choose from.
  """
  chosen = sizes[list(chain)]
  # A chain is never ahead of its last size on as many tokens, unless a smaller one is.
  about = formulas.tokens_for_loss(values, chosen[-1], np.asarray(target))
  tokens = tokens_to_reach(
    lambda tokens: grown_loss(values, chosen, shares, tokens, gamma),
    np.repeat(about, shares.shape[1]),
    target,
  )
  parts = np.diff(np.concatenate([0 * shares[:1], shares, 0 * shares[:1] + 1]), axis=0)
  cost = costs[list(chain)] @ (parts * tokens) + assumed.growth_cost * len(shares)
  at = int(np.argmin(cost))
  return float(cost[at]), chain, tuple(shares[:, at]), float(tokens[at])
