"""The state of every optimizer grows with its model, and shrinks again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  DENSE,
  DOUBLE,
  UPDATES,
  counters,
  group_masks,
  grow,
  merge,
  optimizer,
  params_of,
  remove,
  schedule_count,
)
from outcomes import assert_close, paths
from tiny import make_optimizer, tiny_model

from tokenformer_jax.config import OPTIMIZERS, GrowConfig, growth, with_token_counts
from tokenformer_jax.config.groups import with_frozen
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.grow.steps import widen
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.steps import statistics
from tokenformer_jax.steps.statistics import ORDERS

SLOW = pytest.mark.slow
EACH = pytest.mark.parametrize('name', ['muon', pytest.param('adafactor', marks=SLOW)])
MODEL = tiny_model()
KEEP = growth(method='zero_keys')


def _state(name: str, model=MODEL) -> dict:
  """A state in which no statistic is zero, and those of order 2 are positive."""
  params = params_of(model)
  fresh = jax.eval_shape(optimizer(model, OPTIMIZERS[name]()).init, params)
  return {'params': params, 'opt_state': _filled(fresh), **counters()}


def _filled(opt_state):
  """The state of an optimizer with numbers in the place of shapes."""
  rng = np.random.default_rng(1)

  def of_statistic(which, tree):
    def draw(array):
      drawn = np.float32(rng.normal(size=array.shape))
      return jnp.asarray(np.square(drawn) + np.float32(0.1) if ORDERS[which] == 2 else drawn)

    return jax.tree.map(draw, tree)

  return statistics.map_state(
    of_statistic, lambda part, count: jnp.asarray(np.int32(UPDATES)), opt_state
  )


def _assert_fits(state: dict, name: str, model) -> None:
  definition = define_lm(model)
  want = jax.eval_shape(optimizer(model, OPTIMIZERS[name]()).init, definition.abstract)
  shapes = [jax.tree.map(jnp.shape, tree) for tree in (state['opt_state'], want)]
  assert shapes[0] == shapes[1], 'the state does not fit the optimizer of the larger model'


def _statistics(state: dict) -> dict[str, np.ndarray]:
  """Arrays by the statistic's name and the parameter's path."""
  found = {}

  def collect(which, tree):
    for path, array in paths(tree).items():
      assert (which, path) not in found
      found[which, path] = array
    return tree

  statistics.map_state(collect, lambda part, count: count, state['opt_state'])
  return found


@functools.cache
def _grown(name: str, config=KEEP):
  """The model with twice the tokens of two projections, and its state."""
  target = grown_model(MODEL, {'proj': 80, 'ffn': 96}, config)
  return target, grow(_state(name), MODEL, target, config)


@EACH
@pytest.mark.parametrize('method', ['zero_keys', pytest.param('duplicate', marks=SLOW)])
def test_statistics_of_old_tokens_stay_and_new_ones_begin(name, method):
  state, (target, new) = _state(name), _grown(name, growth(method=method))
  _assert_fits(new, name, target)
  before, after = _statistics(state), _statistics(new)
  part = 0.5 if method == 'duplicate' else 1  # A copied key has half of its gradient.
  for which, path in (('mu', 'blocks/ffn/keys'), ('v_row', 'blocks/ffn/keys')):
    if (which, path) not in before:
      continue
    old, grown = before[which, path], after[which, path]
    size = old.shape[1]
    np.testing.assert_allclose(grown[:, :size], part * old, rtol=1e-5, err_msg=f'{which} {path}')
    if which == 'mu' and method == 'zero_keys':
      assert not grown[:, size:].any(), 'new tokens have a momentum already'
    if which == 'v_row' and method == 'zero_keys':
      np.testing.assert_allclose(
        grown[:, size:], np.broadcast_to(old.mean(1, keepdims=True), old.shape), rtol=1e-5
      )
  assert schedule_count(new) == UPDATES, 'the rate does not go on'


@EACH
def test_unchanged_arrays_stay_bit_for_bit(name):
  before, after = (_statistics(one) for one in (_state(name), _grown(name)[1]))
  same = [key for key in before if 'ffn' not in key[1] and 'proj' not in key[1]]
  assert same
  for key in same:
    np.testing.assert_array_equal(after[key], before[key], err_msg=f'{key} changes')


@EACH
def test_dropped_statistics_are_zero_and_their_counts_too(name):
  target, config = with_token_counts(MODEL, {}), GrowConfig(moments='drop')
  new = grow(_state(name), MODEL, target, config)
  _assert_fits(new, name, target)
  assert not any(array.any() for array in _statistics(new).values()), 'something is kept'
  counts = []

  def count(part, value):
    counts.append((type(part).__name__, int(value)))
    return value

  statistics.map_state(lambda which, tree: tree, count, new['opt_state'])
  wrong = [one for one in counts if (one[1] == 0) == (one[0] == 'ScaleByScheduleState')]
  assert not wrong, f'these counts are wrong: {wrong}'


@EACH
def test_a_removal_undoes_a_growth(name):
  state, (target, new) = _state(name), _grown(name)
  back = remove(new, target, MODEL, KEEP)
  _assert_fits(back, name, MODEL)
  before, after = (_statistics(one) for one in (state, back))
  same = {key: array for key, array in before.items() if key[0] in ('mu', 'nu', 'v', 'v_row')}
  assert_close({str(k): after[k] for k in same}, {str(k): same[k] for k in same}, name)


@EACH
def test_a_merge_adds_tokens_without_a_momentum(name):
  added = with_token_counts(MODEL, {'qkv': 4, 'proj': 4, 'ffn': 8})
  total = with_token_counts(MODEL, {'qkv': 28, 'proj': 44, 'ffn': 56})
  tokens = {'blocks': params_of(added)['blocks']}
  merged = jax.eval_shape(lambda state: merge(state, tokens, MODEL, total), _state(name))
  _assert_fits(merged, name, total)


@EACH
def test_wider_transformers_keep_their_optimizer(name):
  model, config = tiny_model(**DENSE), growth(method='hypercloning')
  target = widen.resized(model, width=64)
  new = jax.eval_shape(lambda state: grow(state, model, target, config), _state(name, model))
  _assert_fits(new, name, target)


@SLOW
def test_mean_squares_of_wider_transformers_are_positive():
  model, config = tiny_model(**DENSE), growth(method='hypercloning')
  new = grow(_state('adafactor', model), model, widen.resized(model, width=64), config)
  bad = [key for key, a in _statistics(new).items() if key[0][0] == 'v' and not np.all(a > 0)]
  assert not bad, f'a mean square is not positive: {bad}'


@EACH
def test_a_frozen_group_and_its_statistics_stay_and_the_others_move(name):
  group = growth(method='group')
  model = with_frozen(grown_model(MODEL, DOUBLE, group), [1])
  info, params, gradient = (
    {'embedding': tree['embedding'], 'ffn': tree['blocks']['ffn']}
    for tree in (define_lm(model).info, params_of(model), params_of(model, 5))
  )
  tx = make_optimizer(OPTIMIZERS[name](), 1000, info)
  opt_state = _filled(jax.eval_shape(tx.init, params))
  updates, new = jax.jit(tx.update)(gradient, opt_state, params)
  held = group_masks(info, (1,))
  for path, update in paths(updates).items():
    where = np.broadcast_to(held[path], update.shape)
    assert not np.any(np.where(where, update, 0)), f'frozen tokens of {path} move'
    assert np.all(np.where(where, 1, update)), f'others of {path} do not move'
  before, after = (_statistics({'opt_state': one}) for one in (opt_state, new))
  for (which, path), array in before.items():
    if array.ndim == np.ndim(held[path]):
      where = np.broadcast_to(held[path], array.shape)
      assert np.array_equal(array[where], after[which, path][where]), f'{which} of {path} changes'
