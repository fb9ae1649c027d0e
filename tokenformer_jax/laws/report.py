"""Format the fitted law, predictions and chains as text and as JSON values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenformer_jax.laws import formulas
from tokenformer_jax.laws.analysis import Analysis, Optimum, Prediction
from tokenformer_jax.laws.chains import DECAY, Chain, Leg
from tokenformer_jax.laws.fit import LEVEL, Fit, interval
from tokenformer_jax.parallel.messages import aligned

Row = Sequence[str]


def number(value: float) -> str:
  """Return a number with four digits."""
  if 1e3 <= abs(value) < 1e6:
    return f'{value:,.0f}'
  return f'{value:.4g}'


def between(ends: tuple[float, float]) -> str:
  """Return an interval as text."""
  if not np.all(np.isfinite(ends)):
    return 'unbounded'
  return f'{number(ends[0])} … {number(ends[1])}'


def describe(analysis: Analysis) -> str:
  """Return a line about the points, and one about the intervals."""
  points = analysis.points
  sizes, lengths, spent = np.unique(points.parameters), points.tokens, points.flops
  return (
    f'{len(points)} runs of {len(sizes)} sizes: N {number(sizes.min())} … {number(sizes.max())}, '
    f'D {number(lengths.min())} … {number(lengths.max())} tokens, '
    f'C = 6 N D {spent.min():.3g} … {spent.max():.3g} FLOPs\n'
    f'intervals hold {LEVEL:.0%} of {len(analysis.fit.draws):,} bootstrap samples of the runs'
  )


def law(fit: Fit) -> str:
  """Return the formula, a row for each parameter, and how well it fits."""
  rows: list[Row] = [('', 'value', 'interval')]
  rows += [
    (f'  {name}', number(value), between(fit.intervals[name])) for name, value in fit.values.items()
  ]
  total, agreeing = fit.starts
  worst = int(np.argmax(np.abs(fit.residuals)))
  return (
    f'{formulas.FORMULA}\n{aligned(rows)}\n'
    f'  residuals: {fit.spread:.2%} (from their median), at most '
    f'{abs(np.expm1(fit.residuals[worst])):.2%}; {agreeing} of the best starts of {total:,} agree'
  )


def exponents(analysis: Analysis) -> str:
  """Return a and b of N* ∝ C^a and D* ∝ C^b."""
  a, ends = analysis.exponent
  text = 'best size N* ∝ C^a and best length D* ∝ C^(1 − a): '
  return text + (f'a = {a:.3f}, {between(ends)}' if np.isfinite(a) else 'both exponents are 0')


def optimum(best: Optimum) -> str:
  """Return the best size and length for a budget."""
  rows: list[Row] = [
    (f'best for {best.flops:.3g} FLOPs', 'value', 'interval'),
    ('  N*', number(best.parameters), between(best.parameters_interval)),
    ('  D*', number(best.tokens), between(best.tokens_interval)),
    ('  loss', f'{best.loss:.4f}', between(best.loss_interval)),
  ]
  return aligned(rows)


def prediction(predicted: Prediction) -> str:
  """Return the predicted loss of a run or a chain."""
  legs = ', '.join(f'{number(size)} on {number(tokens)} tokens' for size, tokens in predicted.legs)
  subject = 'a run of' if len(predicted.legs) == 1 else 'the chain'
  return (
    f'{subject} {legs}: loss {predicted.loss:.4f}, {LEVEL:.0%} of such runs within '
    f'{predicted.interval[0]:.4f} … {predicted.interval[1]:.4f}'
  )


def chain(best: Chain, target: float, unit: str) -> str:
  """Return the cheapest chain, and training from scratch."""
  rows: list[Row] = [('', 'parameters', 'tokens', 'loss', unit, 'interval')]
  for i, leg in enumerate(best.legs):
    rows.append((*_leg(f'  stage {i + 1}', leg), ''))
  rows.append(('  the chain', '', '', f'{target:.4f}', number(best.total), between(best.cost)))
  rows.append((*_leg('  from scratch, best size', best.scratch), between(best.scratch_cost)))
  rows.append((*_leg('  from scratch, last size', best.scratch_last), ''))
  share = 1 - best.total / best.scratch.cost
  ends = ' … '.join(f'{end:.1%}' for end in best.saving)
  ends = ends if np.all(np.isfinite(best.saving)) else 'unbounded'
  last = 1 - best.total / best.scratch_last.cost
  return (
    f'the chain with the least {unit} to a loss of {target:g}\n{aligned(rows)}\n'
    f'the chain saves {share:.1%} of the best size from scratch ({ends}), and '
    f'{last:.1%} of its last size; as planned it reaches {between(best.reached)}'
  )


def _leg(name: str, leg: Leg) -> Row:
  return (name, number(leg.parameters), number(leg.tokens), f'{leg.loss:.4f}', number(leg.cost))


def mixing(gamma: np.ndarray, source: str) -> str:
  """Return what is assumed of growth; `source` says where γ comes from."""
  ends = f' ({between((gamma.min(), gamma.max()))})' if len(gamma) > 1 else ''
  return (
    'assumed: of the gap to the larger size on as many tokens is left the share of the tokens '
    f'before the growth to the power {np.median(gamma):.3g}{ends}, {source}; the last {DECAY:.0%} '
    'of the tokens are the decay (docs/laws.md)'
  )


def to_json(
  analysis: Analysis,
  doubts: Sequence[str],
  predictions: Sequence[Prediction] = (),
  best: Optimum | None = None,
  chain: Chain | None = None,
  gamma: np.ndarray | None = None,
) -> dict[str, Any]:
  """Return everything as JSON values: E, A, B, alpha and beta at the top, with their intervals."""
  fit, points = analysis.fit, analysis.points
  a, ends = analysis.exponent
  content: dict[str, Any] = {
    **fit.values,
    'intervals': fit.intervals,
    'level': LEVEL,
    'law': formulas.FORMULA,
    'residual': fit.spread,
    'objective': fit.objective,
    'size_exponent': {'value': a, 'interval': ends},
    'points': [
      {
        'name': name,
        'parameters': points.parameters[i],
        'tokens': points.tokens[i],
        'loss': points.loss[i],
        'residual': fit.residuals[i],
      }
      for i, name in enumerate(points.names)
    ],
    'doubts': list(doubts),
    'predictions': [dataclasses.asdict(one) for one in predictions],
  }
  if best:
    content['optimum'] = dataclasses.asdict(best)
  if chain:
    content['chain'] = dataclasses.asdict(chain)
  if gamma is not None:
    content['mixing'] = {'value': float(np.median(gamma)), 'interval': interval(gamma)}
  return _finite(content)


def _finite(value: Any) -> Any:
  """Return JSON values, with None where a number is not finite."""
  if isinstance(value, dict):
    return {key: _finite(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(inner) for inner in value]
  if isinstance(value, np.floating | float):
    return float(value) if np.isfinite(value) else None
  return value
