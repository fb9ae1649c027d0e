"""Act on groups of parameter tokens, for the command `grow`: see `config/groups.py`."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from tokenformer_jax.config import GrowConfig, ModelConfig, pattentions
from tokenformer_jax.config.groups import (
  Choice,
  as_text,
  check_numbers,
  choose,
  choose_frozen,
  first,
  most_groups,
  without,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import actions, groups, parts, state
from tokenformer_jax.grow.actions import Source, Target
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.storage import paths


def table(source: str) -> str:
  """Return a table of the groups of a run, DIR or DIR@STEP: see `groups.render`.

  Raises:
    UserError: there is no such run, or its model has no parameter tokens.
  """
  directory, step = paths.split_source(source)
  checkpoints, meta = checkpoint.open_source(directory, step)
  with contextlib.closing(checkpoints):
    checkpoint.check_is_model(meta, directory)
  _check_has_tokens(meta.config.model)
  return groups.render(meta, directory)


def remove(
  source: Source, numbers: Sequence[int], config: GrowConfig, target: Target
) -> int | None:
  """Take groups out; those behind them get lower numbers.

  Args:
    source: the run.
    numbers: of the groups.
    config: how to treat moments and step.
    target: the place of the new run.

  Returns:
    The step of the new run; None after a dry run.

  Raises:
    UserError: there is no such group, or a projection would keep none.
  """
  _check(source.model, numbers)
  return _choose(source, without(numbers), 'remove', numbers, config, target)


def keep_first(source: Source, count: int, config: GrowConfig, target: Target) -> int | None:
  """Keep the first groups of each projection; for the arguments see `remove`.

  Raises:
    UserError: `count` is less than 1, or no projection has more groups.
  """
  model = source.model
  _check_has_tokens(model)
  most = most_groups(model)
  if most == 1:
    raise UserError(
      'every projection of this model has one group, so that there is nothing to take out'
    )
  if not 1 <= count < most:
    raise UserError(
      f'--groups is {count}, the number of groups to keep; it must be from 1 to {most - 1}'
    )
  gone = range(count + 1, most + 1)
  return _choose(source, first(count), 'slice', gone, config, target)


def _choose(
  source: Source,
  choice: Choice,
  action: str,
  gone: Sequence[int],
  config: GrowConfig,
  target: Target,
) -> int | None:
  model, optim = source.model, source.meta.config.optim
  after = choose(model, choice)

  def change(old: state.State) -> state.State:
    return parts.choose_groups(old, model, choice, config)

  frozen = choose_frozen(optim, model, choice)
  optim = dataclasses.replace(optim, frozen_groups=frozen)
  of, text = actions.MEASURED, as_text(gone)
  return actions.rewrite(source, after, change, action, config, target, of, optim, groups=text)


def scale(
  source: Source, numbers: Sequence[int], factor: float, config: GrowConfig, target: Target
) -> int | None:
  """Multiply the values of groups, in the parameters and their average; moments stay.

  Raises:
    UserError: there is no such group, or the factor is not finite.
  """
  _check(source.model, numbers)
  if not math.isfinite(factor):
    raise UserError(f'--factor is {factor}; it must be a finite number')

  def change(old: state.State) -> state.State:
    return parts.scale_groups(old, source.model, numbers, factor)

  marks = {'groups': as_text(numbers), 'factor': factor}
  of = actions.MEASURED
  return actions.rewrite(source, source.model, change, 'scale', config, target, of, **marks)


def freeze(
  source: Source, numbers: Sequence[int], config: GrowConfig, target: Target
) -> int | None:
  """Write a run that does not train the tokens of some groups, and trains those of all others.

  Raises:
    UserError: there is no such group.
  """
  _check_has_tokens(source.model)
  check_numbers(most_groups(source.model), numbers, '--groups')
  text = as_text(numbers)
  optim = dataclasses.replace(source.meta.config.optim, frozen_groups=text)
  return actions.rewrite(
    source, source.model, lambda old: old, 'freeze', config, target, range(0), optim, groups=text
  )


def _check(model: ModelConfig, numbers: Sequence[int]) -> None:
  _check_has_tokens(model)
  if not numbers:
    raise UserError('--groups is empty; name groups by their numbers, for example --groups=2,3')
  check_numbers(most_groups(model), numbers, '--groups')


def _check_has_tokens(model: ModelConfig) -> None:
  if not pattentions(model):
    raise UserError('this model is a Transformer, which has no groups of parameter tokens')
