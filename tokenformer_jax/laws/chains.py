"""Find the chain of sizes that reaches a loss at the least cost, by the laws of loss and mixing."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas, mixing
from tokenformer_jax.laws.fit import interval
from tokenformer_jax.laws.formulas import Values

DECAY = 0.2  # the share of the tokens in which the rate decays; no chain grows there
_SHARES = np.linspace(0.02, 0.98, 49)  # of all tokens, at which a chain may grow
_STEPS = 80  # bisections of the log of the tokens
_AROUND = 12.0  # how far from its first guess this log may be
_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class PricedSize:
  """A size that a chain may have, and the lowest and the highest cost of a token."""

  parameters: float
  cost: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Leg:
  """A size of a chain, the tokens trained at it, the loss after a decay, and its cost."""

  parameters: float
  tokens: float
  loss: float
  cost: float


@dataclasses.dataclass(frozen=True)
class Chain:
  """The cheapest chain, and training from scratch."""

  legs: tuple[Leg, ...]
  scratch: Leg  # the size that reaches the loss from scratch at the least cost
  scratch_last: Leg  # the chain's last size from scratch, to the same loss
  # Intervals over draws of the law. In each draw, the chain keeps its sizes and its shares of the
  # tokens, and trains on as many tokens as it needs to reach the loss.
  cost: tuple[float, float]
  scratch_cost: tuple[float, float]
  saving: tuple[float, float]  # the share of `scratch_cost` that the chain saves
  reached: tuple[float, float]  # the loss that the chain reaches on the tokens of `legs`

  @property
  def total(self) -> float:
    """The cost of the chain."""
    return sum(leg.cost for leg in self.legs)


def from_sizes(sizes: Sequence[float]) -> tuple[list[PricedSize], str]:
  """Return sizes whose tokens cost FLOPs, and the unit."""
  costs = [float(formulas.flops(size, 1)) for size in sizes]
  return [PricedSize(size, (cost, cost)) for size, cost in zip(sizes, costs, strict=True)], 'FLOPs'


def read_stages(path: str) -> tuple[list[PricedSize], str]:
  """Return the sizes in the JSON file of `plan --grow`, priced in chip-hours, and the unit."""
  try:
    with open(path, encoding='utf-8') as file:
      content = json.load(file)
    plans = content.get('stages', [content])
    return [_priced(plan) for plan in plans], 'chip-hours'
  except OSError as error:
    raise UserError(f'--stages={path} cannot be read ({error.strerror})') from error
  except (ValueError, AttributeError, KeyError, TypeError) as error:
    raise UserError(
      f'--stages={path} is not the JSON file of plan; write it by plan --grow=… --json={path}'
    ) from error


def _priced(plan: dict[str, Any]) -> PricedSize:
  fast, slow = (plan['chips'] / speed / _HOUR for speed in plan['tokens_per_second'])
  return PricedSize(float(plan['parameters']), (fast, slow))


def find(
  values: Values,
  draws: Values,
  sizes: Sequence[PricedSize],
  target: float,
  gamma: np.ndarray | float,
  growth_cost: float = 0.0,
) -> Chain:
  """Return the chain of up to three sizes that reaches a loss at the least cost.

  Args:
    values: the fitted law.
    draws: its bootstrap draws, [draws] each.
    sizes: those that a chain may have.
    target: the loss.
    gamma: the mixing exponent; a number, or one for each draw.
    growth_cost: the cost of one growth.
  """
  formulas.check_falls(values, f'--target_loss={target:g}')
  gamma = np.broadcast_to(gamma, draws['E'].shape)
  middle = np.array([np.median(gamma)])
  one = {name: np.array([value]) for name, value in values.items()}
  sizes = sorted(sizes, key=lambda size: size.parameters)
  counts = [size.parameters for size in sizes]
  costs = np.array([np.sqrt(low * high) for low, high in (size.cost for size in sizes)])
  alone = np.array([float(formulas.tokens_for_loss(values, n, target)) for n in counts])
  if not np.isfinite(alone).any():
    least = float(np.min([formulas.loss(values, n, np.inf) for n in counts]))
    raise UserError(
      f'--target_loss={target:g} is out of reach: by the fitted law the largest of these sizes '
      f'ends at {least:.4g} however long it trains; take a higher loss or larger sizes'
    )

  def cheapest(
    chain: tuple[int, ...], shares: np.ndarray
  ) -> tuple[float, tuple[int, ...], tuple[float, ...], float]:
    """Return the least cost of a chain, the chain, its shares of the tokens, and its tokens."""
    chosen = [counts[index] for index in chain]
    # A chain is never ahead of its last size on as many tokens, unless a smaller one is.
    about = np.repeat(formulas.tokens_for_loss(one, chosen[-1], target), shares.shape[1])
    tokens = tokens_to_reach(
      lambda tokens: mixing.grown_loss(one, chosen, shares, tokens, middle), about, target
    )
    of_legs = np.diff(np.concatenate([0 * shares[:1], shares, 0 * shares[:1] + 1]), axis=0)
    cost = costs[list(chain)] @ (of_legs * tokens) + growth_cost * len(shares)
    at = int(np.argmin(cost))
    return float(cost[at]), chain, tuple(shares[:, at]), float(tokens[at])

  scratch = int(np.argmin(alone * costs))
  best = (float(alone[scratch] * costs[scratch]), (scratch,), (), float(alone[scratch]))
  for growths in (1, 2):
    allowed = _SHARES[_SHARES <= 1 - DECAY]
    shares = np.array(list(itertools.combinations(allowed, growths))).T  # [growths, grid]
    for chain in itertools.combinations(range(len(sizes)), growths + 1):
      best = min(best, cheapest(chain, shares))
  _, chain, chosen_shares, tokens = best
  leg_tokens = tokens * np.diff([0.0, *chosen_shares, 1.0])
  legs = []
  for number, (index, trained) in enumerate(zip(chain, leg_tokens, strict=True)):
    path = [(counts[i], float(x)) for i, x in zip(chain[: number + 1], leg_tokens, strict=False)]
    loss = float(mixing.chain_loss(one, path, middle)[0])
    cost = float(trained * costs[index] + growth_cost * bool(number))
    legs.append(Leg(counts[index], float(trained), loss, cost))
  best_alone, last_alone = (
    Leg(counts[i], float(alone[i]), target, float(alone[i] * costs[i]))
    for i in (scratch, chain[-1])
  )
  path = list(zip(chain, map(float, leg_tokens), strict=True))
  intervals = _intervals(draws, sizes, path, scratch, target, gamma, growth_cost)
  return Chain(tuple(legs), best_alone, last_alone, *intervals)


def _intervals(
  draws: Values,
  sizes: Sequence[PricedSize],
  path: Sequence[tuple[int, float]],
  scratch: int,
  target: float,
  gamma: np.ndarray,
  growth_cost: float,
) -> tuple[tuple[float, float], ...]:
  """Return the intervals of a `Chain`; `path` has the index and the tokens of each size."""
  between = np.random.default_rng(0).random(len(draws['E']))
  low, high = np.array([size.cost for size in sizes]).T[:, :, None]
  prices = low * (high / low) ** between  # Fast and slow hold for all sizes together.
  whole = sum(tokens for _, tokens in path)

  def legs(tokens: np.ndarray | float) -> list[Any]:
    return [(sizes[index].parameters, leg / whole * tokens) for index, leg in path]

  tokens, alone = (
    formulas.tokens_for_loss(draws, sizes[index].parameters, target)
    for index in (path[-1][0], scratch)
  )
  if len(path) > 1:
    tokens = tokens_to_reach(
      lambda tokens: mixing.chain_loss(draws, legs(tokens), gamma), tokens, target
    )
  paid = [leg * prices[index] for (index, _), (_, leg) in zip(path, legs(tokens), strict=True)]
  cost = np.sum(paid, axis=0) + growth_cost * (len(path) - 1)
  scratch_cost = alone * prices[scratch]
  with np.errstate(divide='ignore', invalid='ignore'):
    saving = 1 - cost / scratch_cost
  known = saving[~np.isnan(saving)]  # The others reach the loss neither way.
  saved = interval(known) if len(known) else (-np.inf, np.inf)
  reached = interval(mixing.chain_loss(draws, legs(whole), gamma))
  return interval(cost), interval(scratch_cost), saved, reached


def tokens_to_reach(
  loss: Callable[[np.ndarray], np.ndarray], about: np.ndarray, target: float
) -> np.ndarray:
  """Return the tokens at which a falling function reaches a loss; infinite if it does not.

  `about` is a guess for each draw, within a factor of e¹².
  """
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    low, high = np.log(about) - _AROUND, np.log(about) + _AROUND
    top = high
    for _ in range(_STEPS):
      middle = (low + high) / 2
      enough = loss(np.exp(middle)) <= target
      low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(high < top, np.exp(high), np.inf)
