"""A law of growth: what is left of the gap between a grown model and a large one from scratch.

A model of size N grows to M after D_g of its D tokens. With the decay of the rate at the end of
each, its loss lies between those of the two sizes from scratch on the same D tokens:

  L = L(M, D) + (L(N, D) − L(M, D)) (D_g / D)^γ

The mixing exponent γ says how fast the grown model forgets that it was small. The gap closes as a
power of the tokens, with no time scale of its own. In a chain of several sizes, the gap between
each two closes in this way from when the chain has left the smaller one; so two growths at once are
one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import payoff
from tokenformer_jax.laws import LARGEST_MIXING, formulas
from tokenformer_jax.laws.formulas import Values
from tokenformer_jax.laws.points import check_usable
from tokenformer_jax.laws.runs import FinishedRun

TYPICAL = payoff.MIXING  # γ, where none is measured
_GRID = np.linspace(0, LARGEST_MIXING, 3001)

Leg = tuple[float, float]  # a size, and the tokens trained at it
Grown = tuple[Leg, Leg, float]  # the leg before a growth, the one after it, and the loss


def chain_loss(values: Values, legs: Sequence[tuple[float, Any]], gamma: Any) -> Any:
  """Return the loss that a chain reaches, for every draw of the law.

  The last leg includes the tokens of the decay.
  """
  tokens = np.cumsum([tokens for _, tokens in legs], axis=0)
  return grown_loss(values, [size for size, _ in legs], tokens[:-1] / tokens[-1], tokens[-1], gamma)


def grown_loss(
  values: Values,
  sizes: Sequence[float],
  shares: Iterable[Any],
  tokens: Any,
  gamma: Any,
) -> Any:
  """Return the loss of chains that grow at shares of all their tokens."""
  alone = [formulas.loss(values, size, tokens) for size in sizes]
  total = alone[-1]
  for before, after, share in zip(alone, alone[1:], shares, strict=False):
    total = total + (before - after) * share**gamma
  return total


def exponent(values: Values, grown: Sequence[Grown]) -> np.ndarray:
  """Return the γ that explains the losses of grown runs best, for every draw of the law."""
  draws = np.atleast_1d(values['E'])[:, None]
  column = {name: np.atleast_1d(value)[:, None] for name, value in values.items()}
  errors = np.zeros((len(draws), len(_GRID)))
  for before, after, loss in grown:
    predicted = chain_loss(column, [before, after], _GRID[None])
    errors += np.square(np.log(predicted) - np.log(loss))
  return _GRID[np.argmin(errors, axis=1)]


def left_out(values: Values, grown: Sequence[Grown]) -> float:
  """Return the error of the losses of grown runs by the others, of the log of the loss."""
  errors = []
  for number, (before, after, loss) in enumerate(grown):
    gamma = exponent(values, [*grown[:number], *grown[number + 1 :]])
    errors.append(float(np.log(chain_loss(values, [before, after], gamma)[0] / loss)))
  return float(np.sqrt(np.mean(np.square(errors))))


def read_grown(grown: Sequence[FinishedRun]) -> list[Grown]:
  """Return what each run says about growth; refuse runs that say nothing."""
  legs = []
  for run in grown:
    if run.growth is None:
      raise UserError(
        f'--grown names {run.name}, which has not grown; name runs that continue from a growth'
      )
    if not run.decayed:
      raise UserError(
        f'--grown names {run.name}, whose learning rate has not decayed, so its loss is above what '
        'a decay would reach; name a run that ends with its decay'
      )
    check_usable(run)
    before = float(run.growth.tokens)
    after = float(run.size.parameters), float(run.tokens - before)
    legs.append(((float(run.growth.size.parameters), before), after, run.loss))
  return legs
