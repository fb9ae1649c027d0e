"""The ways to make a family of sizes, each as a list of runs.

apart       Train each size from scratch.
bottom_up   Train the smallest size at a constant rate, and grow it from size to size. Each size
            goes on from there alone, to as many tokens as from scratch, with a decay at the end.
top_down    Train the largest size, keep its most important parameter tokens, and train each smaller
            model on a share of the tokens, with the largest as its teacher.
elastic     Train the largest size with a group of parameter tokens for each size. In the last share
            of the tokens, some steps train the first groups alone; the model as it was before
            teaches. Then write each number of first groups as a model of its own.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig, ModelConfig, growth
from tokenformer_jax.config import groups as choices
from tokenformer_jax.errors import UserError
from tokenformer_jax.family import jobs as jobs_lib
from tokenformer_jax.family.jobs import Action, Family, Job, Plan
from tokenformer_jax.grow import plan as growth_plan
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.laws import grid

SCALES = ('tokens', 'layers')
# The last growth, if the user says none: a share of all tokens, and of those before the decay.
LATEST_GROWTH, BEFORE_DECAY = 0.75, 0.95
# Fewer parameter tokens keep the size of their weights if τ² falls with their number.
_SHRUNKEN = {'scale': 'resize', 'moments': 'drop', 'step': 'restart'}


def list_jobs(config: Config, family: Family, out: str) -> list[Job]:
  """Return the runs of a family in the directory `out`, each after those that it needs.

  Raises:
    UserError: the config cannot be the base of a family, or a value of the family does not fit it.
  """
  _check(config, family)
  end = grid.count_steps(config, family.tokens, '--tokens')
  return WAYS[family.way](Plan(config, family, end, out))


def list_apart(config: Config, family: Family) -> list[Job]:
  """Return the runs that train each size of a family from scratch."""
  end = grid.count_steps(config, family.tokens, '--tokens')
  return _apart(Plan(config, family, end, ''))


def _check(config: Config, family: Family) -> None:
  grid.check_base(config, 'a family', '--tokens')
  for before, after in itertools.pairwise(family.sizes):
    if after <= before:
      raise UserError(f'--sizes has {after:g} after {before:g}; name rising sizes, each once')
  if len(family.sizes) < 2:
    raise UserError(
      '--sizes has one size, and a family has at least two; name more, or use tokenformer train'
    )
  if family.way in ('top_down', 'elastic') and family.scale != 'tokens':
    raise UserError(
      f'--way={family.way} takes parameter tokens away, and --scale={family.scale} multiplies '
      'something else; use --scale=tokens, or --way=bottom_up'
    )
  if config.distill.teacher:
    raise UserError(
      'config.distill.teacher has no meaning here, because a family names its own teachers '
      '(--distill_weight); leave it out'
    )
  grown = [one.path for one in config_lib.differences(config.grow, GrowConfig(), 'grow.')]
  if grown and family.way != 'bottom_up':
    raise UserError(f'config.{grown[0]} has an effect only with --way=bottom_up; leave it out')
  for path in ('grow.step', 'grow.moments'):
    if path in grown:
      raise UserError(
        f'config.{path} has no effect here, because the runs of a family keep their steps and '
        'moments, and --rate_power says their rates; leave it out'
      )


def _apart(plan: Plan) -> list[Job]:
  return [plan.scratch(factor) for factor in plan.family.sizes]


def _grown_models(plan: Plan) -> list[ModelConfig]:
  """Return the model of each size, grown from that of the size before it."""
  family, grow = plan.family, plan.base.grow
  models = [plan.model(family.sizes[0])]
  for factor in family.sizes[1:]:
    wanted = plan.model(factor)
    if family.scale == 'tokens':
      wanted = grown_model(models[-1], config_lib.token_counts(wanted), grow)
    growth_plan.check(models[-1], wanted, grow)
    models.append(wanted)
  return models


def _growth_steps(plan: Plan) -> list[int]:
  """Return the step of each growth."""
  family, growths = plan.family, len(plan.family.sizes) - 1
  latest = min(LATEST_GROWTH, BEFORE_DECAY * plan.decay_begin / plan.end)
  shares = family.grow_at or [latest * i / growths for i in range(1, growths + 1)]
  if len(shares) != growths:
    raise UserError(
      f'--grow_at has {len(shares)} shares, and {len(family.sizes)} sizes have {growths} growths; '
      'give one for each'
    )
  steps = [round(share * plan.end) for share in shares]
  warmup, begin = plan.optim.warmup_steps, plan.decay_begin
  for share, before, step in zip(shares, [warmup, *steps], steps, strict=False):
    if step <= before:
      after = 'the warm-up' if before == warmup else 'the growth before'
      raise UserError(
        f'--grow_at has {share:.3g}, which is step {step} of {plan.end}, and {after} ends at step '
        f'{before}; give rising shares, or more --tokens'
      )
    if step >= begin:
      raise UserError(
        f'--grow_at has {share:.3g}, which is step {step} of {plan.end}, and the rate decays from '
        f'step {begin} on; grow earlier'
      )
  return steps


def _bottom_up(plan: Plan) -> list[Job]:
  jobs_lib.check_decay(plan.decay_begin, plan.optim, '--tokens')
  models, steps = _grown_models(plan), [*_growth_steps(plan), plan.end]
  found: list[Job] = []
  source, first = '', 0
  for factor, model, step in zip(plan.family.sizes, models, steps, strict=True):
    folder, decays = f'bottom_up/size_{factor:g}', {'end': plan.end, 'begin': plan.decay_begin}
    own = plan.config(factor, model)
    config, stage, needs = own, 'trunk', ()
    if source:  # The run begins with a growth.
      config, stage, needs = dataclasses.replace(own, grow=plan.base.grow), 'grow', (source,)
    if step == plan.end:
      final = plan.continued(config, source, first, **decays)
      found.append(
        plan.job(f'{folder}/final', final, 'grow', factor, first=first, needs=needs, final=True)
      )
      break
    trunk = plan.continued(config, source, first) if source else jobs_lib.constant(config)
    trunk = grid.with_train(trunk, steps=step)
    found.append(plan.job(f'{folder}/trunk', trunk, stage, factor, first=first, needs=needs))
    source, first = f'{folder}/trunk', step
    branch = plan.continued(own, source, step, **decays)
    found.append(
      plan.job(f'{folder}/final', branch, 'branch', factor, first=step, needs=(source,), final=True)
    )
  return found


def _top_down(plan: Plan) -> list[Job]:
  family = plan.family
  whole = plan.scratch(family.largest)
  large, teacher = plan.model(family.largest), f'{whole.name}@{plan.end}'
  steps = max(1, round(family.share * plan.end))
  begin = grid.decay_begin(plan.optim, steps)
  jobs_lib.check_decay(begin, plan.optim, '--share')
  found = [whole]
  for factor in reversed(family.sizes[:-1]):
    folder = f'top_down/size_{factor:g}'
    counts = config_lib.token_counts(plan.model(factor))
    model = grown_model(large, counts, growth('zero_keys', **_SHRUNKEN))
    arguments = {'param_tokens': counts, 'examples': family.examples, **_SHRUNKEN}
    shrunk = plan.job(
      f'{folder}/shrunk_by_{family.examples}',
      plan.config(factor, model, steps=0),
      'shrink',
      factor,
      needs=(whole.name,),
      action=Action('shrink', teacher, arguments),
    )
    own = plan.continued(plan.config(factor, model), shrunk.name, 0, end=steps, begin=begin)
    final = plan.job(
      f'{folder}/final',
      plan.taught(own, teacher),
      'distill' if family.distill_weight else 'branch',
      factor,
      needs=(shrunk.name, whole.name),
      teacher=large,
      final=True,
    )
    found += [shrunk, final]
  return found


def _elastic(plan: Plan) -> list[Job]:
  family, factor = plan.family, plan.family.largest
  first, begin = plan.end - max(1, round(family.share * plan.end)), plan.decay_begin
  if first > begin:
    raise UserError(
      f'--share={family.share:g} is less than the decay, config.optim.schedule.decay_share='
      f'{plan.optim.schedule.decay_share:g}, and prefixes train from its begin on at the latest; '
      '--share'
    )
  if first <= plan.optim.warmup_steps:
    raise UserError(
      f'--share={family.share:g} begins at step {first} of {plan.end}, within the warm-up of '
      f'config.optim.warmup_steps={plan.optim.warmup_steps}; lower --share, or raise --tokens'
    )
  *smaller, model = _grown_models(plan)
  own = plan.config(factor, model)
  trunk = plan.job(
    'elastic/trunk', grid.with_train(jobs_lib.constant(own), steps=first), 'trunk', factor
  )
  last = plan.continued(own, trunk.name, first, end=plan.end, begin=begin)
  last = grid.with_train(last, drop_groups=family.drop_groups)
  whole = plan.job(
    f'elastic/size_{factor:g}',
    plan.taught(last, f'{trunk.name}@{first}'),
    'elastic',
    factor,
    first=first,
    needs=(trunk.name,),
    teacher=model,
    final=True,
  )
  return [trunk, whole, *_slices(plan, smaller, model, whole.name)]


def _slices(
  plan: Plan, smaller: Sequence[ModelConfig], model: ModelConfig, whole: str
) -> list[Job]:
  """Return the jobs that write the first groups of an elastic model as the smaller models."""
  found = []
  for factor, prefix in zip(plan.family.sizes, smaller, strict=False):
    groups = choices.most_groups(prefix)
    if choices.choose(model, choices.first(groups)) != prefix:
      raise UserError(
        '--way=elastic takes the first groups of each projection, and those of the config have '
        'different numbers of groups; give them as many'
      )
    action = Action('slice', f'{whole}@{plan.end}', {'groups': groups})
    found.append(
      plan.job(
        f'elastic/size_{factor:g}',
        plan.config(factor, prefix, steps=plan.end),
        'slice',
        factor,
        first=plan.end,
        needs=(whole,),
        final=True,
        action=action,
      )
    )
  return found


WAYS: dict[str, jobs_lib.Way] = {
  'bottom_up': _bottom_up,
  'top_down': _top_down,
  'elastic': _elastic,
  'apart': _apart,
}
