r"""Write a page about one or more runs, which opens in any browser and needs no network.

  tokenformer report runs/lm_stdlib --out=report.html
  tokenformer report runs/small runs/medium runs/large --out=growth.html

The page has what the runs have: curves to hover over and zoom, by steps, tokens, FLOPs or hours;
the loss against FLOPs, with decays; the lineage of growths with sizes, losses and costs; speed, and
where wall time went; the keys in which the configs differ; samples; and of the last models the
usage of parameter tokens and the load of experts.

Runs are only read, so a run may be in progress. The models are read on the CPU.
"""

from collections.abc import Sequence

import jax
from absl import flags

from tokenformer_jax.cli import main as cli
from tokenformer_jax.errors import UserError
from tokenformer_jax.report import page


def define_flags() -> None:
  """Define the command's flags."""
  flags.DEFINE_string('out', 'report.html', 'The file to write: .html.')
  flags.DEFINE_integer(
    'models',
    page.MODELS,
    'Look into the models of at most N runs, the last ones; 0: no model is read.',
    lower_bound=0,
  )


def main(argv: Sequence[str]) -> None:
  """Write the page about the runs in `argv`."""
  values, runs = flags.FLAGS, argv[1:]
  if not runs:
    raise UserError(
      'no run is given; name one or more work directories, for example runs/lm_stdlib'
    )
  cli.output_file('out', page.ENDINGS)
  # A run in progress may hold the accelerators.
  jax.config.update('jax_platforms', 'cpu')
  cli.write_output('out', page.build(runs, models=values.models).write)
  print(values.out)


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, positional=True, on_all_hosts=False)
