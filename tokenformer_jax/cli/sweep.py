r"""Train the grid of sizes and lengths that a scaling law needs, from one config.

  tokenformer sweep --config=lm_stdlib --out=runs/law --factors=1,2 --lengths=1e6,2e6
  tokenformer laws runs/law

A size is the config's model times a factor. All lengths of a size come from one stable run, which
keeps its rate constant; each length is a decay that starts from a checkpoint of it. The command
trains what is missing, one run after the other on all devices, and goes on where it stopped. Sizes
do not depend on each other: several machines can each train some of the factors.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from tokenformer_jax.cli import config_flag, outputs
from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import Config
from tokenformer_jax.config.arguments import FILLED, Path, Positive
from tokenformer_jax.config.section import Bool, Float
from tokenformer_jax.parallel import messages

Positives = Annotated[Sequence[Positive], FILLED]
RatePower = Annotated[Float, Field(ge=-10, le=10)]  # realistic powers lie between −2 and 0
# Keys that a grid sets itself, and why.
_SET = {
  'train.steps': '--lengths says how long the runs are',
  'optim.schedule': 'a stable run keeps its rate constant, and each length is a decay from it',
  'train.eval_every': 'a grid evaluates at the end of a run only',
}


def main(
  config: Config,
  out: Path,
  factors: Positives,
  lengths: Positives,
  *,
  scale: Literal['width', 'tokens', 'layers'] = 'width',
  rate_power: RatePower = 0.0,
  dry_run: Bool = False,
) -> None:
  """List the runs of a grid; then train what is missing.

  Args:
    config: The config whose model the factors multiply: FILE, FILE:VARIANT or NAME.
    out: The directory for the runs.
    factors: The sizes: factors of the sizes of the config.
    lengths: The lengths of training in tokens, such as 1e6,2e6.
    scale: What a factor multiplies: the width, with heads and parameter tokens; the parameter
      tokens alone; or the number of layers.
    rate_power: The power p in the learning rate of a size, that of the config times factor^p.
    dry_run: List sizes, lengths and FLOPs, and train nothing.
  """
  from tokenformer_jax.laws import grid, grid_runs

  config_flag.check_left_out(_SET)
  outputs.check_folder_of_runs('out', out, writes=not dry_run)
  wanted = grid.Grid(scale, factors, [round(length) for length in lengths], rate_power)
  jobs = grid.jobs(config, wanted, str(out))
  made = grid_runs.finished(jobs, str(out))
  if messages.is_first():
    print(grid_runs.table(jobs, made), flush=True)
  if dry_run:
    return
  if grid_runs.make_missing(jobs, str(out)):
    messages.say(f'all runs are finished: tokenformer laws {out}')
  else:
    messages.say('stopped; give the same command again to go on')


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, stops=True)
