r"""Fit scaling laws to runs, predict by them, and plan growth.

  tokenformer laws runs/law --budget=1e15 --pictures=laws
  tokenformer laws --csv=losses.csv --json=laws.json
  tokenformer laws runs/law --parameters=3e5 --tokens=8e6
  tokenformer laws runs/law --target_loss=1.5 --sizes=2e4,1e5,4e5 --mixing=2.7

The arguments are work directories of finished runs, or folders of them, as `sweep` makes. A CSV
file has the columns parameters, tokens and loss, and may have active, flops, steps and name. The
command prints Chinchilla's and Kaplan's laws with intervals, and lists what the data leave
undetermined. docs/laws.md explains the output.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags

from tokenformer_jax.cli import flag_uses
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli.flag_uses import Use
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import (
  analysis,
  fit,
  formulas,
  growth,
  mixing,
  picture,
  points,
  report,
  runs,
  stages,
)
from tokenformer_jax.laws.analysis import Analysis, ChainPrediction
from tokenformer_jax.parallel import messages

_MOST_DRAWS = 100_000  # of the bootstrap; more would fill the memory and say the same
_OF_PLANS = 'is for plans of growth; give --target_loss, or leave it out'
_USES = {
  '': (
    Use(
      'count', 'not csv', 'says what to count in runs, and a CSV has counts already; leave it out'
    ),
    Use('active', 'parameters', 'is a part of --parameters, which is missing'),
    Use('sizes stages', 'target_loss', _OF_PLANS),
    Use('grown handover mixing', 'target_loss or chain', _OF_PLANS),
    Use(
      'decay_share',
      'target_loss or chain and not mixing',
      'is for plans of growth and for a chain without --mixing; leave it out',
    ),
    Use(
      'growth_time',
      'target_loss and stages',
      'is in chip-hours of a plan, which --target_loss=X and --stages=FILE give; leave it out',
    ),
  )
}


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_string('csv', None, 'A CSV file of losses, instead of runs.')
  flags.DEFINE_string('json', None, 'A JSON file for every figure.')
  flags.DEFINE_string('pictures', None, 'A folder for loss.png, isoflop.png and residuals.png.')
  flags.DEFINE_enum(
    'count',
    'all',
    points.COUNTS,
    "N of Chinchilla's law: all parameters, or those without embeddings and head. Kaplan's laws "
    'never count embeddings.',
  )
  flags.DEFINE_enum('compute', '6ND', ['6ND', 'exact'], 'C: 6 N D, or the model FLOPs.')
  flags.DEFINE_enum('fit', 'huber', ['huber', 'l2'], 'The loss of the fit, on logs.')
  flags.DEFINE_integer('draws', 1000, 'Bootstrap samples of the runs.', 20, _MOST_DRAWS)
  flags.DEFINE_float('budget', None, 'FLOPs to find the best size and length for.')
  flags.DEFINE_float('parameters', None, 'N of a run whose loss to predict; needs --tokens.')
  flags.DEFINE_float('active', None, 'The parameters that a token uses, of --parameters.')
  flags.DEFINE_float('tokens', None, 'D of a run whose loss to predict; needs --parameters.')
  flags.DEFINE_float('target_loss', None, 'Plan the growth that reaches this loss.')
  flags.DEFINE_list('sizes', None, 'N of the sizes that a chain may have; its cost is in FLOPs.')
  flags.DEFINE_string(
    'stages', None, 'The JSON file of plan --grow, or a CSV file: sizes with their step times.'
  )
  flags.DEFINE_list('chain', None, 'A chain N:TOKENS,N:TOKENS whose loss to predict.')
  flags.DEFINE_list('grown', None, 'Grown runs, whose losses give the mixing exponent.')
  flags.DEFINE_float('mixing', None, 'γ, how fast a grown model forgets that it was small.')
  flags.DEFINE_float('handover', None, 'c, the part of the tokens that a growth loses.')
  flags.DEFINE_float('growth_time', 0.0, 'Chip-hours of a growth itself.', lower_bound=0)
  flags.DEFINE_float(
    'decay_share', 0.2, 'The part of all tokens in which the rate decays.', 0, 0.99
  )
  flag_uses.declare(_USES)


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, positional=True, on_all_hosts=False)


def main(argv: Sequence[str]) -> None:
  """Fit, predict and print; write the JSON file and the pictures if they are asked for."""
  values, named = flags.FLAGS, argv[1:]
  _check_flags(named)
  cli.output_file('json')
  jax.config.update('jax_platforms', 'cpu')  # Float64, and thousands of tiny fits.
  if values.pictures:
    picture.check_folder(Path(values.pictures))
  table = stages.read_file(values.stages) if values.stages else None
  grown = [runs.read(run) for run in values.grown or ()]
  stages.check_grown(grown)
  if values.csv:
    found = kaplan_points = points.read_csv(values.csv)
  else:
    finished, notes = points.read_all(named)
    found = points.from_runs(finished, values.count, notes)
    kaplan_points = points.from_runs(finished, 'without_embeddings')
    points.check_same_data([finished[0], *grown])
  delta = fit.DELTA if values.fit == 'huber' else np.inf
  fitted = analysis.analyse(
    found, kaplan_points, compute=values.compute, delta=delta, draws=values.draws
  )
  print(f'{report.describe(fitted)}\n\n{report.law(fitted.main)}\n\n{report.exponents(fitted)}\n')
  print(_kaplan(fitted), flush=True)
  best = predictions = None
  if values.budget:
    best = analysis.optimum(fitted, values.budget)
    print(f'\n{report.optimum(best)}')
  if values.parameters:
    active = values.active or values.parameters
    predictions = [analysis.predict(fitted, values.parameters, values.tokens, active)]
    print(f'\n{report.prediction(predictions[0])}')
  chain, plan, assumed = _grow(fitted, table, grown)
  doubts = analysis.doubts(fitted, values.budget, predictions or (), plan, chain)
  if doubts:
    print('\nwhat the data leave undetermined\n' + '\n'.join(f'  {doubt}' for doubt in doubts))
  if values.pictures:
    written = picture.draw(fitted, Path(values.pictures), plan, assumed.unit)
    messages.say(f'wrote {", ".join(map(str, written))}')
  if values.json:
    content = report.to_json(fitted, doubts, predictions or (), best, plan, chain)
    if values.target_loss is not None or values.chain:
      content |= report.assumed_to_json(assumed)
    cli.write_json('json', content)
    messages.say(f'wrote {values.json}')


def _check_flags(named: Sequence[str]) -> None:
  """Check flags that need or exclude each other, before anything is read."""
  values = flags.FLAGS
  if bool(named) == bool(values.csv):
    problem = 'both name losses' if named else 'are both missing'
    raise UserError(f'runs and --csv {problem}; give work directories, or --csv=FILE')
  for name in ('budget', 'parameters', 'tokens', 'active', 'target_loss'):
    value = values[name].value
    if value is not None and not 0 < value < np.inf:
      raise UserError(f'--{name}={value:g}: it must be a number above 0')
  if (values.parameters is None) != (values.tokens is None):
    missing = 'tokens' if values.tokens is None else 'parameters'
    raise UserError(f'--{missing} is missing: a prediction needs --parameters and --tokens')
  if values.active is not None and values.active > values.parameters:
    raise UserError(f'--active={values.active:g} is more than --parameters={values.parameters:g}')
  ways = ('handover', 'mixing', 'grown')
  said = [f'--{name}' for name in ways if values[name].value is not None]
  if len(said) > 1:
    raise UserError(f'{" and ".join(said)} both say what a growth loses; give one of them')
  if values.mixing is not None and not 0 < values.mixing <= mixing.LARGEST:
    raise UserError(
      f'--mixing={values.mixing:g}: it must be above 0 and at most {mixing.LARGEST:g}'
    )
  if values.handover is not None and not values.handover < 1:
    raise UserError(f'--handover={values.handover:g}: it must be below 1, a part of all tokens')
  if values.target_loss is not None and bool(values.sizes) == bool(values.stages):
    raise UserError(
      '--target_loss needs the sizes that a chain may have; give --sizes=N,N,… or --stages=FILE'
    )
  _legs(values.chain or ())
  if values.stages and values.flag_values_dict()['count'] != 'all':
    raise UserError(
      '--stages counts all parameters, and --count=without_embeddings does not; use --count=all'
    )


def _kaplan(fitted: Analysis) -> str:
  """Return Kaplan's laws as text, and why others cannot be fitted."""
  counted = 'without embeddings' if fitted.kaplan_points.count != 'all' else 'as the CSV counts it'
  parts = [f"Kaplan's laws, N {counted}"]
  parts += [report.law(law) for law in fitted.kaplan.values()]
  parts += [f'{name} is not fitted: {reason}' for name, reason in fitted.not_fitted.items()]
  return '\n\n'.join(parts)


def _grow(
  fitted: Analysis, table: tuple[list[growth.Stage], str] | None, grown: list[runs.FinishedRun]
) -> tuple[ChainPrediction | None, growth.Plan | None, growth.Assumptions]:
  """Print the results on growth that the flags ask for; return them and what they assume.

  `table` has the stages of --stages and their unit, and `grown` the runs of --grown.
  """
  values = flags.FLAGS
  if values.target_loss is None and not values.chain:
    return None, None, growth.Assumptions()
  if not fitted.points.is_dense:
    raise UserError(
      'plans of growth are for dense models, and these runs have fewer active parameters than '
      'parameters; leave out --target_loss and --chain'
    )
  share = values.decay_share
  assumed = growth.Assumptions(values.handover or 0.0, share, mixing=values.mixing)
  if grown:
    gamma = mixing.exponent(fitted.main.drawn, stages.legs(grown, fitted.points.count))
    print(f'\n{_mixing_of(fitted, grown, gamma)}')
    assumed = dataclasses.replace(assumed, mixing=gamma)
  chain = None
  if values.chain:
    chain = _predict_chain(fitted, _legs(values.chain), assumed)
    print(f'\n{report.chain(chain)}')
  if values.target_loss is None:
    return chain, None, assumed
  found, unit = table or stages.from_sizes(points.positives('sizes', values.sizes), fitted)
  assumed = dataclasses.replace(assumed, growth_cost=values.growth_time, unit=unit)
  find = growth.plan if assumed.mixing is None else mixing.plan
  plan = find(fitted.main.values, fitted.main.drawn, found, values.target_loss, assumed)
  print(f'\n{report.growth_plan(plan, values.target_loss, assumed)}')
  return chain, plan, assumed


def _predict_chain(
  fitted: Analysis, legs: list[tuple[float, float]], assumed: growth.Assumptions
) -> ChainPrediction:
  """Return the loss of a chain with its interval."""
  one = {name: np.array([value]) for name, value in fitted.main.values.items()}
  loss = float(_chain_loss(one, legs, assumed, central=True)[0])
  drawn = fitted.main.scattered(np.log(_chain_loss(fitted.main.drawn, legs, assumed)))
  return ChainPrediction(tuple(legs), loss, fit.interval(drawn))


def _chain_loss(
  law: formulas.Values,
  legs: Sequence[tuple[float, float]],
  assumed: growth.Assumptions,
  *,
  central: bool = False,
) -> np.ndarray:
  """Return the loss of a chain for every draw of a law, or by the medians of what is assumed."""
  middle = np.median if central else np.asarray
  if assumed.mixing is not None:
    return mixing.chain_loss(law, legs, np.atleast_1d(middle(assumed.mixing)))
  return growth.chain_loss(
    law, legs, dataclasses.replace(assumed, handover=middle(assumed.handover))
  )


def _mixing_of(fitted: Analysis, grown: list[runs.FinishedRun], gamma: np.ndarray) -> str:
  """Return what the losses of grown runs say about mixing, and whether the handover does better."""
  one = {name: np.array([value]) for name, value in fitted.main.values.items()}
  known = stages.legs(grown, fitted.points.count)
  each = [float(mixing.exponent(one, [run])[0]) for run in known]
  listed = ', '.join(f'{value:.3g} ({run.name})' for value, run in zip(each, grown, strict=True))
  low, high = fit.interval(gamma)
  text = (
    f'mixing exponent by grown runs: {listed}; together {np.median(gamma):.3g}, {low:.3g} … '
    f'{high:.3g} over draws of the law'
  )
  if len(grown) < 2:
    return text
  errors = stages.left_out(grown, fitted.main, fitted.points.count, flags.FLAGS.decay_share)
  return (
    f'{text}\nthe loss of each of these runs by the others: off by {errors[0]:.2%} by mixing, by '
    f'{errors[1]:.2%} by the handover'
  )


def _legs(chain: Sequence[str]) -> list[tuple[float, float]]:
  """Return the sizes and the tokens of a chain `N:TOKENS,N:TOKENS`.

  Raises:
    UserError: a part has another form, or a size is not larger than the one before it.
  """
  legs: list[tuple[float, float]] = []
  for text in chain:
    numbers = [points.positive(part) for part in text.split(':')]
    if len(numbers) != 2 or None in numbers:
      raise UserError(f'--chain has {text!r}; it must be N:TOKENS, two numbers above 0')
    if legs and numbers[0] <= legs[-1][0]:
      raise UserError(
        f'--chain has {text!r} after a size of {legs[-1][0]:g}; a growth makes a model larger, so '
        'give rising sizes'
      )
    legs.append(tuple(numbers))
  return legs
