"""The runs of a family as plain data: names, configs, sizes, tokens and FLOPs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenformer_jax.config import Config, GrowConfig, ModelConfig, OptimConfig, as_wsd
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws import grid
from tokenformer_jax.laws.runs import measure_size
from tokenformer_jax.model import flops
from tokenformer_jax.training import sizes

RATE_POWER = -0.75  # as for a growth: see `grow.plan.rate_factor`


@dataclasses.dataclass(frozen=True)
class Family:
  """The sizes that a user asks for, and how to make them.

  Attributes:
    sizes: rising factors of the size of the config's model.
    tokens: the length of the training of a size from scratch.
    way: `bottom_up`, `top_down`, `elastic` or `apart`: see `ways.py`.
    scale: the quantity that a factor multiplies, `tokens` or `layers`: see `grid.scaled`.
    grow_at: bottom-up, the share of the tokens before each growth; empty: evenly up to three
      quarters.
    share: top-down, the share of the tokens that a shrunken model learns from; elastic, the last
      share, in which prefixes train.
    drop_groups: elastic, the probability that a step of this share trains a prefix.
    distill_weight: top-down and elastic, the weight of the teacher's probabilities; 0: no teacher.
    examples: top-down, the sequences on which the importance of tokens is measured.
    rate_power: p; the learning rate of a size is the config's times factor^p.
  """

  sizes: Sequence[float]
  tokens: int
  way: str
  scale: str = 'tokens'
  grow_at: Sequence[float] = ()
  share: float = 0.25
  drop_groups: float = 0.5
  distill_weight: float = 0.25
  examples: int = 16
  rate_power: float = RATE_POWER

  @property
  def largest(self) -> float:
    """Return the factor of the largest size."""
    return self.sizes[-1]


@dataclasses.dataclass(frozen=True)
class Action:
  """An action of `grow` that makes a run from another one."""

  name: str  # of `grow.actions.ACTIONS`
  source: str  # the run and its step, NAME@STEP
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
  (final,) = (job.name for job in jobs if job.final and job.factor == factor)
  names, left = set(), [final]
  while left:
    name = left.pop()
    if name not in names:
      names.add(name)
      left += by_name[name].needs
  return [job for job in jobs if job.name in names]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The config of a family and the parts that all its ways share.

  Attributes:
    base: the user's config.
    family: the sizes and the way.
    end: the number of steps in which a size trains from scratch.
    out: the directory of the runs.
  """

  base: Config
  family: Family
  end: int
  out: str

  @property
  def optim(self) -> OptimConfig:
    return dataclasses.replace(self.base.optim, schedule=as_wsd(self.base.optim.schedule))

  @property
  def decay_begin(self) -> int:
    """Return the step at which the rate of a size from scratch begins to decay."""
    return grid.decay_begin(self.optim, self.end)

  def model(self, factor: float) -> ModelConfig:
    """Return the config's model at another size, as it is from scratch, with reference counts."""
    model = grid.scaled(self.base.model, self.family.scale, factor, '--sizes')
    return sizes.fill_in(dataclasses.replace(self.base, model=model)).model

  def config(self, factor: float, model: ModelConfig, **train: Any) -> Config:
    """Return the config of a run from scratch; `train` has values of its section `train`."""
    rate = float(f'{self.base.optim.learning_rate * factor**self.family.rate_power:.6g}')
    optim = dataclasses.replace(self.optim, learning_rate=rate)
    config = dataclasses.replace(self.base, model=model, optim=optim, grow=GrowConfig())
    return grid.with_train(config, **train)

  def continued(
    self, config: Config, source: str, step: int, *, end: int | None = None, begin: int = 0
  ) -> Config:
    """Return the config of a run that starts from a step of another run.

    Without an `end` the rate stays constant; else it decays from step `begin` to step `end`.
    """
    config = dataclasses.replace(config, init_from=f'{self.out}/{source}@{step}')
    if end is None:
      return constant(config)
    _, decay = grid.stable_and_decay(config.optim)
    return grid.with_train(dataclasses.replace(config, optim=decay), steps=end, decay_from=begin)

  def taught(self, config: Config, teacher: str) -> Config:
    """Return a config that learns from a run, DIR@STEP below `out`, if the family has a teacher."""
    weight = self.family.distill_weight
    if not weight:
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
    first: int = 0,
    needs: Sequence[str] = (),
    teacher: ModelConfig | None = None,
    final: bool = False,
    action: Action | None = None,
  ) -> Job:
    """Return a job; `teacher` is the model that the run learns from, if it has one."""
    size = measure_size(sizes.fill_in(config))
    if teacher is not None and config.distill.teacher:
      forward = flops.forward_flops(teacher, config.data.sequence_length)
      size = dataclasses.replace(size, flops_per_token=size.flops_per_token + forward)
    return Job(name, config, size, stage, first, factor, final, tuple(needs), action)

  def scratch(self, factor: float) -> Job:
    """Return the run that trains one size from scratch, which several ways share."""
    config = self.config(factor, self.model(factor), steps=self.end)
    check_decay(self.decay_begin, config.optim, '--tokens')
    return self.job(f'scratch/size_{factor:g}', config, 'scratch', factor, final=True)


def constant(config: Config) -> Config:
  """Return a config whose rate stays constant after the warm-up."""
  stable, _ = grid.stable_and_decay(config.optim)
  return dataclasses.replace(config, optim=stable)


def check_decay(begin: int, optim: OptimConfig, flag: str) -> None:
  """Check that a decay begins after the warm-up; `flag` makes the run longer.

  Raises:
    UserError: it does not.
  """
  if begin <= optim.warmup_steps:
    raise UserError(
      f'{flag} makes a run whose rate would decay from step {begin} on, within its warm-up of '
      f'config.optim.warmup_steps={optim.warmup_steps}; raise {flag}, or shorten the warm-up'
    )


Way = Callable[[Plan], list[Job]]
