"""Grow a whole training state by a pure function; check a growth, and whether it is exact."""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  TOKEN_METHODS,
  GrowConfig,
  ModelConfig,
  PattentionConfig,
  TokenGroup,
  matching,
  matrices,
  pattentions,
  token_groups,
  with_groups,
)
from tokenformer_jax.config.pattention import SCORES, L2NormGELU, score_like
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import depth, expert_arrays, experts, tokens, widen
from tokenformer_jax.grow.arrays import Arrays, ByArray, InPlace, MapArrays, Stage, map_arrays
from tokenformer_jax.model import models
from tokenformer_jax.model.params import Params, Path, Role, lookup
from tokenformer_jax.steps import statistics
from tokenformer_jax.steps.step import State


def grown_model(model: ModelConfig, counts: Mapping[str, int], config: GrowConfig) -> ModelConfig:
  """Return the model with other counts, and the reference counts that `config.method.scale` makes.

  `counts` are by the names of `config.pattentions`; others stay. `resize` multiplies reference
  counts by the factor of the counts, so that a model that never kept its scale has τ = √N. The
  method `group` puts new tokens into a group of their own; the others put them into the last group.
  A matrix without tokens beside it gets a first group. Fewer tokens are those of the first groups.
  All reference counts of `model` must be filled in.
  """
  how, resizing = config.method, config.method.scale == 'resize'

  def grown(name: str, old: PattentionConfig, count: int) -> PattentionConfig:
    before = token_groups(old)
    if count > old.tokens and how.kind == 'group' and not config_lib.is_of_experts(name):
      added = count - old.tokens
      score = score_like(old.score, how.new_score) if how.new_score else old.score
      return with_groups(old, (*before, TokenGroup(added, added, score)))
    resized = []
    for was, now in zip(before, token_groups(config_lib.resized(old, count)), strict=False):
      factor = now.tokens / was.tokens if resizing else 1
      resized.append(now._replace(reference=round(was.reference * factor)))
    return with_groups(old, resized)

  new = {
    name: grown(name, old, counts.get(name, old.tokens)) for name, old in pattentions(model).items()
  }
  for name in matrices(model):
    if count := counts.get(name):
      score = SCORES[how.new_score]() if how.new_score else L2NormGELU()
      new[name] = with_groups(PattentionConfig(), (TokenGroup(count, count, score),))
  return config_lib.with_pattentions(model, new)


def check(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> None:
  """Check that the growth can be made.

  Raises:
    UserError: the method is for other models, a count becomes smaller, the method cannot change a
      key that differs, a key of `config` has no effect, or new tokens could never learn.
  """
  deeper, shallow = target, matching.shallow(source, target)
  target = experts.narrow(source, shallow)
  method = config.method.kind
  by_tokens, resizes = config.method.adds_tokens, source != target
  bare, source = source, matching.with_first_tokens(source, target)
  if resizes:
    check_method(source, method)
  if bare != source and method != 'group':
    name = next(name for name in matrices(bare) if name in pattentions(source))
    raise UserError(
      f'{name} has no parameter tokens in the source, and method={method} adds tokens to '
      'those that are there; use method=group, which adds a first group beside its matrix'
    )
  if bare != source:
    _check_first_tokens(bare, target, config)
  keys = ('tokens', 'reference', 'groups') if by_tokens else ('width', 'heads', 'kv_heads')
  for path, new, old in config_lib.differences(target, source, 'model.'):
    if path.rpartition('.')[2] not in keys:
      raise UserError(
        f'{path} is {old!r} in the source and {new!r} in the target; growth by {method} '
        f'changes {", ".join(keys[:-1])} and {keys[-1]}, and adds experts and layers, only'
      )
  experts.check(target, shallow)
  depth.check(matching.routed(source, shallow), deeper, config.place)
  changes = {
    'more_tokens': by_tokens and resizes,
    'wider': not by_tokens and resizes,
    'more_experts': target != shallow,
    'deeper': source.repeats != deeper.repeats,
  }
  _check_keys(config, [name for name, made in changes.items() if made])
  if by_tokens:
    _check_counts(source, target, config)
  elif resizes or source == deeper:
    widen.check(source, target, method)


def _check_keys(config: GrowConfig, changes: Sequence[str]) -> None:
  """Check that the keys of a growth with these changes go together."""
  copies = config.method.copies and ('more_tokens' in changes or 'wider' in changes)
  if copies and config.place == 'copies' and 'deeper' in changes:
    raise UserError(
      f'{config.method.kind} makes copies that differ only in what they add, which place=copies '
      'sets to zero in new layers, so that they would stay equal for ever; use place=between or '
      'behind, or train the grown model before you add the layers'
    )
  how = config.method
  if how.noise and not (how.copies or how.new_keys == 'copies'):
    raise UserError(f'noise={how.noise} is for copies; use new_keys=copies, or leave it out')
  effects = {
    'method': (('more_tokens', 'wider'), 'new tokens or a larger width'),
    'place': (('deeper',), 'new layers'),
  }
  for path, value, _ in config_lib.differences(config, GrowConfig()):
    section, _, key = path.partition('.')
    needed, made = effects.get(section, (changes, ''))
    if made and not set(needed) & set(changes):
      name = section if key in ('', 'kind') else key
      raise UserError(f'{name}={value} is for {made}, and this growth has none; leave it out')


def _check_first_tokens(bare: ModelConfig, target: ModelConfig, config: GrowConfig) -> None:
  """Check that keys are not drawn like trained ones where matrices get their first tokens."""
  larger = config_lib.token_counts(target)
  if any(larger.get(name, 0) > count for name, count in config_lib.token_counts(bare).items()):
    return
  if config.method.new_keys != 'init':
    raise UserError(
      f'new_keys={config.method.new_keys} is for new tokens of a projection that has some, and '
      'these are the first ones beside matrices; leave it out'
    )


def _check_counts(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> None:
  """Check the numbers of parameter tokens of the larger model, and their groups."""
  larger = config_lib.token_counts(target)
  for name, old in config_lib.token_counts(source).items():
    new = larger[name]
    if new < old:
      raise UserError(
        f'{name} has {old} parameter tokens in the source, and {new} are fewer; growth only adds '
        '(tokenformer grow shrink drops the least important ones)'
      )
    if config.method.kind == 'duplicate' and new % old:
      raise UserError(
        f'{name}={new} is not a multiple of the {old} parameter tokens that the source has; '
        f'duplicate copies every token as often as the others: take '
        f'{old * max(2, round(new / old))}, or method=zero_keys'
      )
    _check_groups(name, pattentions(source)[name], pattentions(target)[name], config.method.kind)


def _check_groups(name: str, old: PattentionConfig, new: PattentionConfig, method: str) -> None:
  """Check that a method can make the groups of the larger projection from the old groups."""
  before, after = token_groups(old), token_groups(new)
  if method == 'group' and config_lib.is_of_experts(name) and new.tokens > old.tokens:
    raise UserError(
      f'{name} has {old.tokens} parameter tokens in the source and {new.tokens} in the target, and '
      'growth by group would add a second norm, but each expert is one group; use '
      'method=zero_keys, or add experts'
    )
  if method == 'duplicate' and len(before) > 1 and new.tokens > old.tokens:
    raise UserError(
      f'{name} has {len(before)} groups of tokens, and duplicate copies those of one group only; '
      'use method=group, which adds a group, or zero_keys, which adds tokens to the last one'
    )
  kept = len(before) if method == 'group' else len(before) - 1
  extra = len(after) - len(before)
  sizes = [[group.tokens for group in groups[:kept]] for groups in (before, after)]
  scores = [[group.score for group in groups[: len(before)]] for groups in (before, after)]
  if sizes[0] != sizes[1] or scores[0] != scores[1] or (extra and method != 'group'):
    raise UserError(
      f'{name} has the groups {with_groups(old, before).groups or old.tokens!r} in the source and '
      f'{with_groups(new, after).groups or new.tokens!r} in the target; growth by {method} '
      + ('adds groups behind them' if method == 'group' else 'adds tokens to the last group')
    )


def inexact(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> str | None:
  """Return why the grown model will not compute what the source does, or None if it will."""
  if reason := depth.inexact(source, target, config.place):
    return reason
  shallow = matching.shallow(source, target)
  target = experts.narrow(source, shallow)
  if reason := experts.inexact(target, shallow):
    return reason
  if source == target:
    return None
  bare, source = source, matching.with_first_tokens(source, target)
  if bare != source and config.method.new_values != 'zero':
    return 'the values of the first tokens beside its matrices are not zero'
  if config.method.noise and config.method.copies:
    return f'noise={config.method.noise} is added to the copies'
  if config.method.kind == 'net2net_fill':
    return 'the new blocks add to every output'
  if not config.method.adds_tokens:
    return None
  if config.method.kind == 'random':
    return 'the scores of random keys enter the norm of every row, and their values the output'
  larger = pattentions(target)
  reasons = (
    tokens.inexact(name, old, larger[name], config) for name, old in pattentions(source).items()
  )
  return next(filter(None, reasons), None)


def rate_factor(source: ModelConfig, target: ModelConfig) -> float:
  """Return the factor on the learning rate for a larger model: r^−¾, rounded.

  r is the factor by which the layers' parameters grow that one token uses; of experts, this is a
  share. The exponent is a fit to the best rates of docs/growth.md.
  """

  def active(model: ModelConfig) -> float:
    definition = models.define(model)
    pairs = zip(jax.tree.leaves(definition.info), jax.tree.leaves(definition.abstract), strict=True)
    return sum(array.size * info.active for info, array in pairs if info.in_layers)

  return round((active(target) / active(source)) ** -0.75, 3)


def check_method(model: ModelConfig, method: str) -> None:
  """Check that a method is for models with parameter tokens, or without, like this one.

  Raises:
    UserError: it is not.
  """
  if method in TOKEN_METHODS:
    if not (pattentions(model) or (method == 'group' and matrices(model))):
      raise UserError(
        f'method {method} adds parameter tokens to others, and this model has none; choose group, '
        'which adds them beside its matrices, or net2net, net2net_fill or hypercloning'
      )
  elif pattentions(model):
    raise UserError(
      f'method {method} is for Transformers, and this model has parameter tokens; choose '
      f'{", ".join(TOKEN_METHODS)}'
    )


def by_array(source: ModelConfig, target: ModelConfig, config: GrowConfig) -> ByArray:
  """Return the growth to a model of as many layers, array by array; `check` has passed."""
  definition = models.define(source)
  if source == target:
    return _Same()
  if config.method.kind == 'net2net_fill':
    return widen.FilledBlocks(models.define(target), config)
  if not config.method.adds_tokens:
    return widen.CopiedUnits(definition, models.define(target), (source, target), config)
  before = config_lib.token_counts(source)
  new = {name: count - before[name] for name, count in config_lib.token_counts(target).items()}
  added = config_lib.with_token_counts(target, new)
  old, all_ = definition.token_counts, models.define(target).token_counts
  copies = {
    path: lookup(all_, path) // max(1, count)
    for path, count in jax.tree_util.tree_flatten_with_path(old)[0]
  }
  return tokens.MoreTokens(models.define(added), copies, config)


class FirstTokens:
  """A stage that adds the first parameter tokens beside matrices: new ones, or given ones."""

  def __init__(
    self,
    before: ModelConfig,
    after: ModelConfig,
    config: GrowConfig,
    given: Mapping[Path, jax.Array] = types.MappingProxyType({}),
  ):
    known = jax.tree_util.tree_leaves_with_path(models.define(before).abstract)
    self._old = {path for path, _ in known}
    self._after, self._config, self._given = models.define(after), config, given

  def sources(self, path: Path) -> tuple[Path, ...]:
    return (path,) if path in self._old else ()

  def param(self, path: Path, olds: Sequence[jax.Array], salt: jax.Array) -> jax.Array:
    if olds:
      return olds[0]
    if path in self._given:
      return self._given[path]
    info, like = lookup(self._after.info, path), lookup(self._after.abstract, path)
    if info.role is Role.VALUE and self._config.method.new_values == 'zero':
      return jnp.zeros(like.shape, like.dtype)
    return info.initializer(tokens.drawing_key(self._config.seed, salt), like.shape, like.dtype)

  def moment(self, path: Path, olds: Sequence[jax.Array], order: int) -> jax.Array:
    del order
    return olds[0] if olds else jnp.zeros(lookup(self._after.abstract, path).shape, jnp.float32)


class _Same:
  """Keeps every array as it is."""

  def param(self, path: Path, old: jax.Array, salt: jax.Array) -> jax.Array:
    del path, salt
    return old

  def moment(self, path: Path, old: jax.Array, order: int) -> jax.Array:
    del path, order
    return old


def grow(
  state: State,
  source: ModelConfig,
  target: ModelConfig,
  config: GrowConfig,
  map_arrays: MapArrays = map_arrays,
) -> State:
  """Grow a state: parameters, the optimizer's statistics, and counters.

  Tokens are added first, then experts, then layers.

  The function is pure, and keeps the optimizer's structure. Under jit with the target's shardings
  (`step.state_shardings`), no host or device ever holds more than its part. New arrays do not
  depend on each other: `files.read_and_grow` makes one after the other.

  Args:
    state: from a run of the source model (see `step.initial_state`), with any optimizer.
    source: the model of the state.
    target: the larger model, see `grown_model`; `check` has passed.
    config: the method, and how to treat moments and counters.
    map_arrays: replaces the function `map_arrays`.
  """
  shallow = matching.shallow(source, target)
  narrow = experts.narrow(source, shallow)
  bare, seeded = source, matching.with_first_tokens(source, narrow)
  stages: list[Stage] = [InPlace(by_array(seeded, narrow, config))]
  if seeded != bare:
    stages.insert(0, FirstTokens(bare, seeded, config))
  if narrow != shallow:
    stages.append(expert_arrays.MoreExperts(narrow, shallow, config))
  if source.repeats != target.repeats:
    stages.append(depth.MoreLayers(matching.routed(seeded, shallow), target, config))
  return run_stages(state, source, target, stages, config, map_arrays)


def without_tokens(
  state: State, model: ModelConfig, fewer: ModelConfig, config: GrowConfig
) -> State:
  """Return the state of a model with fewer projections that have parameter tokens."""
  return state if fewer == model else run_stages(state, model, fewer, [InPlace(_Same())], config)


def run_stages(
  state: State,
  source: ModelConfig,
  target: ModelConfig,
  stages: Sequence[Stage],
  config: GrowConfig,
  map_arrays: MapArrays = map_arrays,
) -> State:
  """Return the state of another model, made by stages; for the arguments see `grow`."""
  definition = models.define(source)
  arrays = Arrays(definition, models.define(target), tuple(stages))

  def param(path: Path, olds: Sequence[jax.Array], salts: jax.Array) -> jax.Array:
    return arrays.make(path, olds, lambda stage, *array: stage.param(*array), salts)

  def map_statistic(name: str, tree: Params) -> Params:
    def made(stage: Stage, path: Path, olds: Sequence[jax.Array], salt: jax.Array) -> jax.Array:
      del salt  # Nothing is drawn.
      return stage.moment(path, olds, statistics.ORDERS[name])

    def statistic(path: Path, olds: Sequence[jax.Array], salts: jax.Array) -> jax.Array:
      wholes = [
        statistics.expand(name, old, lookup(definition.abstract, source).shape)
        for source, old in zip(arrays.sources(path), olds, strict=True)
      ]
      new = arrays.make(path, wholes, made, salts)
      if config.moments == 'drop':
        return jnp.zeros_like(statistics.reduce(name, new))
      if wholes and new is wholes[0]:
        return olds[0]
      return statistics.reduce(name, statistics.with_history(name, new))

    return map_arrays(statistic, tree, arrays, name)

  return _map_state(state, config, lambda tree: map_arrays(param, tree, arrays, ''), map_statistic)


def map_trees(
  state: State,
  config: GrowConfig,
  map_params: Callable[[Params], Params],
  map_moments: Callable[[int, Params], Params],
) -> State:
  """Map the parameters and the optimizer's statistics of a state, and set the counters.

  Args:
    state: from `step.initial_state`, with any optimizer.
    config: says whether counters start at 0.
    map_params: maps a tree of parameters.
    map_moments: maps, in the same way, a tree of means of gradients (1) or of their squares (2). A
      statistic that exists for some parameters only, or as means of rows, is expanded before.
  """
  shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state['params'])

  def map_statistic(name: str, tree: Params) -> Params:
    order = statistics.ORDERS[name]
    if name in ('mu', 'nu') and jax.tree.structure(tree) == jax.tree.structure(shapes):
      return map_moments(order, tree)

    def expand(like: jax.ShapeDtypeStruct, old: Any) -> jax.Array:
      if statistics.is_masked(old):
        return jnp.zeros(like.shape, like.dtype)
      return statistics.expand(name, old, like.shape)

    def reduce(new: jax.Array, old: Any) -> Any:
      if statistics.is_masked(old):
        return old
      return statistics.reduce(name, statistics.with_history(name, new))

    def mapped(tree: Params) -> Params:
      new = map_moments(order, jax.tree.map(expand, shapes, tree))
      return jax.tree.map(reduce, new, tree)

    return jax.jit(mapped)(tree)  # so that the expanded arrays never exist

  return _map_state(state, config, map_params, map_statistic)


def _map_state(
  state: State,
  config: GrowConfig,
  map_params: Callable[[Params], Params],
  map_statistic: Callable[[str, Params], Params],
) -> State:
  """Map parameters and statistics, and set the counters that `config` restarts."""
  restart = config.step == 'restart'

  def map_count(part: Any, count: jax.Array) -> jax.Array:
    is_rate = isinstance(part, optax.ScaleByScheduleState)  # the count of the learning rate
    again = restart if is_rate else config.moments == 'drop'
    return jnp.zeros_like(count) if again else count

  averaged = ('params', 'ema')  # the parameters, and their average if the run keeps one
  counters = {k: value for k, value in state.items() if k not in (*averaged, 'opt_state')}
  return {
    **{name: map_params(state[name]) for name in averaged if name in state},
    'opt_state': statistics.map_state(map_statistic, map_count, state['opt_state']),
    **(jax.tree.map(jnp.zeros_like, counters) if restart else counters),
  }
