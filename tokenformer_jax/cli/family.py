r"""Train models of several sizes from one config, for less than each apart.

  tokenformer family --config=lm_stdlib --out=sizes --sizes=1,2 --tokens=1e7 --dry_run
  tokenformer family --config=lm_stdlib --out=sizes --sizes=1,2 --tokens=1e7
  tokenformer family --config=lm_stdlib --out=sizes --sizes=1,2 --tokens=1e9 \
    --dry_run --law=laws.json

A size is the config's model with a factor of its parameter tokens. --method says how sizes are
made:

  bottom_up  train the smallest, grow it from size to size; each size goes on alone to its end
  top_down   train the largest, shrink it to each size, and train that with the largest as teacher
  elastic    train the largest with a group of tokens for each size; in the last share of the tokens
             some steps train the first groups alone, and these become the smaller models
  apart      train each size from scratch, for comparison

The command makes what is missing, one run after the other on all devices, and goes on where it
stopped. It writes the sizes to METHOD.json in --out; methods share runs from scratch. With
--dry_run, --law, the JSON file of `laws`, adds losses and what the family costs beside its sizes
apart at equal loss.
"""

from collections.abc import Sequence

from absl import flags

from tokenformer_jax.cli import config_flag, parse_flags
from tokenformer_jax.cli import main as cli
from tokenformer_jax.errors import UserError
from tokenformer_jax.family import forecast, make, result
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family.jobs import Family
from tokenformer_jax.laws import grid_runs, points
from tokenformer_jax.parallel import hosts, messages
from tokenformer_jax.storage import paths

_MOST_EXAMPLES = 2**16
_SET = {
  'train.steps': '--tokens says how long the runs are',
  'train.drop_groups': '--drop_groups says it for --method=elastic, and others have none',
}


# Flags that some methods have.
_OF_METHODS = {
  'grow_at': ('bottom_up',),
  'share distill_weight': ('top_down', 'elastic'),
  'drop_groups': ('elastic',),
  'examples': ('top_down',),
}


def define_flags() -> None:
  """Define the command's flags."""
  plain = Family((), 0, '')
  config_flag.define('The config whose model the sizes multiply: FILE, FILE:VARIANT or NAME.')
  flags.mark_flag_as_required('config')
  flags.DEFINE_string('out', None, 'The directory for the runs.', required=True)
  flags.DEFINE_list('sizes', None, 'Rising factors of the size of the config.', required=True)
  flags.DEFINE_string('tokens', None, 'Tokens of a size from scratch, such as 2e6.', required=True)
  flags.DEFINE_enum('method', 'bottom_up', list(jobs_lib.METHODS), 'How the sizes are made.')
  flags.DEFINE_enum('scale', plain.scale, jobs_lib.SCALES, 'What a size multiplies.')
  flags.DEFINE_list(
    'grow_at', None, 'The share of the tokens before each growth; default: evenly up to 3/4.'
  )
  flags.DEFINE_float(
    'share',
    plain.share,
    'Of the tokens: those of a shrunken model, or the last ones, in which prefixes train.',
    0,
    1,
  )
  flags.DEFINE_float(
    'distill_weight', plain.distill_weight, "Of the teacher's probabilities; 0: no teacher.", 0, 1
  )
  flags.DEFINE_float(
    'drop_groups', plain.drop_groups, 'The part of those steps that train a prefix.', 0, 1
  )
  flags.DEFINE_integer(
    'examples', plain.examples, 'Sequences that measure importance.', 1, _MOST_EXAMPLES
  )
  config_flag.define_rate_power(plain.rate_power)
  flags.DEFINE_bool('dry_run', False, 'List runs, tokens, FLOPs and times, and make nothing.')
  flags.DEFINE_string('law', None, 'The JSON file of laws: list losses by it.')


def run() -> None:
  """Run the command with the arguments of this process."""
  define_flags()
  cli.run(main, stops=True)


def main(argv: Sequence[str]) -> int:
  """List the runs; then make what is missing, and write the results."""
  del argv
  values = flags.FLAGS
  for names, methods in _OF_METHODS.items():
    why = f'has an effect only with --method={" or ".join(methods)}; leave it out'
    parse_flags.refuse(names, why, unless=values.method in methods)
  parse_flags.needs('law', 'dry_run')
  _check_keys()
  cli.check_holds_no_run('out')
  family, out = _read_family(), str(paths.parse_path(values.out))
  law = forecast.read_law(values.law) if values.law else None
  if not values.dry_run:
    cli.check_output_folder('out')
  base = config_flag.read()
  jobs = jobs_lib.list_jobs(base, family, out)
  separate = jobs_lib.list_apart(base, family)
  apart = sum(job.flops for job in separate)
  made = grid_runs.finished(jobs, out, make.is_done)
  if hosts.is_first():
    print(f'{grid_runs.table(jobs, made)}; {result.totals(jobs, family, apart)}', flush=True)
  if values.dry_run:
    if law is not None and hosts.is_first():
      print(f'\n{forecast.describe(jobs, separate, law)}', flush=True)
    return 0
  if not grid_runs.make_missing(jobs, out, make.make, make.is_done):
    messages.say('stopped; give the same command again to go on')
    return 0
  if hosts.is_first():
    members = result.members(jobs, out)
    print(f'\n{result.table(members)}', flush=True)
    messages.say(f'wrote {result.write(out, family, apart, jobs, members)}')
  return 0


def _read_family() -> Family:
  """Return the family that the flags describe."""
  values = flags.FLAGS
  (tokens,) = points.positives('tokens', [values.tokens])
  return Family(
    sizes=points.positives('sizes', values.sizes),
    tokens=round(tokens),
    method=values.method,
    scale=values.scale,
    grow_at=points.positives('grow_at', values.grow_at or ()),
    share=values.share,
    drop_groups=values.drop_groups,
    distill_weight=values.distill_weight,
    examples=values.examples,
    rate_power=values.rate_power,
  )


def _check_keys() -> None:
  """Check that no flag sets a key of the config that the runs of a family set themselves.

  Raises:
    UserError: one does.
  """
  config_flag.check_left_out(_SET)
  given = config_flag.overrides
  schedule = given.get('optim.schedule', given.get('optim.schedule.kind', 'wsd'))
  if schedule != 'wsd':
    raise UserError(
      f'--config.optim.schedule={schedule} has no effect here, because all runs of a family keep '
      'their rate constant and then decay (wsd); leave it out'
    )
