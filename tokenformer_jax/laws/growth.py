"""Plan the chain of sizes that reaches a loss at the least cost, by a law and a model of growth.

The model has three statements, and docs/laws.md says how far to trust them.

1. A model in its stable phase is as good as the loss that a decay from here would reach. After s
   tokens at a constant rate that is L(N, s/(1 − q)), q being the decay's share of all tokens.
2. Growth keeps the function, so it keeps this loss l. The grown model of size M is worth the tokens
   with which size M reaches l from scratch, less a part c, the handover:
   (1 − c) (1 − q) D_M(l), where L(M, D_M(l)) = l.
3. Then it learns as a model from scratch. The last stage ends with the decay.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas
from tokenformer_jax.laws.fit import interval
from tokenformer_jax.laws.formulas import Values

_GRID = 400  # losses at which a chain may grow
# The first of them is that of the smallest size after this part of its tokens from scratch.
_FIRST = 0.005
_STEPS = 80  # bisections of the log of the tokens
_AROUND = 12.0  # how far from its first guess this log may be


@dataclasses.dataclass(frozen=True)
class Stage:
  """A size that a chain may have."""

  parameters: float  # N
  cost: tuple[float, float]  # of a token in the unit of the plan, the lowest and the highest


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """The assumptions of a plan."""

  handover: float | np.ndarray = 0.0  # c; a number, or one for each draw of the law
  decay_share: float = 0.2  # q
  growth_cost: float = 0.0  # of one growth, in the unit of the plan
  unit: str = 'FLOPs'  # of costs, such as `chip-hours`
  mixing: float | np.ndarray | None = None  # γ of mixing.py, in the place of c


@dataclasses.dataclass(frozen=True)
class Leg:
  """A part of a chain: a size, the tokens that it trains on, the loss that it ends with, its cost.

  The loss is the one that a decay would reach, as in statement 1.
  """

  parameters: float
  tokens: float
  loss: float
  cost: float


@dataclasses.dataclass(frozen=True)
class Plan:
  """The best chain, and the best size from scratch."""

  legs: tuple[Leg, ...]  # of the chain
  scratch: Leg  # of the size that reaches the loss from scratch at the least cost
  scratch_last: Leg  # of the chain's last size from scratch, to the same loss
  # Intervals over draws of the law. In each draw, the chain keeps its sizes and its shares of the
  # tokens, and trains on as many tokens as it needs to reach the loss.
  cost: tuple[float, float]  # of the chain
  scratch_cost: tuple[float, float]  # of the size of `scratch`
  saving: tuple[float, float]  # the part of `scratch_cost` that the chain saves
  reached: tuple[float, float]  # the loss that the chain reaches on the tokens of `legs`

  @property
  def total(self) -> float:
    """The cost of the chain."""
    return sum(leg.cost for leg in self.legs)


def chain_loss(
  values: Values, legs: Sequence[tuple[float, float]], assumed: Assumptions
) -> np.ndarray:
  """Return the loss that a chain reaches, for every draw of the law.

  The legs are sizes and the tokens trained at each, in the last one with those of the decay.
  """
  stable = 1 - assumed.decay_share
  effective = np.zeros_like(values['E'])
  for i, (size, tokens) in enumerate(legs):
    if i:
      loss = formulas.loss(values, legs[i - 1][0], effective / stable)
      worth = formulas.tokens_for_loss(values, size, loss)
      effective = (1 - np.asarray(assumed.handover)) * stable * worth
    effective = effective + tokens
  return formulas.loss(values, legs[-1][0], effective)


def handover(
  values: Values,
  before: tuple[float, float],
  after: tuple[float, float],
  final_loss: float,
  decay_share: float,
) -> np.ndarray:
  """Return the c with which the model predicts the loss that a grown run reached.

  `values` is the law of one fit, or of draws. `before` and `after` are the size and the tokens
  before and after the growth, those of the decay included; `decay_share` is q.
  """
  stable = 1 - decay_share
  at_growth = formulas.loss(values, before[0], before[1] / stable)
  worth = formulas.tokens_for_loss(values, after[0], at_growth)
  needed = formulas.tokens_for_loss(values, after[0], np.asarray(final_loss))
  with np.errstate(invalid='ignore'):
    return 1 - (needed - after[1]) / (stable * worth)


def plan(
  values: Values, draws: Values, stages: Sequence[Stage], target: float, assumed: Assumptions
) -> Plan:
  """Return the chain with the least cost, by dynamic programming over losses and sizes.

  `values` is the fitted law, and `draws` are its bootstrap draws, [draws] each. The handover of
  `assumed` may have a number for each draw.

  Raises:
    UserError: no size reaches the loss, or an exponent of the law is 0.
  """
  formulas.check_falls(values, f'--target_loss={target:g}')
  stages = sorted(stages, key=lambda stage: stage.parameters)
  sizes = np.array([stage.parameters for stage in stages])
  central = dataclasses.replace(assumed, handover=float(np.median(assumed.handover)))
  costs = np.array([np.sqrt(low * high) for low, high in (stage.cost for stage in stages)])
  found = _Search(values, sizes, costs, target, central)
  if not np.isfinite(found.scratch.min()):
    least = float(np.min(formulas.loss(values, sizes, np.inf)))
    raise UserError(
      f'--target_loss={target:g} is out of reach: by the fitted law the largest of these sizes '
      f'ends at {least:.4g} however long it trains; take a higher loss or larger sizes'
    )
  chain, legs = found.legs()
  scratch = int(np.argmin(found.scratch))
  path = [(index, leg.tokens) for index, leg in zip(chain, legs, strict=True)]
  return Plan(
    legs=legs,
    scratch=found.scratch_leg(scratch),
    scratch_last=found.scratch_leg(chain[-1]),
    **over_draws(
      draws,
      stages,
      path,
      scratch,
      target,
      assumed.growth_cost,
      lambda parts: chain_loss(draws, parts, assumed),
    ),
  )


def over_draws(
  draws: Values,
  stages: Sequence[Stage],
  path: Sequence[tuple[int, float]],
  scratch: int,
  target: float,
  growth_cost: float,
  loss: Callable[[Sequence[tuple[float, np.ndarray]]], np.ndarray],
) -> dict[str, tuple[float, float]]:
  """Return the intervals of a `Plan` by name.

  Args:
    draws: the law, [draws] each.
    stages: the sizes, with the costs of their tokens.
    path: for each part of the chain, the index of its size and its tokens.
    scratch: the index of the size that trains from scratch.
    target: the loss that both reach.
    growth_cost: the cost of one growth.
    loss: returns the loss of a chain for every draw, given sizes and tokens.
  """
  between = np.random.default_rng(0).random(len(draws['E']))
  low, high = np.array([stage.cost for stage in stages]).T[:, :, None]
  prices = low * (high / low) ** between  # Fast and slow hold for all sizes together.
  whole = sum(tokens for _, tokens in path)

  def parts(tokens: np.ndarray) -> list[tuple[float, np.ndarray]]:
    return [(stages[index].parameters, part / whole * tokens) for index, part in path]

  needed = [
    formulas.tokens_for_loss(draws, stages[index].parameters, np.asarray(target))
    for index in (path[-1][0], scratch)
  ]
  tokens, alone = needed
  if len(path) > 1:
    tokens = tokens_to_reach(lambda tokens: loss(parts(tokens)), tokens, target)
  paid = [part * prices[index] for (index, _), (_, part) in zip(path, parts(tokens), strict=True)]
  cost, scratch_cost = sum(paid) + growth_cost * (len(path) - 1), alone * prices[scratch]
  with np.errstate(divide='ignore', invalid='ignore'):
    saving = 1 - cost / scratch_cost
  known = saving[~np.isnan(saving)]  # The others reach the loss neither way.
  return {
    'cost': interval(cost),
    'scratch_cost': interval(scratch_cost),
    'saving': interval(known) if len(known) else (-np.inf, np.inf),
    'reached': interval(loss(parts(np.asarray(whole)))),
  }


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


class _Search:
  """The least costs of all states (size, loss)."""

  def __init__(
    self,
    values: Values,
    sizes: np.ndarray,
    costs: np.ndarray,
    target: float,
    assumed: Assumptions,
  ):
    """Search. `values` is one law, and the ascending sizes [K] have costs of a token [K]."""
    self.sizes, self.costs, self.assumed, self.target = sizes, costs, assumed, target
    stable = 1 - assumed.decay_share
    at_target = np.array([formulas.tokens_for_loss(values, n, np.asarray(target)) for n in sizes])
    self.tokens_at_target = at_target  # [K]
    shortest = at_target.min() if np.isfinite(at_target).any() else 1.0
    first = formulas.loss(values, sizes[0], _FIRST * shortest)
    part = np.linspace(0, 1, _GRID)
    self.losses = np.maximum(first, target) ** (1 - part) * target**part  # [G]
    self.tokens = np.array(
      [stable * formulas.tokens_for_loss(values, n, self.losses) for n in sizes]
    )  # stable tokens from scratch, [K, G]
    self.scratch = at_target * costs  # [K]
    self._search()

  def _search(self) -> None:
    shape = self.tokens.shape
    self.least = np.empty(shape)
    self.came_from = np.full(shape, -1)  # the size before the growth
    self.came_at = np.zeros(shape, int)  # the index of the loss at the growth
    kept = 1 - self.assumed.handover
    for j, price in enumerate(self.costs):
      alone = price * self.tokens[j]
      self.least[j] = alone
      # The last loss of a growth that leaves no less than 0 tokens to each loss.
      latest = np.searchsorted(kept * self.tokens[j], self.tokens[j], side='right') - 1
      latest = np.minimum(latest, np.arange(shape[1]))
      for i in range(j):
        with np.errstate(invalid='ignore'):
          begin = self.least[i] - kept * price * self.tokens[j] + self.assumed.growth_cost
        begin = np.where(np.isfinite(begin), begin, np.inf)
        lowest = np.minimum.accumulate(begin)
        total = alone + np.where(latest >= 0, lowest[latest], np.inf)
        better = total < self.least[j]
        at = np.maximum.accumulate(np.where(begin <= lowest, np.arange(shape[1]), 0))[latest]
        self.least[j] = np.where(better, total, self.least[j])
        self.came_from[j] = np.where(better, i, self.came_from[j])
        self.came_at[j] = np.where(better, at, self.came_at[j])
    decay = self.assumed.decay_share * self.tokens_at_target * self.costs
    self.total = self.least[:, -1] + decay

  def scratch_leg(self, size: int) -> Leg:
    """Return a size from scratch to the target."""
    tokens = float(self.tokens_at_target[size])
    return Leg(float(self.sizes[size]), tokens, self.target, float(self.scratch[size]))

  def legs(self) -> tuple[tuple[int, ...], tuple[Leg, ...]]:
    """Return the indices of the sizes of the best chain, and its legs."""
    kept = 1 - self.assumed.handover
    size, at, found, chain = int(np.argmin(self.total)), _GRID - 1, [], []
    while size >= 0:
      before, when = int(self.came_from[size, at]), int(self.came_at[size, at])
      tokens = self.tokens[size, at]
      if before >= 0:
        tokens = tokens - kept * self.tokens[size, when]
      if not found:  # the last stage
        tokens = tokens + self.assumed.decay_share * self.tokens_at_target[size]
      cost = tokens * self.costs[size] + (self.assumed.growth_cost if before >= 0 else 0.0)
      found.append(Leg(float(self.sizes[size]), float(tokens), float(self.losses[at]), float(cost)))
      chain.append(size)
      size, at = before, when
    return tuple(reversed(chain)), tuple(reversed(found))
