"""The runs of a family as plain data, for each method.

apart       Train each size from scratch.
bottom_up   Train the smallest size at a constant rate, and grow it from size to size. Each size
            goes on from there alone, to as many tokens as from scratch, with a decay at the end.
top_down    Train the largest size, keep its most important parameter tokens, and train each smaller
            model on a share of the tokens, with the largest as its teacher.
elastic     Train the largest size with a group of parameter tokens for each size. A quarter of the
            rows of each batch train the first groups alone. Then write each number of first groups
            as a model of its own.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import Config, GrowConfig, ModelConfig, OptimConfig, as_wsd
from tokenformer_jax.config import groups as groups_lib
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.family import RATE_POWER
from tokenformer_jax.grow import plan as growth_plan
from tokenformer_jax.laws import grid
from tokenformer_jax.laws.runs import measure_size
from tokenformer_jax.model import flops
from tokenformer_jax.resolve.facts import complete

# The last growth by default: a share of all tokens, and of those before the decay.
LATEST_GROWTH, BEFORE_DECAY = 0.75, 0.95
_NESTED_ROWS = 4  # elastic: of so many rows, one trains a prefix
_EXAMPLES = 16  # top-down: the sequences on which the importance of tokens is measured
# Fewer parameter tokens keep the size of their weights if τ² falls with their number.
_SHRUNKEN = {'scale': 'resize', 'moments': 'drop', 'step': 'restart'}


@dataclasses.dataclass(frozen=True)
class Family:
  """The sizes that a user asks for, and how to make them.

  Attributes:
    sizes: rising factors of the size of the config's model.
    tokens: the length of the training of a size from scratch.
    method: one of `METHODS`.
    scale: the quantity that a factor multiplies, `tokens` or `layers`: see `grid.scaled`.
    grow_at: bottom-up, the share of the tokens before each growth; empty: evenly up to three
      quarters.
    share: top-down, the share of the tokens that a shrunken model learns from.
    distill_weight: top-down, the weight of the teacher's probabilities; 0: no teacher.
    rate_power: p; the learning rate of a size is the config's times factor^p.
  """

  sizes: Sequence[float]
  tokens: int
  method: str
  scale: str = 'tokens'
  grow_at: Sequence[float] = ()
  share: float = 0.25
  distill_weight: float = 0.25
  rate_power: float = RATE_POWER


@dataclasses.dataclass(frozen=True)
class Action:
  """An action of `grow` that makes a run from another one, NAME@STEP."""

  name: str  # of `grow.actions.ACTIONS`
  source: str
  arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Job(grid.Job):
  """A run of a family. It trains, or it is made from another run by an action.

  `size` counts the teacher's forward pass among the FLOPs of a token.
  """

  factor: float = 1.0  # its size over that of the config
  final: bool = False  # whether its model is that of the family
  needs: tuple[str, ...] = ()  # the names of the runs that it starts from or learns from
  action: Action | None = None  # None: the job trains


def needed(jobs: Sequence[Job], factor: float) -> list[Job]:
  """Return the runs that one size of a family needs, if no other is wanted."""
  by_name = {job.name: job for job in jobs}
  names, left = set(), [job.name for job in jobs if job.final and job.factor == factor]
  while left:
    name = left.pop()
    if name not in names:
      names.add(name)
      left += by_name[name].needs
  return [job for job in jobs if job.name in names]


def list_jobs(config: Config, family: Family, out: str) -> list[Job]:
  """Return the runs of a family in the directory `out`, each after those that it needs."""
  _check(config, family)
  end = grid.count_steps(config, family.tokens, '--tokens')
  return METHODS[family.method](_Maker(config, family, end, out))


def list_apart(config: Config, family: Family) -> list[Job]:
  """Return the runs that train each size of a family from scratch."""
  return list_jobs(
    dataclasses.replace(config, grow=GrowConfig()), dataclasses.replace(family, method='apart'), ''
  )


def _check(config: Config, family: Family) -> None:
  grid.check_base(config, 'a family', '--tokens')
  for before, after in itertools.pairwise(family.sizes):
    if after <= before:
      raise UserError(f'--sizes has {after:g} after {before:g}; name rising sizes, each once')
  if len(family.sizes) < 2:
    raise UserError(
      '--sizes has one size, and a family has at least two; name more, or use tokenformer train'
    )
  if family.method in ('top_down', 'elastic') and family.scale != 'tokens':
    raise UserError(
      f'--method={family.method} takes parameter tokens away, and --scale={family.scale} '
      'multiplies something else; use --scale=tokens, or --method=bottom_up'
    )
  if config.distill.teacher:
    raise UserError(
      'config.distill.teacher has no meaning here, because a family names its own teachers '
      '(--distill_weight); leave it out'
    )
  changed = [one.path for one in config_lib.differences(config.grow, GrowConfig(), 'grow.')]
  if changed and family.method != 'bottom_up':
    raise UserError(f'config.{changed[0]} has an effect only with --method=bottom_up; leave it out')
  for path in ('grow.step', 'grow.moments'):
    if path in changed:
      raise UserError(
        f'config.{path} has no effect here, because the runs of a family keep their steps and '
        'moments, and --rate_power says their rates; leave it out'
      )


@dataclasses.dataclass(frozen=True)
class _Maker:
  """Make the jobs of a family; `end` is the number of steps of a size from scratch."""

  base: Config
  family: Family
  end: int
  out: str

  @property
  def optim(self) -> OptimConfig:
    """The settings of all runs: a constant rate, then a decay."""
    return dataclasses.replace(self.base.optim, schedule=as_wsd(self.base.optim.schedule))

  @property
  def decay_begin(self) -> int:
    """The step at which the rate of a size from scratch begins to decay."""
    return grid.decay_begin(self.optim, self.end)

  def model(self, factor: float) -> ModelConfig:
    """Return the config's model at another size, as it is from scratch, with reference counts."""
    model = grid.scaled(self.base.model, self.family.scale, factor, '--sizes')
    return complete(dataclasses.replace(self.base, model=model)).model

  def grown_models(self) -> list[ModelConfig]:
    """Return the model of each size, grown from that of the size before it."""
    family, grow = self.family, self.base.grow
    models = [self.model(family.sizes[0])]
    for factor in family.sizes[1:]:
      wanted = self.model(factor)
      if family.scale == 'tokens':
        wanted = grown_model(models[-1], config_lib.token_counts(wanted), grow)
      growth_plan.check(models[-1], wanted, grow)
      models.append(wanted)
    return models

  def config(self, factor: float, model: ModelConfig, **train: Any) -> Config:
    """Return the config of a run from scratch; `train` has values of its section `train`."""
    rate = float(f'{self.base.optim.learning_rate * factor**self.family.rate_power:.6g}')
    optim = dataclasses.replace(self.optim, learning_rate=rate)
    config = dataclasses.replace(self.base, model=model, optim=optim, grow=GrowConfig())
    return grid.with_train(config, **train)

  def constant(self, config: Config, steps: int) -> Config:
    """Return a config whose rate stays constant after the warm-up."""
    stable, _ = grid.stable_and_decay(config.optim)
    return grid.with_train(dataclasses.replace(config, optim=stable), steps=steps)

  def decayed(self, config: Config, end: int, begin: int) -> Config:
    """Return a config whose rate decays from step `begin` to step `end`."""
    _, decay = grid.stable_and_decay(config.optim)
    return grid.with_train(dataclasses.replace(config, optim=decay), steps=end, decay_from=begin)

  def starting(self, config: Config, source: str) -> Config:
    """Return a config that starts from a run, NAME@STEP."""
    return dataclasses.replace(config, init_from=f'{self.out}/{source}')

  def taught(self, config: Config, teacher: str) -> Config:
    """Return a config that learns from a run, NAME@STEP, if the family has a teacher."""
    if not (weight := self.family.distill_weight):
      return config
    source = f'{self.out}/{teacher}'
    distill = dataclasses.replace(config.distill, teacher=source, weight=weight)
    return dataclasses.replace(config, distill=distill)

  def job(
    self,
    name: str,
    config: Config,
    stage: str,
    factor: float,
    *,
    teacher: ModelConfig | None = None,
    **fields: Any,
  ) -> Job:
    """Return a job; `teacher` is the model that the run learns from, if it has one."""
    size = measure_size(complete(config))
    if teacher is not None and config.distill.teacher:
      forward = flops.forward_flops(teacher, config.data.sequence_length)
      size = dataclasses.replace(size, flops_per_token=size.flops_per_token + forward)
    return Job(name, config, size, stage, factor=factor, **fields)

  def scratch(self, factor: float) -> Job:
    """Return the run that trains one size from scratch, which several methods share."""
    config = self.config(factor, self.model(factor), steps=self.end)
    _check_decay(self.decay_begin, config.optim, '--tokens')
    return self.job(f'scratch/size_{factor:g}', config, 'scratch', factor, final=True)


def _check_decay(begin: int, optim: OptimConfig, flag: str) -> None:
  """Check that a decay begins after the warm-up; `flag` makes the run longer."""
  if begin <= optim.warmup_steps:
    raise UserError(
      f'{flag} makes a run whose rate would decay from step {begin} on, within its warm-up of '
      f'config.optim.warmup_steps={optim.warmup_steps}; raise {flag}, or shorten the warm-up'
    )


def _apart(maker: _Maker) -> list[Job]:
  return [maker.scratch(factor) for factor in maker.family.sizes]


def _growth_steps(maker: _Maker) -> list[int]:
  """Return the step of each growth."""
  family, growths = maker.family, len(maker.family.sizes) - 1
  latest = min(LATEST_GROWTH, BEFORE_DECAY * maker.decay_begin / maker.end)
  shares = family.grow_at or [latest * i / growths for i in range(1, growths + 1)]
  if len(shares) != growths:
    raise UserError(
      f'--grow_at has {len(shares)} shares, and {len(family.sizes)} sizes have {growths} growths; '
      'give one for each'
    )
  steps = [round(share * maker.end) for share in shares]
  warmup, begin = maker.optim.warmup_steps, maker.decay_begin
  for share, before, step in zip(shares, [warmup, *steps], steps, strict=False):
    where = f'--grow_at has {share:.3g}, which is step {step} of {maker.end}'
    if step <= before:
      after = 'the warm-up' if before == warmup else 'the growth before'
      raise UserError(
        f'{where}, and {after} ends at step {before}; give rising shares, or more --tokens'
      )
    if step >= begin:
      raise UserError(f'{where}, and the rate decays from step {begin} on; grow earlier')
  return steps


def _bottom_up(maker: _Maker) -> list[Job]:
  _check_decay(maker.decay_begin, maker.optim, '--tokens')
  jobs: list[Job] = []
  source, first = '', 0
  sizes_of = zip(
    maker.family.sizes, maker.grown_models(), [*_growth_steps(maker), maker.end], strict=True
  )
  for factor, model, step in sizes_of:
    folder, own = f'bottom_up/size_{factor:g}', maker.config(factor, model)
    begun, stage, needs = own, 'trunk', ()
    if source:  # The run begins with a growth.
      begun = dataclasses.replace(own, grow=maker.base.grow)
      begun, stage, needs = maker.starting(begun, f'{source}@{first}'), 'grow', (source,)
    if step < maker.end:
      trunk = maker.constant(begun, step)
      jobs.append(maker.job(f'{folder}/trunk', trunk, stage, factor, first=first, needs=needs))
      source, first = f'{folder}/trunk', step
      begun, stage, needs = maker.starting(own, f'{source}@{step}'), 'branch', (source,)
    final = maker.decayed(begun, maker.end, maker.decay_begin)
    jobs.append(
      maker.job(f'{folder}/final', final, stage, factor, first=first, needs=needs, final=True)
    )
  return jobs


def _top_down(maker: _Maker) -> list[Job]:
  family, whole = maker.family, maker.scratch(maker.family.sizes[-1])
  large, teacher = maker.model(family.sizes[-1]), f'{whole.name}@{maker.end}'
  steps = max(1, round(family.share * maker.end))
  begin = grid.decay_begin(maker.optim, steps)
  _check_decay(begin, maker.optim, '--share')
  jobs = [whole]
  for factor in reversed(family.sizes[:-1]):
    folder, counts = f'top_down/size_{factor:g}', config_lib.token_counts(maker.model(factor))
    model = grown_model(large, counts, config_lib.growth('zero_keys', **_SHRUNKEN))
    arguments = {'param_tokens': counts, 'examples': _EXAMPLES, **_SHRUNKEN}
    name = f'{folder}/shrunk'
    action = Action('shrink', teacher, arguments)
    shrunk = maker.config(factor, model, steps=0)
    jobs.append(maker.job(name, shrunk, 'shrink', factor, needs=(whole.name,), action=action))
    own = maker.starting(maker.config(factor, model), f'{name}@0')
    own = maker.taught(maker.decayed(own, steps, begin), teacher)
    stage, needs = 'distill' if family.distill_weight else 'branch', (name, whole.name)
    jobs.append(
      maker.job(f'{folder}/final', own, stage, factor, teacher=large, needs=needs, final=True)
    )
  return jobs


def _elastic(maker: _Maker) -> list[Job]:
  family, factor = maker.family, maker.family.sizes[-1]
  *smaller, model = maker.grown_models()
  every = _NESTED_ROWS * (groups_lib.most_groups(model) - 1)
  rows = maker.base.data.batch_size // maker.base.optim.accumulation_steps
  if rows % every:
    raise UserError(
      f'--method=elastic trains smaller sizes with some of every {every} rows, and '
      f'config.data.batch_size / optim.accumulation_steps is {rows}; make it a multiple of {every}'
    )
  own = maker.config(factor, model, steps=maker.end, nested_rows=every)
  _check_decay(maker.decay_begin, own.optim, '--tokens')
  whole = f'elastic/size_{factor:g}'
  jobs = [maker.job(whole, own, 'elastic', factor, final=True)]
  for size, prefix in zip(family.sizes, smaller, strict=False):
    groups = groups_lib.most_groups(prefix)
    if groups_lib.choose(model, groups_lib.first(groups)) != prefix:
      raise UserError(
        '--method=elastic takes the first groups of each projection, and those of the config have '
        'different numbers of groups; give them as many'
      )
    action = Action('slice', f'{whole}@{maker.end}', {'groups': groups})
    sliced = maker.config(size, prefix, steps=maker.end)
    fields = {'first': maker.end, 'needs': (whole,), 'final': True, 'action': action}
    jobs.append(maker.job(f'elastic/size_{size:g}', sliced, 'slice', size, **fields))
  return jobs


METHODS = {
  'bottom_up': _bottom_up,
  'top_down': _top_down,
  'elastic': _elastic,
  'apart': _apart,
}
