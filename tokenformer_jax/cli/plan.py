r"""Plan a run on a TPU topology without a TPU: whether it fits, and how fast it will be.

  tokenformer plan --config=configs/lm_pile.py:1_5b --topology=v5p:4x4x4

compiles the real training step with the TPU's own compiler and prints its memory, its time and the
data that the chips exchange. `--topology=gpu-h100:8` uses formulas only. docs/plan.md explains the
output.

  --quick                               stop before code is generated: much faster, with rough times
  --breakdown                           where the step goes, and what bounds each part
  --tune=12                             try up to 12 meshes and recomputations; print the best flags
  --sweep=12                            the same with other batches
  --grow=qkv=2176,proj=2176,ffn=8704    plan a growth chain; repeat the flag for each stage
  --grow=ffn=8704,layers=24             a stage with more layers
"""

import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import jax

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs, signatures
from tokenformer_jax.config import Config, to_json
from tokenformer_jax.config.arguments import Count, Natural, Path, Text
from tokenformer_jax.config.section import Bool
from tokenformer_jax.errors import UserError
from tokenformer_jax.plan import breakdown as breakdowns
from tokenformer_jax.plan import breakdown_figure, chain, estimate, stages, table
from tokenformer_jax.plan import topology as topologies
from tokenformer_jax.plan import tune as tuning
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError
from tokenformer_jax.storage import paths


def main(
  config: Config,
  topology: Text,
  *,
  slices: Count = 1,
  quick: Bool = False,
  breakdown: Bool = False,
  picture: Path | None = None,
  tune: Natural = 0,
  sweep: Natural = 0,
  grow: Annotated[Sequence[Text], signatures.REPEATED] = (),
  json: Path | None = None,
) -> None:
  """Plan a run and print the tables.

  Args:
    config: The config: FILE, FILE:VARIANT or NAME.
    topology: CHIP:SHAPE, such as v5e:4x4 or v5p:4x4x4.
    slices: The number of slices.
    quick: Stop before code is generated: much faster, without the schedule of operations.
    breakdown: Print where the step goes, and its bounds.
    picture: The file to draw the breakdown to: .png, .pdf or .svg.
    tune: The most programs to compile in a search with the config's batch.
    sweep: The most programs to compile in a search that also varies the batch.
    grow: A stage: qkv=N,proj=N,ffn=N[,layers=N][,pattern=P][,experts=N][,expert_tokens=N]
      [,top_k=K][,steps=N].
    json: A JSON file to write the figures to.
  """
  searches = {'tune': tune, 'sweep': sweep, 'grow': grow}
  asked = [f'--{name}' for name, value in searches.items() if value]
  if len(asked) > 1:
    raise UserError(f'{" and ".join(asked)} cannot be combined; run the command once with each')
  jax.config.update('jax_platforms', 'cpu')  # The planned devices are not on this machine.
  outputs.check_file('json', json)
  on = topologies.parse(topology, slices)
  if breakdown or picture:
    _check_breakdown(config, on, asked)
    outputs.check_file('picture', picture, paths.PICTURES)
  if picture:
    breakdown_figure.check()
  if quick:
    estimate.check_quick(on, '--quick')
  if asked and config.data.has_stages:
    raise UserError(
      f'{asked[0]} plans batches of one size, and the config has batch_size_by_step or '
      "sequence_length_by_step in config.data; set them to ''"
    )
  # End as after Ctrl-C: stop the compiler's process and remove its files.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  try:
    if grow:
      text, figures = _plan_chain(config, on, grow, quick)
    elif asked:
      text, figures = _search(config, on, sweep or tune, quick, varies_batch=bool(sweep))
    elif config.data.has_stages:
      staged = stages.plan_stages(config, on, quick=quick)
      text, figures = stages.render(staged), staged.to_json()
    else:
      planned = estimate.plan(config, on, quick=quick)
      text, figures = table.render(planned), planned.to_json()
      if breakdown:
        text += f'\n\n{breakdowns.render(planned)}'
        figures['breakdown'] = breakdowns.to_json(planned.costs)
      if picture:
        outputs.write_file('picture', picture, breakdown_figure.draw(planned).savefig)
  except DoesNotFitError as error:
    raise estimate.advice(config, error, on) from error
  print(text)
  if json:
    outputs.write_json('json', json, figures)


def _check_breakdown(config: Config, on: Topology, asked: Sequence[str]) -> None:
  """Check that a breakdown is of one program, which is compiled."""
  reason = ''
  if asked:
    reason = f'are of one program, and {asked[0]} is given; leave it out'
  elif config.data.has_stages:
    reason = (
      'are of one program, and the config has batch_size_by_step or sequence_length_by_step in '
      "config.data; set them to ''"
    )
  elif not on.has_compiler:
    reason = (
      f'need a compiler, and --topology={on.name} is planned by formulas; give a topology of TPUs'
    )
  if reason:
    raise UserError(f'--breakdown and --picture {reason}')


def _plan_chain(
  config: Config, on: Topology, grow: Sequence[str], quick: bool
) -> tuple[str, dict[str, Any]]:
  """Return the text and the figures of a growth chain."""
  found = chain.plan_chain(config, [*grow], on, quick=quick)
  planned = [one.to_json() for one in found.stages]
  return chain.render(found), {'stages': planned, 'scratch': found.scratch.to_json()}


def _search(
  config: Config, on: Topology, most: int, quick: bool, *, varies_batch: bool
) -> tuple[str, list[dict[str, Any]]]:
  """Return the text and the figures of a search that compiles at most so many programs."""
  batches = tuning.BATCHES if varies_batch else (1,)
  tried = tuning.search(config, on, most, quick=quick, batches=batches)
  best = tried[0].plan
  fastest = '' if best is None else f'\n\nthe fastest that fits:\n\n{table.render(best)}'
  return f'{tuning.render(tried)}\n\n{tuning.advice(tried)}{fastest}', [
    candidate.plan.to_json()
    if candidate.plan
    else {'reason': candidate.reason, 'config': to_json(candidate.config)}
    for candidate in tried
  ]


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, on_all_hosts=False)
