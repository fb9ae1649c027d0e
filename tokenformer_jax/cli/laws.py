r"""Fit scaling laws to runs, predict by them, and plan growth.

  tokenformer laws runs/law --budget=1e15 --pictures=laws
  tokenformer laws runs/law --parameters=3e5 --tokens=8e6
  tokenformer laws runs/law --target_loss=1.5 --sizes=2e4,1e5,4e5 --mixing=2.7

The arguments are work directories of finished runs, or folders of them, as `sweep` makes. The
command prints Chinchilla's law with intervals, and lists what the data leave undetermined.
docs/laws.md explains the output.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import flags

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import parse_flags
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import analysis, chains, law_figures, mixing, points, report, runs
from tokenformer_jax.laws.analysis import Analysis
from tokenformer_jax.laws.mixing import Grown
from tokenformer_jax.parallel import messages

_MOST_DRAWS = 100_000  # of the bootstrap; more would fill the memory and say the same


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_string('json', None, 'A JSON file for every figure.')
  flags.DEFINE_string('pictures', None, 'A folder for loss.png and residuals.png.')
  flags.DEFINE_integer('draws', 1000, 'Bootstrap samples of the runs.', 20, _MOST_DRAWS)
  flags.DEFINE_float('budget', None, 'FLOPs to find the best size and length for.')
  flags.DEFINE_float('parameters', None, 'N of a run whose loss to predict; needs --tokens.')
  flags.DEFINE_float('tokens', None, 'D of a run whose loss to predict; needs --parameters.')
  flags.DEFINE_float('target_loss', None, 'Plan the growth that reaches this loss.')
  flags.DEFINE_list('sizes', None, 'N of the sizes that a chain may have; its cost is in FLOPs.')
  flags.DEFINE_string('stages', None, 'The JSON file of plan --grow: sizes with their step times.')
  flags.DEFINE_list('chain', None, 'A chain N:TOKENS,N:TOKENS whose loss to predict.')
  flags.DEFINE_list('grown', None, 'Grown runs, whose losses give the mixing exponent.')
  flags.DEFINE_float('mixing', None, 'γ, how fast a grown model forgets that it was small.')
  flags.DEFINE_float('growth_time', 0.0, 'Chip-hours of a growth itself.', lower_bound=0)


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
    law_figures.check_folder(Path(values.pictures))
  stages = chains.read_stages(values.stages) if values.stages else None
  grown = [runs.read(run) for run in values.grown or ()]
  legs = mixing.read_grown(grown)
  finished, notes = points.read_all(named)
  data = points.from_runs(finished, notes)
  points.check_same_data([finished[0], *grown])
  fitted = analysis.analyse(data, values.draws)
  print(f'{report.describe(fitted)}\n\n{report.law(fitted.fit)}\n\n{report.exponents(fitted)}')
  best, predictions = None, []
  if values.budget:
    best = analysis.optimum(fitted, values.budget)
    print(f'\n{report.optimum(best)}')
  if values.parameters:
    predictions.append(analysis.predict(fitted, values.parameters, values.tokens))
  gamma = _gamma(fitted, legs) if values.chain or values.target_loss is not None else None
  if values.chain:
    predictions.append(analysis.predict_chain(fitted, _legs(values.chain), gamma))
  for predicted in predictions:
    print(f'\n{report.prediction(predicted)}')
  chain = None
  if values.target_loss is not None:
    sizes, unit = stages or chains.from_sizes(points.positives('sizes', values.sizes))
    chain = chains.find(
      fitted.fit.values, fitted.fit.drawn, sizes, values.target_loss, gamma, values.growth_time
    )
    print(f'\n{report.chain(chain, values.target_loss, unit)}')
  doubts = analysis.doubts(fitted, values.budget, predictions, chain)
  if doubts:
    print('\nwhat the data leave undetermined\n' + '\n'.join(f'  {doubt}' for doubt in doubts))
  if values.pictures:
    written = law_figures.write(fitted, Path(values.pictures))
    messages.say(f'wrote {", ".join(map(str, written))}')
  if values.json:
    content = report.to_json(fitted, doubts, predictions, best, chain, gamma)
    cli.write_json('json', content)
    messages.say(f'wrote {values.json}')


def _check_flags(named: Sequence[str]) -> None:
  """Check flags that need or exclude each other, before anything is read."""
  values = flags.FLAGS
  plans, chain = values.target_loss is not None, values.chain
  of_plans = 'is for plans of growth; give --target_loss, or leave it out'
  parse_flags.refuse('sizes stages', of_plans, unless=plans)
  parse_flags.refuse('grown mixing', of_plans, unless=plans or chain)
  parse_flags.refuse(
    'growth_time',
    'is in chip-hours of a plan, which --target_loss=X and --stages=FILE give; leave it out',
    unless=plans and values.stages,
  )
  if not named:
    raise UserError('runs are missing; give work directories, or a folder of them')
  for name in ('budget', 'parameters', 'tokens', 'target_loss'):
    value = values[name].value
    if value is not None and not 0 < value < np.inf:
      raise UserError(f'--{name}={value:g}: it must be a number above 0')
  if (values.parameters is None) != (values.tokens is None):
    missing = 'tokens' if values.tokens is None else 'parameters'
    raise UserError(f'--{missing} is missing: a prediction needs --parameters and --tokens')
  if values.mixing is not None and values.grown:
    raise UserError('--mixing and --grown both say how a growth mixes; give one of them')
  if values.mixing is not None and not 0 < values.mixing <= mixing.LARGEST:
    raise UserError(
      f'--mixing={values.mixing:g}: it must be above 0 and at most {mixing.LARGEST:g}'
    )
  if values.target_loss is not None and bool(values.sizes) == bool(values.stages):
    raise UserError(
      '--target_loss needs the sizes that a chain may have; give --sizes=N,N,… or --stages=FILE'
    )
  _legs(values.chain or ())


def _gamma(fitted: Analysis, grown: Sequence[Grown]) -> np.ndarray:
  """Return the mixing exponent, one or one for each draw of the law, and print what it is."""
  values = flags.FLAGS
  if not grown:
    gamma = np.array([mixing.TYPICAL if values.mixing is None else values.mixing])
    source = 'that of docs/growth.md' if values.mixing is None else 'as --mixing says'
    print(f'\n{report.mixing(gamma, source)}')
    return gamma
  gamma = mixing.exponent(fitted.fit.drawn, grown)
  each = (float(mixing.exponent(fitted.fit.values, [one])[0]) for one in grown)
  names = zip(each, values.grown, strict=True)
  source = 'by ' + ', '.join(f'{name} ({value:.3g})' for value, name in names)
  print(f'\n{report.mixing(gamma, source)}')
  if len(grown) > 1:
    error = mixing.left_out(fitted.fit.values, grown)
    print(f'the loss of each of these runs by the others is off by {error:.2%}')
  return gamma


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
