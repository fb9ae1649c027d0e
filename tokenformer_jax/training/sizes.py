"""Fill in sizes that a config leaves open, and convert lengths to steps."""

import dataclasses
import math

from tokenformer_jax import config as config_lib
from tokenformer_jax import tasks
from tokenformer_jax.config import (
  Config,
  DataConfig,
  GrowConfig,
  ModelConfig,
  pattentions,
  stages_after,
  token_counts,
)
from tokenformer_jax.config.groups import with_records_of
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.data.order import BEGINNING, Position
from tokenformer_jax.training.origin import FROM_SCRATCH, Origin


def fill_in(config: Config, origin: Origin = FROM_SCRATCH) -> Config:
  """Replace zeros, which mean "make it fit", in reference counts and the sizes of the task."""
  task = tasks.task_class(config.model)
  # A model of another kind is refused later.
  trained = origin.model if isinstance(origin.model, type(config.model)) else None
  model = task.fill_in(config, trained, resumed=origin.own is not None)
  return dataclasses.replace(config, model=with_references(model, config.grow, origin))


def with_references(model: ModelConfig, how: GrowConfig, origin: Origin) -> ModelConfig:
  """Replace zero reference counts by those of the origin, grown if `how` says so."""
  source = origin.model
  if source is None:
    return config_lib.with_references(model)
  old = grown = pattentions(source)
  if not old.keys() <= pattentions(model).keys():
    old = grown = {}
  elif old and origin.own is None:
    grown = pattentions(grown_model(source, token_counts(model), how))
  return with_records_of(config_lib.with_references(model, old, grown), source)


def in_steps(config: Config, examples: int, position: Position = BEGINNING) -> Config:
  """Return the config with lengths in epochs or examples converted to steps.

  `examples` is the number in an epoch. The examples before `position` count as seen.
  """
  data, train, optim = config.data, config.train, config.optim
  steps, warmup_steps = train.steps, optim.warmup_steps
  if train.epochs or train.examples:
    steps = steps_to(data, train.examples or train.epochs * examples, position)
  if optim.warmup_epochs:
    warmup_steps = steps_to(data, optim.warmup_epochs * examples)
  return dataclasses.replace(
    config,
    train=dataclasses.replace(train, steps=steps, epochs=0.0, examples=0),
    optim=dataclasses.replace(optim, warmup_steps=warmup_steps, warmup_epochs=0.0),
  )


def steps_to(data: DataConfig, examples: float, position: Position = BEGINNING) -> int:
  """Return the step at which a run from a position has seen so many examples of the order.

  In a stage of shorter sequences, a sequence is a part of an example.
  """
  stages = stages_after(data, position.step)
  ends, length = [*(stage.first for stage in stages[1:]), math.inf], stages[0].sequence_length
  for stage, end in zip(stages, ends, strict=True):
    position = position.in_length(length, stage.sequence_length)
    samples = examples * (data.sequence_length // stage.sequence_length)
    steps = math.ceil((samples - position.sample) / stage.batch_size)
    if stage.first + steps <= end:
      return stage.first + steps
    position = Position(end, position.batch_start(end, stage.batch_size))
    length = stage.sequence_length
  raise AssertionError('the last stage has no end')
