"""Grow a whole training state by a pure function; check a growth, and say whether it is exact."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  GrowConfig,
  ModelConfig,
  PattentionConfig,
  TokenGroup,
  pattentions,
  token_groups,
  with_groups,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import tokens, widen
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params
from tokenformer_jax.runs.checkpoint_meta import Lineage, changes_of_tokens
from tokenformer_jax.steps import optim
from tokenformer_jax.steps.step import State

TOKEN_METHODS = ('group', 'zero_keys', 'duplicate', 'random')
_COPYING = ('duplicate', 'net2net', 'hypercloning')


class ByArray(Protocol):
  """A growth, array by array."""

  def param(self, path: tokens.Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    """Return the parameter at `path` after growth; for the salt see `tokens.drawing_key`."""

  def moment(self, path: tokens.Path, old: jax.Array, order: int) -> jax.Array:
    """Return Adam's moment of order 1 or 2 of that parameter."""


def grown_model(model: ModelConfig, counts: Mapping[str, int], config: GrowConfig) -> ModelConfig:
  """Return the model with other counts, and the reference counts that `config.scale` makes.

  `resize` multiplies them by the factor of the counts, so that a model that never kept its scale
  has τ = √N. The method `group` puts new tokens into a group of their own; the others put them into
  the last group. Fewer tokens are taken from all groups alike.

  Args:
    model: with all reference counts filled in.
    counts: numbers of parameter tokens by the names of `config.pattentions`; others stay.
    config: has the scale and the method.
  """
  resize = (config.scale or _own_scale(config.method)) == 'resize'

  def grown(old: PattentionConfig, count: int) -> PattentionConfig:
    before = token_groups(old)
    if count > old.tokens and config.method == 'group':
      added = count - old.tokens
      return with_groups(old, (*before, TokenGroup(added, added)))
    sizes = _sizes([group.tokens for group in before], count)
    return with_groups(
      old,
      (
        TokenGroup(size, round(one.reference * size / one.tokens) if resize else one.reference)
        for one, size in zip(before, sizes, strict=True)
      ),
    )

  old = pattentions(model)
  new = {name: grown(one, counts.get(name, one.tokens)) for name, one in old.items()}
  return config_lib.with_pattentions(model, new)


def _sizes(groups: Sequence[int], count: int) -> list[int]:
  """Return the sizes of groups with another number of tokens in all, at least 1 of each group."""
  total = sum(groups)
  if count >= total:
    return [*groups[:-1], groups[-1] + count - total]
  sizes = [max(1, size * count // total) for size in groups]
  by_loss = sorted(range(len(groups)), key=lambda i: sizes[i] / groups[i])
  for i in by_loss[: max(0, count - sum(sizes))]:
    sizes[i] += 1
  return sizes


def _own_scale(method: str) -> str:
  return 'resize' if method in ('duplicate', 'random') else 'keep'


def check(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> None:
  """Check that the growth can be made.

  Raises:
    UserError: the method is for other models, a count becomes smaller, the method cannot change a
      key that differs, or new tokens could never learn.
  """
  if source != target:
    check_method(source, config.method)
  by_tokens = config.method in TOKEN_METHODS
  changes = ('tokens', 'reference', 'groups') if by_tokens else ('width', 'heads')
  for path, new, old in config_lib.differences(target, source, 'model.'):
    if path.rpartition('.')[2] not in changes:
      raise UserError(
        f'{path} is {old!r} in the source and {new!r} in the target; growth by {config.method} '
        f'changes {", ".join(changes[:-1])} and {changes[-1]} only'
      )
  if not 0 <= config.noise < math.inf:
    raise UserError(f'noise is {config.noise}; it must be a finite number and not negative')
  copies = config.method in _COPYING or config.new_keys == 'copies'
  if config.noise and not copies:
    raise UserError(
      f'noise is for the methods that copy ({", ".join(_COPYING)}) and for new_keys=copies, and '
      f'{config.method} copies nothing; set it to 0'
    )
  if config.new_values == 'zero' and config.method not in ('group', 'zero_keys', 'random'):
    raise UserError(
      f'new_values=zero is for new tokens, which {config.method} does not draw; leave it out'
    )
  if config.new_keys != 'init' and config.method not in ('group', 'random'):
    raise UserError(
      f'new_keys={config.new_keys} is for keys that group or random draw, and not for '
      f'{config.method}; set it to init'
    )
  if not by_tokens:
    widen.check(source, target, config.method)
    return
  larger = config_lib.token_counts(target)
  for name, old in config_lib.token_counts(source).items():
    new = larger[name]
    if new < old:
      raise UserError(
        f'{name} has {old} parameter tokens in the source, and {new} are fewer; growth only adds '
        '(python -m tokenformer_jax.grow shrink drops the least important ones)'
      )
    if config.method == 'duplicate' and new % old:
      raise UserError(
        f'{name}={new} is not a multiple of the {old} parameter tokens that the source has; '
        f'duplicate copies every token as often as the others: take '
        f'{old * max(2, round(new / old))}, or method=zero_keys'
      )
    _check_groups(name, pattentions(source)[name], pattentions(target)[name], config.method)
  if config.method == 'zero_keys' and config.new_values == 'zero':
    raise UserError(
      'new tokens whose keys and values are both zero are dead: both gradients are zero for ever, '
      'so they would never learn; use new_values=init'
    )


def _check_groups(name: str, old: PattentionConfig, new: PattentionConfig, method: str) -> None:
  """Check that a method makes the groups of a larger projection from those of the old one."""
  before, after = token_groups(old), token_groups(new)
  if method == 'duplicate' and len(before) > 1 and new.tokens > old.tokens:
    raise UserError(
      f'{name} has {len(before)} groups of tokens, and duplicate copies those of one group only; '
      'use method=group'
    )
  kept = len(before) if method == 'group' else len(before) - 1
  extra = len(after) - len(before)
  sizes = [[group.tokens for group in groups[:kept]] for groups in (before, after)]
  if sizes[0] != sizes[1] or (extra and method != 'group'):
    raise UserError(
      f'{name} has the groups {with_groups(old, before).groups or old.tokens!r} in the source and '
      f'{with_groups(new, after).groups or new.tokens!r} in the target; growth by {method} '
      + ('adds groups behind them' if method == 'group' else 'adds tokens to the last group')
    )


def inexact(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> str | None:
  """Return why the grown model will not compute what the source does, or None if it will."""
  if source == target:
    return None
  if config.noise and config.method in _COPYING:
    return f'noise={config.noise} is added to what is copied'
  if config.method == 'net2net_fill':
    return 'the new blocks add to every output'
  if config.method not in TOKEN_METHODS:
    return None
  if config.method == 'random':
    return 'the scores of random keys enter the norm of every row, and their values the output'
  larger = pattentions(target)
  reasons = (
    tokens.inexact(name, old, larger[name], config) for name, old in pattentions(source).items()
  )
  return next(filter(None, reasons), None)


def check_method(model: ModelConfig, method: str) -> None:
  """Check that a method is for models with parameter tokens, or without, like this one.

  Raises:
    UserError: it is not.
  """
  if method in TOKEN_METHODS:
    if not pattentions(model):
      raise UserError(
        f'method {method} adds parameter tokens, and this model has none; choose net2net, '
        'net2net_fill or hypercloning'
      )
  elif pattentions(model):
    raise UserError(
      f'method {method} is for Transformers, and this model has parameter tokens; choose '
      f'{", ".join(TOKEN_METHODS)}'
    )


def by_array(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> ByArray:
  """Return the growth from one model to another, array by array; `check` has passed."""
  definition = models.define(source)
  if config.method == 'net2net_fill':
    return widen.FilledBlocks(models.define(target), config)
  if config.method not in TOKEN_METHODS:
    return widen.CopiedUnits(definition.info, source, target, config)
  before = config_lib.token_counts(source)
  new = {name: count - before[name] for name, count in config_lib.token_counts(target).items()}
  added = config_lib.with_token_counts(target, new)
  old, all_ = tokens.counts(definition), tokens.counts(models.define(target))
  copies = {
    path: tokens.lookup(all_, path) // max(1, count)
    for path, count in jax.tree_util.tree_flatten_with_path(old)[0]
  }
  return tokens.MoreTokens(models.define(added), copies, config)


ToArray = Callable[[tokens.Path, jax.Array, jax.Array], jax.Array]


def map_arrays(f: ToArray, tree: Params) -> Params:
  """Map a function of path, array and salt over a tree of parameters."""
  return jax.tree.map_with_path(lambda path, old: f(path, old, tokens.drawing_salt(path)), tree)


def grow(
  state: State,
  source: ModelConfig,
  target: ModelConfig,
  config: GrowConfig,
  map_arrays: Callable[[ToArray, Params], Params] = map_arrays,
) -> State:
  """Grow a state: parameters, moments and counters.

  The function is pure. Under jit with the target's shardings (`step.state_shardings`), no host or
  device ever holds more than its part. New arrays do not depend on each other:
  `files.read_and_grow` makes one after the other.

  Args:
    state: from a run of the source model (see `step.initial_state`), with any optimizer settings.
    source: the model of the state.
    target: the larger model, see `grown_model`; `check` has passed.
    config: the method, and how to treat moments and counters.
    map_arrays: does what the function `map_arrays` does.

  Returns:
    The state, with the optimizer's structure unchanged.
  """
  arrays = by_array(source, target, config)

  def moments(order: int, tree: Params) -> Params:
    def moment(path: tokens.Path, old: jax.Array, salt: jax.Array) -> jax.Array:
      del salt  # nothing is drawn
      new = arrays.moment(path, old, order)
      return jnp.zeros_like(new) if config.moments == 'drop' else new

    return map_arrays(moment, tree)

  return map_trees(state, config, functools.partial(map_arrays, arrays.param), moments)


def map_trees(
  state: State,
  config: GrowConfig,
  of_params: Callable[[Params], Params],
  of_moments: Callable[[int, Params], Params],
) -> State:
  """Map the parameters of a state and its moments (with their order), and set the counters."""
  known = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
  restart = config.step == 'restart'

  def optimizer_part(part: Any) -> Any:
    if isinstance(part, optax.ScaleByAdamState):
      return optax.ScaleByAdamState(
        count=jnp.zeros_like(part.count) if config.moments == 'drop' else part.count,
        mu=of_moments(1, part.mu),
        nu=of_moments(2, part.nu),
      )
    return jax.tree.map(jnp.zeros_like, part) if restart else part  # the count of the schedule

  of_models = ('params', 'ema')  # the parameters, and their average if the run keeps one
  counters = {k: value for k, value in state.items() if k not in (*of_models, 'opt_state')}
  return {
    **{name: of_params(state[name]) for name in of_models if name in state},
    'opt_state': jax.tree.map(
      optimizer_part, state['opt_state'], is_leaf=lambda part: isinstance(part, known)
    ),
    **(jax.tree.map(jnp.zeros_like, counters) if restart else counters),
  }


def last_growth(lineage: Lineage, model: ModelConfig) -> optim.LastGrowth | None:
  """Return what the optimizer must know about the last growth; None if there is no lineage."""
  if not (lineage := changes_of_tokens(lineage)):
    return None
  last = lineage[-1]
  old = models.define(last.model if last.action in ('grow', 'merge') else model)
  return optim.LastGrowth(last.updates, tokens.counts(old))
