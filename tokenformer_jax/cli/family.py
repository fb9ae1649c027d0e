r"""Train models of several sizes from one config, for less than each apart.

  tokenformer family --config=lm_stdlib --out=sizes --sizes=1,2 --tokens=1e7 --dry_run
  tokenformer family --config=lm_stdlib --out=sizes --sizes=1,2 --tokens=1e7

A size is the config's model with a factor of its parameter tokens. --method says how sizes are
made:

  bottom_up  train the smallest, grow it from size to size; each size goes on alone to its end
  top_down   train the largest, shrink it to each size, and train that with the largest as teacher
  elastic    train the largest with a group of tokens for each size; a quarter of the rows of each
             batch train the first groups alone, which become the smaller models
  apart      train each size from scratch, for comparison

The command makes what is missing, one run after the other on all devices, and goes on where it
stopped. It writes the sizes to METHOD.json in --out; methods share runs from scratch.
"""

from typing import Literal

from tokenformer_jax.cli import config_flag, outputs
from tokenformer_jax.cli import main as cli
from tokenformer_jax.cli.sweep import Positives, RatePower
from tokenformer_jax.config import Config
from tokenformer_jax.config.arguments import Fraction, Path, Positive, needs_value
from tokenformer_jax.config.section import Bool
from tokenformer_jax.errors import UserError
from tokenformer_jax.family import RATE_POWER
from tokenformer_jax.parallel import messages

_SET = {
  'train.steps': '--tokens says how long the runs are',
  'train.nested_rows': '--method=elastic says it, and others have none',
}


def main(
  config: Config,
  out: Path,
  sizes: Positives,
  tokens: Positive,
  *,
  method: Literal['bottom_up', 'top_down', 'elastic', 'apart'] = 'bottom_up',
  scale: Literal['tokens', 'layers'] = 'tokens',
  grow_at: Positives | None = None,
  share: Fraction | None = None,
  distill_weight: Fraction | None = None,
  rate_power: RatePower = RATE_POWER,
  dry_run: Bool = False,
) -> None:
  """List the runs of a family; then make what is missing, and write the results.

  Args:
    config: The config whose model the sizes multiply: FILE, FILE:VARIANT or NAME.
    out: The directory for the runs.
    sizes: Rising factors of the size of the config.
    tokens: Tokens of a size from scratch, such as 2e6.
    method: How the sizes are made.
    scale: What a size multiplies.
    grow_at: The share of the tokens before each growth; default: evenly up to 3/4.
    share: Of the tokens: those of a shrunken model; default: 0.25.
    distill_weight: Of the teacher's probabilities; 0: no teacher; default: 0.25.
    rate_power: The power p in the learning rate of a size, that of the config times factor^p.
    dry_run: List runs, tokens and FLOPs, say whether they pay, and make nothing.
  """
  from tokenformer_jax.family import jobs as jobs_lib
  from tokenformer_jax.family import make, result
  from tokenformer_jax.laws import grid_runs
  from tokenformer_jax.storage import paths

  needs_value('method=bottom_up', method == 'bottom_up', grow_at=grow_at)
  is_top_down = method == 'top_down'
  needs_value('method=top_down', is_top_down, share=share, distill_weight=distill_weight)
  _check_keys()
  outputs.check_folder_of_runs('out', out, writes=not dry_run)
  options = {'grow_at': grow_at, 'share': share, 'distill_weight': distill_weight}
  given = {name: value for name, value in options.items() if value is not None}
  family = jobs_lib.Family(sizes, round(tokens), method, scale, rate_power=rate_power, **given)
  folder = str(paths.parse_path(out))
  jobs = jobs_lib.list_jobs(config, family, folder)
  apart = sum(job.flops for job in jobs_lib.list_apart(config, family))
  made = grid_runs.finished(jobs, folder, make.is_done)
  if messages.is_first():
    print(f'{grid_runs.table(jobs, made)}; {result.totals(jobs, family, apart)}', flush=True)
  if dry_run:
    if messages.is_first():
      print(f'\n{result.will_it_pay(jobs, family)}', flush=True)
    return
  if not grid_runs.make_missing(jobs, folder, make.make, make.is_done):
    messages.say('stopped; give the same command again to go on')
    return
  if messages.is_first():
    members = result.members(jobs, folder)
    print(f'\n{result.table(members)}', flush=True)
    messages.say(f'wrote {result.write(folder, family, apart, jobs, members)}')


def run() -> None:
  """Run the command with the arguments of this process."""
  cli.command(main, stops=True)


def _check_keys() -> None:
  """Check that no flag sets a key of the config that the runs of a family set themselves."""
  config_flag.check_left_out(_SET)
  given = config_flag.overrides
  schedule = given.get('optim.schedule', given.get('optim.schedule.kind', 'wsd'))
  if schedule != 'wsd':
    raise UserError(
      f'--config.optim.schedule={schedule} has no effect here, because all runs of a family keep '
      'their rate constant and then decay (wsd); leave it out'
    )
