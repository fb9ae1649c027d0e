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
from typing import Any

import jax
from absl import flags

from tokenformer_jax.cli import config_flag
from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import Config, to_json
from tokenformer_jax.errors import UserError
from tokenformer_jax.plan import (
  breakdown,
  breakdown_figure,
  chain,
  estimate,
  stages,
  table,
  topology,
  tune,
)
from tokenformer_jax.plan.topology import Topology
from tokenformer_jax.steps.fit import DoesNotFitError
from tokenformer_jax.storage import paths


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
  flags.DEFINE_string('picture', None, 'The file to draw the breakdown to: .png, .pdf or .svg.')
  flags.DEFINE_integer(
    'tune', 0, "The most programs to compile in a search with the config's batch.", lower_bound=0
  )
  flags.DEFINE_integer(
    'sweep',
    0,
    'The most programs to compile in a search that also varies the batch.',
    lower_bound=0,
  )
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
  given = [name for name in ('tune', 'sweep', 'grow') if values[name].value]
  if len(given) > 1:
    names = ' and '.join(f'--{name}' for name in given)
    raise UserError(f'{names} cannot be combined; run the command once with each')
  jax.config.update('jax_platforms', 'cpu')  # The planned devices are not on this machine.
  cli.output_file('json')
  on = topology.parse(values.topology, values.slices)
  _check_breakdown(on)
  if values.quick:
    estimate.check_quick(on, '--quick')
  run = config_flag.read()
  if _wants_breakdown() and run.data.has_stages:
    raise UserError(
      '--breakdown and --picture are of one program, and the config has batch_size_by_step or '
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


def _wants_breakdown() -> bool:
  return flags.FLAGS.breakdown or flags.FLAGS.picture is not None


def _check_breakdown(on: Topology) -> None:
  """Check the flags of a breakdown before anything is compiled.

  Raises:
    UserError: there is not one program, nothing is compiled, or the picture cannot be drawn.
  """
  if not _wants_breakdown():
    return
  values = flags.FLAGS
  for name in ('tune', 'sweep', 'grow'):
    if values[name].value:
      raise UserError(
        f'--breakdown and --picture are of one program, and --{name} is given; leave it out'
      )
  if not on.has_compiler:
    raise UserError(
      f'--breakdown and --picture need a compiler, and --topology={values.topology} is planned by '
      'formulas; give a topology of TPUs'
    )
  cli.output_file('picture', paths.PICTURES)
  if values.picture is not None:
    breakdown_figure.check()


def _answer(run: Config, on: Topology) -> tuple[str, Any]:
  """Return the text to print and the figures for --json."""
  quick = flags.FLAGS.quick
  if run.data.has_stages:
    if flags.FLAGS.grow or flags.FLAGS.sweep or flags.FLAGS.tune:
      raise UserError(
        '--grow, --sweep and --tune plan batches of one size, and the config has '
        "batch_size_by_step or sequence_length_by_step in config.data; set them to ''"
      )
    planned = stages.plan_stages(run, on, quick=quick)
    return stages.render(planned), planned.to_json()
  if flags.FLAGS.grow:
    found = chain.plan_chain(run, flags.FLAGS.grow, on, quick=quick)
    return chain.render(found), {
      'stages': [planned.to_json() for planned in found.stages],
      'scratch': found.scratch.to_json(),
    }
  if most := flags.FLAGS.sweep or flags.FLAGS.tune:
    batches = tune.BATCHES if flags.FLAGS.sweep else (1,)
    tried = tune.search(run, on, most, quick=quick, batches=batches)
    text = (
      f'{tune.render(tried)}\n\n{tune.advice(tried)}\n\nthe fastest that fits:\n\n'
      f'{table.render(tried[0].plan)}'
    )
    return text, [
      candidate.plan.to_json()
      if candidate.plan
      else {'reason': candidate.reason, 'config': to_json(candidate.config)}
      for candidate in tried
    ]
  found = estimate.plan(run, on, quick=quick)
  text, figures = table.render(found), found.to_json()
  if flags.FLAGS.breakdown:
    text += f'\n\n{breakdown.render(found)}'
    figures['breakdown'] = breakdown.to_json(found.costs)
  if flags.FLAGS.picture is not None:
    cli.write_output('picture', breakdown_figure.draw(found).savefig)
  return text, figures
