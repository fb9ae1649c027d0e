r"""Fit scaling laws to runs, predict by them, and plan growth.

  tokenformer laws runs/law --budget=1e15 --pictures=laws
  tokenformer laws runs/law --parameters=3e5 --tokens=8e6
  tokenformer laws runs/law --target_loss=1.5 --sizes=2e4,1e5,4e5 --mixing=2.7
  tokenformer laws runs/others.csv --budget=1e17

The arguments are work directories of finished runs, or folders of them, as `sweep` makes; or one
CSV table with the columns parameters, tokens and loss (nats a token), a run a row. The command
prints Chinchilla's law with intervals, and lists what the data leave undetermined. docs/laws.md
explains the output.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path as LocalPath
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs
from tokenformer_jax.cli.sweep import Positives
from tokenformer_jax.config.arguments import FILLED, Path, Positive, Text, needs_value
from tokenformer_jax.config.section import Float, Int
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import LARGEST_MIXING
from tokenformer_jax.parallel import messages

if TYPE_CHECKING:
  import numpy as np

  from tokenformer_jax.laws.analysis import Analysis
  from tokenformer_jax.laws.mixing import Grown, Leg

Texts = Annotated[Sequence[Text], FILLED]


def main(
  *runs: str,
  json: Path | None = None,
  pictures: Path | None = None,
  draws: Annotated[Int, Field(ge=20, le=100_000)] = 1000,
  budget: Positive | None = None,
  parameters: Positive | None = None,
  tokens: Positive | None = None,
  target_loss: Positive | None = None,
  sizes: Positives | None = None,
  stages: Path | None = None,
  chain: Texts | None = None,
  grown: Texts | None = None,
  mixing: Annotated[Float, Field(gt=0, le=LARGEST_MIXING)] | None = None,
  growth_time: Annotated[Float, Field(ge=0)] | None = None,
) -> None:
  """Fit, predict and print; write the JSON file and the pictures if they are asked for.

  Args:
    *runs: Work directories of finished runs, or folders of them; or one CSV table of runs.
    json: A JSON file for every figure.
    pictures: A folder for loss.png and residuals.png.
    draws: Bootstrap samples of the runs.
    budget: FLOPs to find the best size and length for.
    parameters: N of a run whose loss to predict; needs --tokens.
    tokens: D of a run whose loss to predict; needs --parameters.
    target_loss: Plan the growth that reaches this loss.
    sizes: N of the sizes that a chain may have; its cost is in FLOPs.
    stages: The JSON file of plan --grow: sizes with their step times.
    chain: A chain N:TOKENS,N:TOKENS whose loss to predict.
    grown: Grown runs, whose losses give the mixing exponent.
    mixing: The mixing exponent γ of docs/laws.md: how fast a grown model forgets its growth.
    growth_time: Chip-hours of a growth itself.
  """
  import jax

  from tokenformer_jax.laws import analysis, chains, law_figures, points, report
  from tokenformer_jax.laws import mixing as mixing_lib
  from tokenformer_jax.laws import runs as runs_lib

  needs_value('target_loss=X', target_loss, sizes=sizes, stages=stages)
  needs_value('target_loss=X or --chain', target_loss or chain, grown=grown, mixing=mixing)
  needs_value('target_loss=X and --stages', target_loss and stages, growth_time=growth_time)
  if not runs:
    raise UserError('runs are missing; give work directories, or a folder of them')
  table = next((run for run in runs if run.endswith('.csv')), None)
  if table and (len(runs) > 1 or grown):
    raise UserError(
      f'{table} is a table, which does not state its data, so other runs cannot be compared with '
      'it; give it alone, and --mixing in place of --grown'
    )
  if (parameters is None) != (tokens is None):
    missing = 'tokens' if tokens is None else 'parameters'
    raise UserError(f'--{missing} is missing: a prediction needs --parameters and --tokens')
  if mixing and grown:
    raise UserError('--mixing and --grown both say how a growth mixes; give one of them')
  if target_loss and bool(sizes) == bool(stages):
    raise UserError(
      '--target_loss needs the sizes that a chain may have; give --sizes=N,N,… or --stages=FILE'
    )
  legs = _legs(chain or ())
  outputs.check_file('json', json)
  jax.config.update('jax_platforms', 'cpu')  # Float64, and thousands of tiny fits.
  if pictures:
    law_figures.check_folder(LocalPath(pictures))
  priced = chains.read_stages(str(stages)) if stages else chains.from_sizes(sizes or ())
  grown_runs = [runs_lib.read(run) for run in grown or ()]
  growths = dict(zip(grown or (), mixing_lib.read_grown(grown_runs), strict=True))
  if table:
    data = points.read_table(table)
  else:
    finished, notes = points.read_all(runs)
    data = points.from_runs(finished, notes)
    points.check_same_data([finished[0], *grown_runs])
  fitted = analysis.analyse(data, draws)
  print(f'{report.describe(fitted)}\n\n{report.law(fitted.fit)}\n\n{report.exponents(fitted)}')
  best, cheapest, gamma, predictions = None, None, None, []
  if budget:
    best = analysis.optimum(fitted, budget)
    print(f'\n{report.optimum(best)}')
  if parameters and tokens:
    predictions.append(analysis.predict(fitted, [(parameters, tokens)]))
  if legs or target_loss:
    gamma = _gamma(fitted, growths, mixing)
    if legs:
      predictions.append(analysis.predict(fitted, legs, gamma))
  for predicted in predictions:
    print(f'\n{report.prediction(predicted)}')
  if target_loss and gamma is not None:
    law, sizes_of_chain, unit = fitted.fit, *priced
    cheapest = chains.find(
      law.values, law.drawn, sizes_of_chain, target_loss, gamma, growth_time or 0.0
    )
    print(f'\n{report.chain(cheapest, target_loss, unit)}')
  doubts = analysis.doubts(fitted, budget, predictions, cheapest)
  if doubts:
    print('\nwhat the data leave undetermined\n' + '\n'.join(f'  {doubt}' for doubt in doubts))
  if pictures:
    written = law_figures.write(fitted, LocalPath(pictures))
    messages.say(f'wrote {", ".join(map(str, written))}')
  if json:
    content = report.to_json(fitted, doubts, predictions, best, cheapest, gamma)
    outputs.write_json('json', json, content)
    messages.say(f'wrote {json}')


def _gamma(fitted: 'Analysis', grown: Mapping[str, 'Grown'], given: float | None) -> 'np.ndarray':
  """Return the mixing exponent, one or one for each draw of the law, and print what it is."""
  import numpy as np

  from tokenformer_jax.laws import mixing as mixing_lib
  from tokenformer_jax.laws import report

  if not grown:
    gamma = np.array([given or mixing_lib.TYPICAL])
    print(f'\n{report.mixing(gamma, "as --mixing says" if given else "that of docs/growth.md")}')
    return gamma
  legs = [*grown.values()]
  gamma = mixing_lib.exponent(fitted.fit.drawn, legs)
  each = (float(mixing_lib.exponent(fitted.fit.values, [one])[0]) for one in legs)
  named = (f'{name} ({value:.3g})' for name, value in zip(grown, each, strict=True))
  source = ', '.join(named)
  print(f'\n{report.mixing(gamma, f"by {source}")}')
  if len(legs) > 1:
    error = mixing_lib.left_out(fitted.fit.values, legs)
    print(f'the loss of each of these runs by the others is off by {error:.2%}')
  return gamma


def _legs(chain: Sequence[str]) -> list['Leg']:
  """Return the sizes and the tokens of a chain `N:TOKENS,N:TOKENS`."""
  from tokenformer_jax.laws import points

  legs: list[Leg] = []
  for text in chain:
    size, tokens = (points.positive(part) for part in (*text.split(':'), '', '')[:2])
    if text.count(':') != 1 or size is None or tokens is None:
      raise UserError(f'--chain has {text!r}; it must be N:TOKENS, two numbers above 0')
    if legs and size <= legs[-1][0]:
      raise UserError(
        f'--chain has {text!r} after a size of {legs[-1][0]:g}; a growth makes a model larger, so '
        'give rising sizes'
      )
    legs.append((size, tokens))
  return legs


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, on_all_hosts=False)
