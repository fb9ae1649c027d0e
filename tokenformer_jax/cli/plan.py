r"""Plan a run on TPUs or GPUs without them: whether it fits, and how fast it will be.

  tokenformer plan --config=configs/lm_pile.py:1_5b --topology=v5p:4x4x4
  tokenformer plan --config=configs/lm_pile.py:1_5b --topology=h200:8

compiles the real training step with the devices' own compiler and prints its memory, its time and
the data that the devices exchange. docs/plan.md explains the output.

  --quick                               stop before code is generated: much faster, with rough times
  --breakdown                           where the step goes, and what bounds each part
  --tune                                try other meshes; print the flags of the fastest
  --fit                                 search for the largest batch that fits
  --grow=qkv=2176,proj=2176,ffn=8704    plan a growth chain; repeat the flag for each stage
  --grow=ffn=8704,layers=24             a stage with more layers
"""

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli import outputs
from tokenformer_jax.config import Config
from tokenformer_jax.config.arguments import REPEATED, Count, Path, Text
from tokenformer_jax.config.section import Bool
from tokenformer_jax.errors import UserError

if TYPE_CHECKING:
  from tokenformer_jax.plan.topology import Topology


def main(
  config: Config,
  topology: Text,
  *,
  slices: Count = 1,
  quick: Bool = False,
  breakdown: Bool = False,
  tune: Bool = False,
  fit: Bool = False,
  grow: Annotated[Sequence[Text], REPEATED] = (),
  json: Path | None = None,
) -> None:
  """Plan a run and print the tables.

  Args:
    config: The config: FILE, FILE:VARIANT or NAME.
    topology: CHIP:SHAPE, such as v5e:4x4 or v5p:4x4x4, or h200:8 for eight GPUs of a host.
    slices: The number of slices.
    quick: Stop before code is generated: much faster, without the schedule of operations.
    breakdown: Print where the step goes, and its bounds.
    tune: Plan several meshes, and print the flags of the fastest.
    fit: Search for the largest batch that fits, with the config's way to run layers.
    grow: A stage: qkv=N,proj=N,ffn=N[,layers=N][,pattern=P][,experts=N][,expert_tokens=N]
      [,top_k=K][,steps=N].
    json: A JSON file to write the figures to.
  """
  import jax

  from tokenformer_jax.plan import estimate
  from tokenformer_jax.plan import topology as topologies
  from tokenformer_jax.steps.fit import DoesNotFitError

  kinds = {'breakdown': breakdown, 'tune': tune, 'fit': fit, 'grow': grow}
  asked = [f'--{name}' for name, value in kinds.items() if value]
  if len(asked) > 1:
    raise UserError(f'{" and ".join(asked)} cannot be combined; run the command once with each')
  jax.config.update('jax_platforms', 'cpu')  # The planned devices are not on this machine.
  outputs.check_file('json', json)
  on = topologies.parse(topology, slices)
  if asked and config.data.has_stages:
    raise UserError(
      f'{asked[0]} plans batches of one size, and the config has batch_size_by_step or '
      "sequence_length_by_step in config.data; set them to ''"
    )
  # End as after Ctrl-C: stop the compiler's process and remove its files.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  try:
    text, figures = _plan(config, on, grow, quick=quick, tune=tune, fit=fit, breakdown=breakdown)
  except DoesNotFitError as error:
    raise estimate.advice(config, error, on) from error
  print(text)
  if json:
    outputs.write_json('json', json, figures)


def _plan(
  config: Config,
  on: 'Topology',
  grow: Sequence[str],
  *,
  quick: bool,
  tune: bool,
  fit: bool,
  breakdown: bool,
) -> tuple[str, Any]:
  """Return the text to print, and the figures for a JSON file."""
  from tokenformer_jax.plan import breakdown as breakdowns
  from tokenformer_jax.plan import chain, estimate, largest_batch, stages, table
  from tokenformer_jax.plan import tune as tuning

  if config.data.has_stages:
    staged = stages.plan_stages(config, on, quick=quick)
    return stages.render(staged), staged.to_json()
  if grow:
    grown = chain.plan_chain(config, [*grow], on, quick=quick)
    return chain.render(grown), grown.to_json()
  if fit:
    batches = largest_batch.search(config, on, quick=quick)
    plans = [one.plan for one in batches if one.plan]
    text = f'{largest_batch.render(batches, on)}\n\n{table.render(plans[-1])}'
    return text, [plan.to_json() for plan in plans]
  if tune:
    tried = tuning.search(config, on, quick=quick)
    plans = [one.plan for one in tried if one.plan]
    text = f'{tuning.render(tried)}\n\n{tuning.advice(config, tried)}\n\n{table.render(plans[0])}'
    return text, [plan.to_json() for plan in plans]
  planned = estimate.plan(config, on, quick=quick)
  text, figures = table.render(planned), planned.to_json()
  if breakdown:
    text += f'\n\n{breakdowns.render(planned)}'
    figures['breakdown'] = breakdowns.to_json(planned.costs)
  return text, figures


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, on_all_hosts=False)
