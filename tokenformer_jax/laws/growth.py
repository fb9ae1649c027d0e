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
from collections.abc import Sequence

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import formulas
from tokenformer_jax.laws.fit import interval
from tokenformer_jax.laws.formulas import Values

_GRID = 400  # losses at which a chain may grow
# The first of them is that of the smallest size after this part of its tokens from scratch.
_FIRST = 0.005


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
  cost: tuple[float, float]  # interval of the best chain's cost, over draws of the law
  scratch_cost: tuple[float, float]  # the same of training from scratch
  # Interval of the part of the cost from scratch that the best chain saves.
  saving: tuple[float, float]
  reached: tuple[float, float]  # interval of the loss that `legs` reach

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
  single = {name: np.array([value]) for name, value in values.items()}
  central = dataclasses.replace(assumed, handover=float(np.median(assumed.handover)))
  costs = np.array([[np.sqrt(low * high)] for low, high in (stage.cost for stage in stages)])
  found = _Search(single, sizes, costs, target, central)
  if not np.isfinite(found.scratch.min()):
    least = float(np.min(formulas.loss(values, sizes, np.inf)))
    raise UserError(
      f'--target_loss={target:g} is out of reach: by the fitted law the largest of these sizes '
      f'ends at {least:.4g} however long it trains; take a higher loss or larger sizes'
    )
  legs = found.legs()
  rng = np.random.default_rng(0)
  between = rng.random((1, len(draws['E'])))  # Fast and slow hold for all sizes together.
  low, high = (np.array([[stage.cost[i]] for stage in stages]) for i in (0, 1))
  drawn = _Search(draws, sizes, low * (high / low) ** between, target, assumed)
  best, alone = drawn.total.min(axis=0), drawn.scratch.min(axis=0)
  reached = np.isfinite(alone)
  last = int(np.searchsorted(sizes, legs[-1].parameters))
  reach = chain_loss(draws, [(leg.parameters, leg.tokens) for leg in legs], assumed)
  return Plan(
    legs=legs,
    scratch=found.scratch_leg(int(np.argmin(found.scratch[:, 0]))),
    scratch_last=found.scratch_leg(last),
    cost=interval(best),
    scratch_cost=interval(alone),
    saving=interval(1 - best[reached] / alone[reached]),
    reached=interval(reach),
  )


class _Search:
  """The least costs of all states (size, loss), for every draw of a law at once."""

  def __init__(
    self,
    values: Values,
    sizes: np.ndarray,
    costs: np.ndarray,
    target: float,
    assumed: Assumptions,
  ):
    """Search. The law's values are [draws], ascending sizes [K], costs of a token [K, draws]."""
    self.sizes, self.costs, self.assumed, self.target = sizes, costs, assumed, target
    stable = 1 - assumed.decay_share
    column = {name: np.asarray(value)[:, None] for name, value in values.items()}
    at_target = np.array([formulas.tokens_for_loss(values, n, np.asarray(target)) for n in sizes])
    self.tokens_at_target = at_target  # [K, draws]
    shortest = np.where(np.isfinite(at_target), at_target, np.inf).min(axis=0)
    shortest = np.where(np.isfinite(shortest), shortest, 1.0)
    first = formulas.loss(values, sizes[0], _FIRST * shortest)
    part = np.linspace(0, 1, _GRID)
    self.losses = np.maximum(first, target)[:, None] ** (1 - part) * target**part  # [draws, G]
    self.tokens = np.array(
      [stable * formulas.tokens_for_loss(column, n, self.losses) for n in sizes]
    )  # stable tokens from scratch, [K, draws, G]
    self.scratch = at_target * costs  # [K, draws]
    self._search()

  def _search(self) -> None:
    shape = self.tokens.shape
    self.least = np.empty(shape)
    self.came_from = np.full(shape, -1)  # the size before the growth
    self.came_at = np.zeros(shape, int)  # the index of the loss at the growth
    kept = 1 - np.broadcast_to(self.assumed.handover, shape[1])[:, None]
    for j in range(shape[0]):
      price = self.costs[j][:, None]
      alone = price * self.tokens[j]
      self.least[j] = alone
      for i in range(j):
        with np.errstate(invalid='ignore'):
          begin = self.least[i] - kept * price * self.tokens[j] + self.assumed.growth_cost
        begin = np.where(np.isfinite(begin), begin, np.inf)
        lowest = np.minimum.accumulate(begin, axis=1)
        total = alone + lowest
        better = total < self.least[j]
        at = np.maximum.accumulate(np.where(begin <= lowest, np.arange(shape[2]), 0), axis=1)
        self.least[j] = np.where(better, total, self.least[j])
        self.came_from[j] = np.where(better, i, self.came_from[j])
        self.came_at[j] = np.where(better, at, self.came_at[j])
    decay = self.assumed.decay_share * self.tokens_at_target * self.costs
    self.total = self.least[:, :, -1] + decay

  def scratch_leg(self, size: int) -> Leg:
    """Return a size from scratch to the target, of the first draw."""
    tokens = float(self.tokens_at_target[size, 0])
    return Leg(float(self.sizes[size]), tokens, self.target, float(self.scratch[size, 0]))

  def legs(self) -> tuple[Leg, ...]:
    """Return the best chain of the first draw."""
    kept = 1 - float(np.asarray(self.assumed.handover))
    size, at, found = int(np.argmin(self.total[:, 0])), _GRID - 1, []
    while size >= 0:
      before, when = int(self.came_from[size, 0, at]), int(self.came_at[size, 0, at])
      tokens = self.tokens[size, 0, at]
      if before >= 0:
        tokens = tokens - kept * self.tokens[size, 0, when]
      if not found:  # the last stage
        tokens = tokens + self.assumed.decay_share * self.tokens_at_target[size, 0]
      cost = tokens * self.costs[size, 0] + (self.assumed.growth_cost if before >= 0 else 0.0)
      found.append(
        Leg(float(self.sizes[size]), float(tokens), float(self.losses[0, at]), float(cost))
      )
      size, at = before, when
    return tuple(reversed(found))
