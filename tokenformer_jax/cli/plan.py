r"""Plan a run on a TPU topology without a TPU: whether it fits, and how fast it will be.

  tokenformer plan --config=configs/lm_pile.py:1_5b --topology=v5p:4x4x4

compiles the real training step with the TPU's own compiler and prints its memory, its time and the
data that the chips exchange. `--topology=gpu-h100:8` uses formulas only. docs/plan.md explains the
output.

  --quick                               stop before code is generated: much faster, with rough times
  --breakdown                           where the step goes, and what bounds each part
  --tune                                try other meshes; print the flags of the fastest
  --grow=qkv=2176,proj=2176,ffn=8704    plan a growth chain; repeat the flag for each stage
  --grow=ffn=8704,layers=24             a stage with more layers
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from tokenformer_jax.cli import config_flag
from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import Config
from tokenformer_jax.errors import UserError
from tokenformer_jax.plan import breakdown, chain, estimate, stages, table, topology, tune
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError


def define_flags() -> None:
  """Define the command's flags."""
  config_flag.define('The config: FILE, FILE:VARIANT or NAME.')
  flags.mark_flag_as_required('config')
  flags.DEFINE_string('topology', None, 'CHIP:SHAPE, such as v5e:4x4 or v5p:4x4x4.', required=True)
  flags.DEFINE_integer('slices', 1, 'The number of slices.', lower_bound=1)
  flags.DEFINE_bool(
    'quick',
    False,
    'Stop before code is generated: much faster, without the schedule of operations.',
  )
  flags.DEFINE_bool('breakdown', False, 'Print where the step goes, and its bounds.')
  flags.DEFINE_bool('tune', False, 'Plan several meshes, and print the flags of the fastest.')
  flags.DEFINE_multi_string(
    'grow',
    [],
    'A stage: qkv=N,proj=N,ffn=N[,layers=N][,pattern=P][,experts=N][,expert_tokens=N][,top_k=K]'
    '[,steps=N].',
  )
  flags.DEFINE_string('json', None, 'A JSON file to write the figures to.')


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, on_all_hosts=False)


def main(argv: Sequence[str]) -> None:
  """Plan the run and print the tables."""
  del argv
  values = flags.FLAGS
  one_of = [name for name in ('breakdown', 'tune', 'grow') if values[name].value]
  if len(one_of) > 1:
    names = ' and '.join(f'--{name}' for name in one_of)
    raise UserError(f'{names} cannot be combined; run the command once with each')
  jax.config.update('jax_platforms', 'cpu')  # The planned devices are not on this machine.
  cli.output_file('json')
  on = topology.parse(values.topology, values.slices)
  for name in ('quick', 'breakdown', 'tune'):
    if values[name].value:
      topology.check_compiles(on, f'--{name}')
  run = config_flag.read()
  if one_of and run.data.has_stages:
    raise UserError(
      f'--{one_of[0]} plans batches of one size, and the config has batch_size_by_step or '
      "sequence_length_by_step in config.data; set them to ''"
    )
  # End as after Ctrl-C: stop the compiler's process and remove its files.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  try:
    text, figures = _answer(run, on)
  except DoesNotFitError as error:
    raise estimate.advice(run, error, on) from error
  print(text)
  if values.json:
    cli.write_json('json', figures)


def _answer(run: Config, on: Topology) -> tuple[str, Any]:
  """Return the text to print and the figures for --json."""
  values = flags.FLAGS
  if run.data.has_stages:
    staged = stages.plan_stages(run, on, quick=values.quick)
    return stages.render(staged), staged.to_json()
  if values.grow:
    grown = chain.plan_chain(run, values.grow, on, quick=values.quick)
    return chain.render(grown), grown.to_json()
  if values.tune:
    tried = tune.search(run, on, quick=values.quick)
    planned = [one.plan for one in tried if one.plan]
    text = f'{tune.render(tried)}\n\n{tune.advice(run, tried)}\n\n{table.render(planned[0])}'
    return text, [one.to_json() for one in planned]
  planned = estimate.plan(run, on, quick=values.quick)
  text, figures = table.render(planned), planned.to_json()
  if values.breakdown:
    text += f'\n\n{breakdown.render(planned)}'
    figures['breakdown'] = breakdown.to_json(planned.costs)
  return text, figures
