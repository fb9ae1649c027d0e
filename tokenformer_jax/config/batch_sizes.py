"""Read and check the sizes of batches over steps: `data.batch_size_by_step` and its like for T."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from tokenformer_jax.config.data import DataConfig, TextConfig
from tokenformer_jax.config.mixture import shares
from tokenformer_jax.config.points import parse
from tokenformer_jax.config.run import Config
from tokenformer_jax.errors import UserError


class Stage(NamedTuple):
  """The batches of the steps after `first`, until the next stage."""

  first: int  # the number of steps before them
  batch_size: int
  sequence_length: int


def stages(data: DataConfig) -> tuple[Stage, ...]:
  """Return the stages of a run: steps whose batches have one size. The first begins at step 0."""
  rows, lengths = _points(data, 'batch_size'), _points(data, 'sequence_length')
  _check_lengths(data, lengths)
  changes: list[Stage] = []
  for step in sorted({*rows, *lengths}):
    stage = Stage(
      step, *(points[max(s for s in points if s <= step)] for points in (rows, lengths))
    )
    if not changes or stage[1:] != changes[-1][1:]:
      changes.append(stage)
  return tuple(changes)


def stages_after(data: DataConfig, step: int) -> tuple[Stage, ...]:
  """Return the stages of the steps after one; the first of them begins there."""
  every = stages(data)
  begun = sum(stage.first <= step for stage in every)
  return (every[begun - 1]._replace(first=step), *every[begun:])


def at_stage(data: DataConfig, stage: Stage) -> DataConfig:
  """Return the config of a stage's data as that of a run without other stages."""
  data = dataclasses.replace(data, batch_size=stage.batch_size, batch_size_by_step='')
  if not isinstance(data, TextConfig):
    return data
  return dataclasses.replace(
    data, sequence_length=stage.sequence_length, sequence_length_by_step=''
  )


def _points(data: DataConfig, name: str) -> dict[int, int]:
  """Return the values of a key by the step from which each counts; a fixed one is at step 0."""
  path, text = f'config.data.{name}_by_step', getattr(data, f'{name}_by_step')
  if not text:
    return {0: getattr(data, name)}
  points = parse(text, path, int, '0:512 9000:2048')
  if 0 not in points:
    mistake = 'it says nothing about the first steps; begin it with 0:NUMBER'
  elif min(points.values()) < 1:
    mistake = 'every number must be greater than 0'
  else:
    return points
  raise UserError(f'{path} is {text!r}; {mistake}')


def _check_lengths(data: DataConfig, lengths: dict[int, int]) -> None:
  """Check that every length is a part of `data.sequence_length`, and the longest is all of it."""
  setting = f'config.data.sequence_length_by_step is {data.sequence_length_by_step!r}'
  longest = max(lengths.values())
  if longest != data.sequence_length:
    raise UserError(
      f'{setting} and config.data.sequence_length is {data.sequence_length}, which must be the '
      f'longest of them, because the model and evaluations have it; set it to {longest}'
    )
  if len({*lengths.values()}) > 1 and data.packing != 'cut':
    raise UserError(
      f'{setting}, and config.data.packing={data.packing} fills sequences of one length; leave out '
      'one of them'
    )
  for length in lengths.values():
    if longest % length:
      raise UserError(
        f'{setting}, and {length} does not divide {longest}; take a divisor, so that sequences are '
        'cut into equal ones'
      )


def check(config: Config, check_sizes: Callable[[Config], None]) -> None:
  """Check every stage by `check_sizes`, as the config of a whole run."""
  for stage in stages(config.data):
    try:
      check_sizes(dataclasses.replace(config, data=at_stage(config.data, stage)))
    except UserError as error:
      raise UserError(f'in the stage of config.data after step {stage.first}, {error}') from error
  _check_weights(config.data)


def _check_weights(data: DataConfig) -> None:
  """Check that the order of a mixture whose weights change over steps does not need the stages."""
  if not data.mixture or len(shares(data.mixture).steps) == 1:
    return
  tokens = [stage.batch_size * stage.sequence_length for stage in stages(data)]
  if len(set(tokens)) > 1 or tokens[0] % data.sequence_length:
    raise UserError(
      'the weights of config.data.mixture change over steps, so every step needs as many tokens, a '
      f'multiple of config.data.sequence_length={data.sequence_length}, and the stages of '
      f'config.data have {", ".join(map(str, tokens))}; change the sizes, or give fixed weights'
    )
