"""Make the configs of a grid of sizes and lengths from one config."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  Config,
  ConstantSchedule,
  GatedUnitConfig,
  LayerConfig,
  LinearConfig,
  MLPConfig,
  ModelConfig,
  OptimConfig,
  PattentionConfig,
  SoftmaxConfig,
  TokenGroup,
  WSDSchedule,
  as_wsd,
  from_groups,
  map_parts,
)
from tokenformer_jax.config.pattern import Repeat, as_text
from tokenformer_jax.errors import UserError
from tokenformer_jax.laws.runs import Size, check_loss, measure_size
from tokenformer_jax.resolve.facts import complete

_MOST = 2**31  # of any number in a config


@dataclasses.dataclass(frozen=True)
class Job:
  """One run of a grid, or one stretch of a stable run."""

  name: str  # its work directory, below that of the grid
  config: Config  # sizes that it leaves open are still open
  size: Size
  # `stable`, a stretch of the run whose rate stays constant; or `branch`, the decay from it.
  stage: str
  first: int = 0  # the step that it starts from

  @property
  def steps(self) -> int:
    """The number of steps that this job makes itself."""
    return self.config.train.steps - self.first

  @property
  def tokens(self) -> int:
    """The number of tokens that the model has seen at its end."""
    return self.config.train.steps * self.config.data.units_per_step

  @property
  def flops(self) -> float:
    """The model FLOPs of the steps that this job makes."""
    return self.steps * self.config.data.units_per_step * self.size.flops_per_token


@dataclasses.dataclass(frozen=True)
class Grid:
  """A grid of runs: the product of sizes and lengths."""

  scale: str  # the sizes that a factor multiplies: see `scaled`
  factors: Sequence[float]  # of the size of the config's model
  lengths: Sequence[int]  # in tokens
  rate_power: float = 0.0  # p; the learning rate of a size is the config's times factor^p


def jobs(config: Config, grid: Grid, out: str) -> list[Job]:
  """Return the jobs of a grid in the directory `out`, each after the job that it starts from.

  The factors of the grid multiply the model of the config. All lengths of a size share one stable
  run and differ in their decays.
  """
  check_base(config, 'a law', '--lengths')
  made = []
  for factor in sorted(set(grid.factors)):
    model = scaled(config.model, grid.scale, factor)
    rate = config.optim.learning_rate * factor**grid.rate_power
    optim = dataclasses.replace(config.optim, learning_rate=rate)
    changed = dataclasses.replace(config, model=model, optim=optim)
    ends = [count_steps(changed, tokens, '--lengths') for tokens in sorted(set(grid.lengths))]
    made += _size_jobs(changed, f'{grid.scale}_{factor:g}', ends, out)
  return made


def count_steps(config: Config, tokens: int, flag: str) -> int:
  """Return the number of steps of a run, given its length in tokens, which `flag` says."""
  of_step = config.data.units_per_step
  steps = round(tokens / of_step)
  if steps >= _MOST:
    raise UserError(
      f'{flag} has {tokens:g}, which is {steps:,} steps of {of_step:,} tokens; a '
      f'run has less than {_MOST:,} steps, so ask for a shorter length or a larger batch'
    )
  return steps


def _size_jobs(config: Config, folder: str, ends: list[int], out: str) -> list[Job]:
  """Return the stretches of the stable run, each followed by the decay that starts at its end."""
  size = measure_size(complete(config))
  constant, decay = stable_and_decay(config.optim)
  made, first, of_step = [], 0, config.data.units_per_step
  for end in ends:
    begin = decay_begin(config.optim, end)
    if begin <= max(first, config.optim.warmup_steps):
      raise UserError(
        f'--lengths has {end * of_step:,} tokens, {end} steps, whose decay would begin at step '
        f'{begin}, within the warm-up or where that of the length before begins; '
        'take a longer or more distant length'
      )
    stable = with_train(
      dataclasses.replace(config, optim=constant),
      steps=begin,
      # Branches need a checkpoint at the end of each stretch only.
      checkpoint_every=10**9,
      keep_checkpoints=max(len(ends), config.train.keep_checkpoints),
      eval_every=0,
    )
    made.append(Job(f'{folder}/stable', stable, size, 'stable', first))
    branch = dataclasses.replace(
      with_train(config, steps=end, decay_from=begin, keep_checkpoints=1, eval_every=0),
      optim=decay,
      init_from=f'{out}/{folder}/stable@{begin}',
    )
    name = f'{folder}/{end * of_step}'
    made.append(Job(name, branch, size, 'branch', begin))
    first = begin
  return made


def stable_and_decay(optim: OptimConfig) -> tuple[OptimConfig, OptimConfig]:
  """Return the settings of a run at a constant rate, and of a decay from one of its checkpoints."""
  share = WSDSchedule().decay_share
  wsd = dataclasses.replace(as_wsd(optim.schedule), decay_share=share)
  stable = dataclasses.replace(optim, schedule=ConstantSchedule())
  return stable, dataclasses.replace(optim, schedule=wsd)


def decay_begin(optim: OptimConfig, end: int) -> int:
  """Return the step at which the rate of a run of `end` steps begins to decay."""
  return end - max(1, round(as_wsd(optim.schedule).decay_share * end))


def with_train(config: Config, **changes: Any) -> Config:
  """Return a config with other values in its section `train`."""
  return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def check_base(config: Config, what: str, flag: str) -> None:
  """Check that runs of other sizes and lengths can be made of a config.

  Args:
    config: the config.
    what: the purpose of the runs, for messages, such as `a law`.
    flag: the flag that says how long the runs are.
  """
  check_loss(config, 'the config', what, 'give one of text or conversations')
  if config.init_from:
    raise UserError(
      f'config.init_from is {config.init_from!r}; the runs of {what} start from new parameters, so '
      'leave it out'
    )
  if config.train.epochs or config.train.examples or config.train.decay_from:
    raise UserError(
      'config.train.epochs, config.train.examples and config.train.decay_from have no meaning '
      f'here, because {flag} says how long the runs are; leave them out'
    )
  if config.data.has_stages:
    raise UserError(
      'config.data.batch_size_by_step and sequence_length_by_step change batches over steps, and '
      f"{flag} counts steps of one size; set them to ''"
    )
  if config.train.nested_rows:
    raise UserError(
      f'config.train.nested_rows trains several sizes at once, and the runs of {what} have one '
      'size each; set it to 0'
    )


class _Factor(NamedTuple):
  """A factor of sizes."""

  value: float
  flag: str  # which says it

  def times(self, number: int, name: str) -> int:
    """Return a product, which must be a whole number of at least 1."""
    product = number * Fraction(self.value).limit_denominator(10**4)
    if product >= _MOST:
      raise UserError(
        f'{self.flag} has {self.value:g}, which makes {float(product):g} of {name}={number}; a '
        f'size must be less than {_MOST:,}'
      )
    if product.denominator != 1 or product < 1:
      raise UserError(
        f'{self.flag} has {self.value:g}, which makes {float(product):g} of {name}={number}; it '
        'must make a whole number of at least 1 of every size'
      )
    return int(product)


def scaled(model: ModelConfig, scale: str, factor: float, flag: str = '--factors') -> ModelConfig:
  """Return a model with the sizes that `scale` names multiplied by a factor, which `flag` says.

  `width` multiplies the width, the heads (whose own width stays), the widths inside layers and the
  parameter tokens; `tokens` multiplies the parameter tokens alone; `layers` the number of layers.
  Every group of parameter tokens is multiplied, its τ² like its tokens.
  """
  by = _Factor(factor, flag)
  if scale == 'layers':
    layers = by.times(model.depth, f'model.pattern={model.pattern!r} layers')
    (row, _, tied), *others = model.repeats
    if others or layers % len(row):
      raise UserError(
        f'--scale=layers cannot multiply the pattern {model.pattern!r} by {factor:g}; it needs one '
        'row of layers, whole times'
      )
    return dataclasses.replace(model, pattern=as_text([Repeat(row, layers // len(row), tied)]))
  tokens = {
    name: _more_tokens(projection, by, name)
    for name, projection in config_lib.pattentions(model).items()
  }
  if scale == 'tokens':
    if not tokens:
      raise UserError(
        '--scale=tokens multiplies parameter tokens, and this model is a Transformer; use another '
        '--scale'
      )
    return config_lib.with_pattentions(model, tokens)
  wider = model.map_layers(lambda _, layer: _wider(layer, by))
  wider = dataclasses.replace(wider, width=by.times(model.width, 'width'))
  return config_lib.with_pattentions(wider, tokens)


def _more_tokens(config: PattentionConfig, by: _Factor, name: str) -> PattentionConfig:
  """Return a projection with each group of tokens, and its τ², multiplied by a factor."""
  if not all(group.reference for group in config.groups):
    return dataclasses.replace(config, tokens=by.times(config.tokens, f'{name}.tokens'))
  groups = []
  for number, group in enumerate(config.groups, start=1):
    path = f'{name}.tokens of group {number}' if len(config.groups) > 1 else f'{name}.tokens'
    reference = max(1, round(group.reference * by.value))
    tokens = by.times(group.tokens, path)
    groups.append(TokenGroup(tokens, reference, group.score))
  return from_groups(groups)


def _wider(layer: LayerConfig, by: _Factor) -> LayerConfig:
  """Return a layer with more or fewer heads, and other widths inside."""

  def change(path: str, section: Any) -> Any:
    if isinstance(section, SoftmaxConfig | LinearConfig):
      section = dataclasses.replace(section, heads=by.times(section.heads, f'{path}.heads'))
    if isinstance(section, SoftmaxConfig) and section.kv_heads:
      kv_heads = by.times(section.kv_heads, f'{path}.kv_heads')
      section = dataclasses.replace(section, kv_heads=kv_heads)
    if isinstance(section, GatedUnitConfig | MLPConfig) and section.width:
      return dataclasses.replace(section, width=by.times(section.width, f'{path}.width'))
    return section

  return map_parts(layer, change)
