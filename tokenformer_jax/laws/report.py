"""Format the fitted laws, predictions and plans as text and as JSON values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenformer_jax.laws import growth
from tokenformer_jax.laws.analysis import Analysis, ChainPrediction, Optimum, Prediction
from tokenformer_jax.laws.fit import LEVEL, Fit, interval
from tokenformer_jax.laws.formulas import Compute
from tokenformer_jax.laws.frontier import Frontier
from tokenformer_jax.parallel.messages import aligned

_COUNTS = {'all': 'embeddings included', 'without_embeddings': 'without embeddings and head'}
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
  """Return a line about the points, and one about the ways to count."""
  points = analysis.points
  sizes, lengths = np.unique(points.active), points.tokens
  spent = points.spent(analysis.compute)
  lines = [
    f'{len(points)} runs of {len(sizes)} sizes: N {number(sizes.min())} … {number(sizes.max())} '
    f'({_COUNTS[points.count]}), D {number(lengths.min())} … {number(lengths.max())} tokens, '
    f'C {spent.min():.3g} … {spent.max():.3g} FLOPs',
    f'C is {_compute(analysis.compute)}; intervals hold {LEVEL:.0%} of '
    f'{len(analysis.main.draws):,} bootstrap samples of the runs',
  ]
  return '\n'.join(lines)


def _compute(compute: Compute) -> str:
  if compute.name == '6ND':
    return '6 N D'
  return f'exact; for predictions {compute.factor:.3g} · N^{compute.power:.3f} · D'


def law(fit: Fit) -> str:
  """Return the formula, a row for each parameter, and how well it fits."""
  rows: list[Row] = [('', 'value', 'interval')]
  rows += [
    (f'  {name}', number(value), between(fit.intervals[name])) for name, value in fit.values.items()
  ]
  total, agreeing = fit.starts
  worst = int(np.argmax(np.abs(fit.residuals)))
  return (
    f'{fit.law.formula}\n{aligned(rows)}\n'
    f'  residuals: {fit.spread:.2%} (from their median), at most '
    f'{abs(np.expm1(fit.residuals[worst])):.2%}; {agreeing} of the best starts of {total:,} agree'
  )


def exponents(analysis: Analysis) -> str:
  """Return a and b of N* ∝ C^a and D* ∝ C^b by three approaches."""
  rows: list[Row] = [('', 'a', 'interval', 'b')]
  for name, found in (
    ('1 envelope', analysis.envelope),
    ('2 IsoFLOP parabolas', analysis.isoflop),
  ):
    rows.append((f'  {name}', *_exponent(found)))
  a, ends = analysis.exponent
  law_row = (f'{a:.3f}', between(ends), f'{1 - analysis.compute.power * a:.3f}')
  rows.append(('  3 the law', *(law_row if np.isfinite(a) else ('–', 'its exponents are 0', '–'))))
  return f'best size N* ∝ C^a and best length D* ∝ C^b\n{aligned(rows)}'


def _exponent(found: Frontier) -> Row:
  if not np.isfinite(found.a):
    return ('–', 'too few budgets', '–')
  return f'{found.a:.3f}', between(found.a_interval), f'{found.b:.3f}'


def optimum(found: Optimum) -> str:
  """Return the best size and length for a budget."""
  rows: list[Row] = [
    (f'best for {found.flops:.3g} FLOPs', 'value', 'interval'),
    ('  N*', number(found.parameters), between(found.parameters_interval)),
    ('  D*', number(found.tokens), between(found.tokens_interval)),
    ('  loss', f'{found.loss:.4f}', between(found.loss_interval)),
  ]
  return aligned(rows)


def prediction(found: Prediction) -> str:
  """Return the predicted loss of a run."""
  active = f', {number(found.active)} active' if found.active != found.parameters else ''
  return (
    f'a run of {number(found.parameters)} parameters{active} on {number(found.tokens)} tokens '
    f'({found.flops:.3g} FLOPs): loss {found.loss:.4f}, {LEVEL:.0%} of such runs within '
    f'{found.interval[0]:.4f} … {found.interval[1]:.4f}'
  )


def chain(found: ChainPrediction) -> str:
  """Return the predicted loss of a chain."""
  legs = ', '.join(f'{number(size)} on {number(tokens)} tokens' for size, tokens in found.legs)
  return (
    f'the chain {legs}: loss {found.loss:.4f}, {LEVEL:.0%} of such runs within '
    f'{found.interval[0]:.4f} … {found.interval[1]:.4f}'
  )


def growth_plan(found: growth.Plan, target: float, assumed: growth.Assumptions) -> str:
  """Return the chain, training from scratch, and the assumptions."""
  unit = assumed.unit
  rows: list[Row] = [('', 'parameters', 'tokens', 'loss', unit, 'interval')]
  for i, leg in enumerate(found.legs):
    rows.append((*_leg(f'  stage {i + 1}', leg), ''))
  rows.append(('  the chain', '', '', f'{target:.4f}', number(found.total), between(found.cost)))
  rows.append((*_leg('  from scratch, best size', found.scratch), between(found.scratch_cost)))
  rows.append((*_leg('  from scratch, last size', found.scratch_last), ''))
  share = 1 - found.total / found.scratch.cost
  ends = ' … '.join(f'{end:.1%}' for end in found.saving)
  ends = ends if np.all(np.isfinite(found.saving)) else 'unbounded'
  last = 1 - found.total / found.scratch_last.cost
  return (
    f'the chain with the least {unit} to a loss of {target:g}\n{aligned(rows)}\n'
    f'the chain saves {share:.1%} of the best size from scratch ({ends}), and '
    f'{last:.1%} of its last size; as planned it reaches {between(found.reached)}\n'
    f'{assumptions(assumed)}'
  )


def _leg(name: str, leg: growth.Leg) -> Row:
  return (name, number(leg.parameters), number(leg.tokens), f'{leg.loss:.4f}', number(leg.cost))


def assumptions(assumed: growth.Assumptions) -> str:
  """Return the assumptions of a plan of growth."""
  by_mixing = assumed.mixing is not None
  drawn = np.atleast_1d(assumed.mixing if by_mixing else assumed.handover)
  middle = float(np.median(drawn))
  ends = f' ({between((drawn.min(), drawn.max()))})' if len(drawn) > 1 else ''
  cost = f'; a growth costs {number(assumed.growth_cost)} {assumed.unit}' * bool(
    assumed.growth_cost
  )
  share = f'the decay takes {assumed.decay_share:.0%} of all tokens of the last size'
  if by_mixing:
    return (
      f'assumed: of the gap to the larger size on as many tokens is left the share of the tokens '
      f'before the growth to the power {middle:.3g}{ends}; {share}{cost} (docs/laws.md)'
    )
  return (
    f'assumed: growth keeps the loss that a decay would reach; the grown model is worth the tokens '
    f'of that loss from scratch less {middle:.1%}{ends}; then it learns as from scratch; '
    f'{share}{cost} (docs/laws.md)'
  )


def assumed_to_json(assumed: growth.Assumptions) -> dict[str, Any]:
  """Return the number of the model of growth, as `mixing` or `handover`, with its interval."""
  name = 'handover' if assumed.mixing is None else 'mixing'
  drawn = np.atleast_1d(getattr(assumed, name))
  value = {'value': float(np.median(drawn)), 'interval': interval(drawn)}
  return {name: value, 'decay_share': assumed.decay_share}


def to_json(
  analysis: Analysis,
  doubts: Sequence[str],
  predictions: Sequence[Prediction] = (),
  best: Optimum | None = None,
  plan: growth.Plan | None = None,
  chain: ChainPrediction | None = None,
) -> dict[str, Any]:
  """Return everything as JSON values: E, A, B, alpha and beta at the top, with their intervals."""
  main, points = analysis.main, analysis.points
  a, ends = analysis.exponent
  content: dict[str, Any] = {
    **main.values,
    'intervals': main.intervals,
    'level': LEVEL,
    'law': main.law.formula,
    'count': points.count,
    'compute': dataclasses.asdict(analysis.compute),
    'residual': main.spread,
    'objective': main.objective,
    'exponents': {
      'law': {'a': a, 'interval': ends, 'b': 1 - analysis.compute.power * a},
      'envelope': _frontier(analysis.envelope),
      'isoflop': _frontier(analysis.isoflop),
    },
    'kaplan': {
      name: {**fitted.values, 'intervals': fitted.intervals, 'law': fitted.law.formula}
      for name, fitted in analysis.kaplan.items()
    }
    | {'count': analysis.kaplan_points.count, 'not_fitted': analysis.not_fitted},
    'points': [
      {
        'name': name,
        'parameters': points.total[i],
        'active': points.active[i],
        'tokens': points.tokens[i],
        'loss': points.loss[i],
        'flops': points.flops[i],
        'residual': main.residuals[i],
      }
      for i, name in enumerate(points.names)
    ],
    'doubts': list(doubts),
    'predictions': [dataclasses.asdict(prediction) for prediction in predictions],
  }
  if best:
    content['optimum'] = dataclasses.asdict(best)
  if chain:
    content['chain'] = dataclasses.asdict(chain)
  if plan:
    content['growth'] = dataclasses.asdict(plan)
  return _finite(content)


def _frontier(found: Frontier) -> dict[str, Any]:
  return {'a': found.a, 'interval': found.a_interval, 'b': found.b}


def _finite(value: Any) -> Any:
  """Return JSON values, with None where a number is not finite."""
  if isinstance(value, dict):
    return {key: _finite(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(inner) for inner in value]
  if isinstance(value, np.floating | float):
    return float(value) if np.isfinite(value) else None
  return value
