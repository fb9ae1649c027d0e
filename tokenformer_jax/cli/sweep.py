r"""Train the grid of sizes and lengths that a scaling law needs, from one config.

  tokenformer sweep --config=lm_stdlib --out=runs/law --factors=1,2 --lengths=1e6,2e6
  tokenformer laws runs/law

A size is the config's model times a factor. All lengths of a size come from one stable run, which
keeps its rate constant; each length is a decay that starts from a checkpoint of it. The command
trains what is missing, one run after the other on all devices, and goes on where it stopped. Sizes
do not depend on each other: several machines can each train some of the factors.
"""

from collections.abc import Sequence

from absl import flags

from tokenformer_jax.cli import config_flag, help_text
from tokenformer_jax.cli import main as cli
from tokenformer_jax.laws import grid, grid_runs, points
from tokenformer_jax.parallel import hosts, messages

# Keys that a grid sets itself, and why.
_SET = {
  'train.steps': '--lengths says how long the runs are',
  'optim.schedule': 'a stable run keeps its rate constant, and each length is a decay from it',
  'train.eval_every': 'a grid evaluates at the end of a run only',
}


def define_flags() -> None:
  """Define the command's flags."""
  config_flag.define('The config whose model the factors multiply: FILE, FILE:VARIANT or NAME.')
  flags.mark_flag_as_required('config')
  flags.DEFINE_string('out', None, 'The directory for the runs.', required=True)
  flags.DEFINE_list('factors', None, 'The sizes: factors of the sizes of the config.')
  flags.DEFINE_list('lengths', None, 'The lengths of training in tokens, such as 1e6,2e6.')
  flags.mark_flags_as_required(['factors', 'lengths'])
  flags.DEFINE_enum(
    'scale',
    'width',
    grid.SCALES,
    'What a factor multiplies: the width, with heads and parameter tokens; the parameter tokens '
    'alone; or the number of layers.',
  )
  config_flag.define_rate_power(0.0)
  flags.DEFINE_bool('dry_run', False, 'List sizes, lengths, FLOPs and times, and train nothing.')


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, stops=True)


def main(argv: Sequence[str]) -> int:
  """List the runs; then train what is missing."""
  del argv
  values = flags.FLAGS
  config_flag.check_left_out(_SET)
  cli.check_holds_no_run('out')
  wanted = grid.Grid(
    scale=values.scale,
    factors=points.positives('factors', values.factors),
    lengths=[round(length) for length in points.positives('lengths', values.lengths)],
    rate_power=values.rate_power,
  )
  if not values.dry_run:
    cli.check_output_folder('out')
  jobs = grid.jobs(config_flag.read(), wanted, values.out)
  made = grid_runs.finished(jobs, values.out)
  if hosts.is_first():
    print(grid_runs.table(jobs, made), flush=True)
  if values.dry_run:
    return 0
  if grid_runs.make_missing(jobs, values.out):
    messages.say(f'all runs are finished: {help_text.spell_command("laws")} {values.out}')
    return 0
  messages.say('stopped; give the same command again to go on')
  return 0
