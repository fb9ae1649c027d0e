"""Which growth it is, whether it is exact, and the pure function over a whole training state."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from tokenformer_jax.config import GrowConfig, ModelConfig, TokenCounts
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import tokens, widen
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params
from tokenformer_jax.model.pattention import ZERO_AT_ZERO
from tokenformer_jax.runs.checkpoint_meta import Lineage
from tokenformer_jax.steps import optim
from tokenformer_jax.steps.step import State

TOKEN_METHODS = ('zero_keys', 'duplicate', 'random')
_COPYING = ('duplicate', 'net2net', 'hypercloning')
KINDS = tuple(field.name for field in dataclasses.fields(TokenCounts))


class ByArray(Protocol):
  """A growth, array by array: from a path, an old array and its salt to the new one."""

  def param(self, path: tokens.Path, old: jax.Array, salt: jax.Array) -> jax.Array: ...

  def moment(self, path: tokens.Path, old: jax.Array, order: int) -> jax.Array: ...


def grown_model(model: ModelConfig, param_tokens: TokenCounts, config: GrowConfig) -> ModelConfig:
  """The larger model, with the reference counts that `config.scale` leaves or makes.

  `resize` has them grow as the counts do, so that a model that never kept its scale has τ = √N.
  """
  resize = (config.scale or _own_scale(config.method)) == 'resize'

  def reference(kind: str) -> int:
    old = getattr(model.reference_tokens, kind)
    factor = getattr(param_tokens, kind) / getattr(model.param_tokens, kind) if resize else 1
    return round(old * factor)

  references = TokenCounts(**{kind: reference(kind) for kind in KINDS})
  return dataclasses.replace(model, param_tokens=param_tokens, reference_tokens=references)


def _own_scale(method: str) -> str:
  return 'resize' if method in ('duplicate', 'random') else 'keep'


def check(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> None:
  """Checks that the growth can be made.

  Raises:
    UserError: a count becomes smaller, something else than the method changes would change, or new
      tokens could never learn.
  """
  by_tokens = config.method in TOKEN_METHODS
  changes = ('param_tokens', 'reference_tokens') if by_tokens else ('width', 'heads', 'ffn_width')
  for field in dataclasses.fields(ModelConfig):
    old, new = getattr(source, field.name), getattr(target, field.name)
    if field.compare and old != new and field.name not in changes:
      raise UserError(
        f'model.{field.name} is {old!r} in the source and {new!r} in the target; growth by '
        f'{config.method} changes {" and ".join(changes)} only'
      )
  if by_tokens != (source.projection == 'pattention') and source != target:
    raise UserError(
      f'method {config.method} is for models with projection='
      f'{"pattention" if by_tokens else "dense"}, and this one has {source.projection}; choose '
      f'{"net2net, net2net_fill or hypercloning" if by_tokens else ", ".join(TOKEN_METHODS)}'
    )
  if not 0 <= config.noise < math.inf:
    raise UserError(f'noise is {config.noise}; it must be a finite number and not negative')
  if config.noise and config.method not in _COPYING:
    raise UserError(
      f'noise is for the methods that copy ({", ".join(_COPYING)}), and {config.method} does not; '
      'set it to 0'
    )
  if config.new_values == 'zero' and config.method not in ('zero_keys', 'random'):
    raise UserError(
      f'new_values=zero is for new tokens, which {config.method} does not draw; set it to init'
    )
  if not by_tokens:
    widen.check(source, target, config.method)
    return
  for kind in KINDS:
    old, new = getattr(source.param_tokens, kind), getattr(target.param_tokens, kind)
    if new < old:
      raise UserError(
        f'param_tokens.{kind} is {old} in the source, and {new} is smaller; growth only adds '
        '(python -m tokenformer_jax.grow shrink drops the least important ones)'
      )
    if config.method == 'duplicate' and new % old:
      raise UserError(
        f'param_tokens.{kind}={new} is not a multiple of the {old} that the source has; duplicate '
        f'copies every token as often as the others: take {old * max(2, round(new / old))}, or '
        'method=zero_keys'
      )
  if config.method == 'zero_keys' and config.new_values == 'zero':
    raise UserError(
      'new tokens whose keys and values are both zero are dead: both gradients are zero for ever, '
      'so they would never learn; use new_values=init'
    )


def inexact(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> str | None:
  """Why the grown model will not compute what the source did, or None if it will."""
  if source == target:
    return None
  if config.noise:
    return f'noise={config.noise} is added to what is copied'
  if config.method == 'net2net_fill':
    return 'the new blocks add to every output'
  if config.method not in TOKEN_METHODS:
    return None
  if config.method == 'random':
    return 'the scores of random keys enter the norm of every row, and their values the output'
  for kind in KINDS:
    old, new = getattr(source.param_tokens, kind), getattr(target.param_tokens, kind)
    before, after = (getattr(model.reference_tokens, kind) for model in (source, target))
    if config.method == 'duplicate' and before * new != after * old:
      return (
        f'the tokens of {kind} are there {new // old} times, and so must the reference count be: '
        f'it is {before}, then {after}; use scale=resize'
      )
    if config.method == 'duplicate' and new > old and source.row_epsilon:
      return (
        f'model.row_epsilon={source.row_epsilon} counts for less beside the norm of {new // old} '
        'times as many scores; use method=zero_keys, which is exact with it'
      )
    if config.method == 'zero_keys' and before != after:
      return (
        f'the reference count of {kind} changes from {before} to {after}, and with it the scale of '
        'every old token; use scale=keep'
      )
    if config.method == 'zero_keys' and new > old and source.score not in ZERO_AT_ZERO:
      return (
        f'with score={source.score} a token of score 0 has the weight of exp(0), not 0; use '
        'method=duplicate, which is exact for it'
      )
  return None


def by_array(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> ByArray:
  """The growth from one model to another, array by array; `check` has passed."""
  definition = models.define(source)
  if config.method == 'net2net_fill':
    return widen.FilledBlocks(models.define(target), config)
  if config.method not in TOKEN_METHODS:
    return widen.CopiedUnits(definition.info, source, target, config)
  new = {k: getattr(target.param_tokens, k) - getattr(source.param_tokens, k) for k in KINDS}
  added = dataclasses.replace(target, param_tokens=TokenCounts(**new))
  old, all_ = tokens.counts(definition), tokens.counts(models.define(target))
  copies = {
    path: tokens.lookup(all_, path) // max(1, count)
    for path, count in jax.tree_util.tree_flatten_with_path(old)[0]
  }
  return tokens.MoreTokens(models.define(added), copies, config)


ToArray = Callable[[tokens.Path, jax.Array, jax.Array], jax.Array]


def map_arrays(f: ToArray, tree: Params) -> Params:
  """Maps a function of path, array and salt over a tree of parameters."""
  return jax.tree.map_with_path(lambda path, old: f(path, old, tokens.salt_of(path)), tree)


def grow(
  state: State,
  source: ModelConfig,
  target: ModelConfig,
  config: GrowConfig,
  map_arrays: Callable[[ToArray, Params], Params] = map_arrays,
) -> State:
  """The state of the larger model: parameters, moments and counters.

  A pure function: traced under jit with the target's shardings (`step.state_shardings`), no host or
  device ever holds more than its part. Its arrays do not depend on each other, so they can be made
  one after the other, too (`files.read_and_grow`).

  Args:
    state: of a run of the source model (see `step.initial_state`), whatever the settings of its
      optimizer were.
    source: the model that the state is of.
    target: the larger one, see `grown_model`; `check` has passed.
    config: the method, and what becomes of moments and counters.
    map_arrays: as the function of this name.

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
  """Maps the parameters of a state and its moments (with their order), and sets the counters."""
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
  """What the optimizer has to know of how `model` came to be, or None if it was only trained."""
  if not lineage:
    return None
  last = lineage[-1]
  old = models.define(last.model if last.action in ('grow', 'merge') else model)
  return optim.LastGrowth(last.updates, tokens.counts(old))
