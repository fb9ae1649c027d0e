"""Training goes on after growth: gradients at once, no dead token, and frozen old ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  DENSE,
  DOUBLE,
  STEP,
  UPDATES,
  adam,
  by_name,
  grow,
  grow_params,
  loss_and_gradient,
  optimizer,
  params_of,
  remove,
  state_of,
  trained,
)
from mixtures import sparse, upcycled, with_experts
from outcomes import assert_same, paths
from tiny import tiny_model

from tokenformer_jax.config import AdamWConfig, TokenGroup, growth
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.grow.steps import widen
from tokenformer_jax.model import groups, pattention
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs.checkpoint_meta import Ancestor
from tokenformer_jax.steps.entries import visible
from tokenformer_jax.steps.last_growth import last_growth

SLOW = pytest.mark.slow  # because each case compiles two models
ZERO_KEYS = growth(method='zero_keys')
DENSE_MODEL = tiny_model(**DENSE)
TARGET = grown_model(tiny_model(), by_name(32, 48, 64), ZERO_KEYS)


@functools.cache
def _grown():
  return grow(state_of(tiny_model()), tiny_model(), TARGET, ZERO_KEYS)


# Gradients right after a growth


@functools.cache
def _gradients():
  source = tiny_model()
  params = params_of(source)
  small = loss_and_gradient(source)(params)
  return small, loss_and_gradient(TARGET)(grow_params(params, source, TARGET, ZERO_KEYS))


def test_old_parameters_have_the_gradient_of_the_small_model():
  (_, small), (_, large) = _gradients()
  large = paths(large)
  for path, want in paths(small).items():
    got = large[path][tuple(slice(size) for size in want.shape)]
    np.testing.assert_allclose(
      got, want, rtol=1e-5, atol=1e-6, err_msg=f'new tokens change the gradient of {path}'
    )


def test_new_values_have_no_gradient_at_first_and_new_keys_do():
  (_, small), (_, large) = _gradients()
  small = paths(small)
  for path, gradient in paths(large).items():
    if not path.endswith(('keys', 'values')):
      continue
    new = gradient[:, small[path].shape[1] :]
    if path.endswith('values'):
      assert not new.any(), f'the new tokens of {path} have a weight before the first update'
    else:
      assert np.abs(new).max(axis=-1).min() > 0, f'a new token of {path} does not learn'


# Training after a growth


@SLOW
def test_no_new_token_is_dead():
  before = jax.tree.map(jnp.copy, _grown())
  start = paths(before['params'])
  after = paths(trained(before, TARGET, 100, weight_decay=0.0)['params'])
  for path, first in start.items():
    if not path.endswith(('keys', 'values')):
      continue
    old = {'ffn': 48, 'proj': 40}.get(path.split('/')[-2], 24)
    moved = np.abs(after[path] - first)[:, old:].max(axis=-1)
    assert moved.min() > 1e-4, f'a new token of {path} did not move in 100 steps'
    if path.endswith('keys'):
      x = np.random.default_rng(2).normal(size=(64, 32))
      for layer in range(2):
        scores = jnp.asarray(x @ after[path][layer].T, jnp.float32)
        group = TokenGroup(old, old)
        weights = pattention.parameter_weights(scores, group.score, groups.make((group,)))
        largest = np.abs(weights)[:, old:].max(axis=0)
        assert largest.min() > 1e-4, f'a new token of {path} has no weight after 100 steps'


def _equal_copies(params, start):
  """Paths of matrices in which a unit or a token of the second half is the one of the first half.

  Copies stand behind what they are copies of, along axes that have twice the size.
  """
  found = []
  for path, array in paths(params).items():
    for axis, size in enumerate(start[path].shape):
      if array.shape[axis] == 2 * size and path.endswith(('keys', 'values', 'kernel', 'embedding')):
        halves = np.moveaxis(array, axis, -1)
        same = np.all(halves[..., :size] == halves[..., size:], axis=tuple(range(array.ndim - 1)))
        found += [path] if same.any() else []
  return found


@SLOW
@pytest.mark.parametrize(
  ('source', 'target', 'method'),
  [
    (tiny_model(), tiny_model(tokens=DOUBLE), 'duplicate'),
    (DENSE_MODEL, tiny_model(**DENSE, width=64, heads=8), 'hypercloning'),
  ],
  ids=['duplicate', 'hypercloning'],
)
def test_copies_do_not_stay_equal(source, target, method):
  """Equal copies have equal gradients and moments: a model of twins is worth the small one."""
  before = grow(state_of(source), source, target, growth(method=method))
  after = trained(before, target, 3)
  equal = _equal_copies(after['params'], paths(params_of(source)))
  assert not equal, f'after three steps copies in {equal} are equal bit for bit'


def _born(action, updates=UPDATES, model=None, **changes):
  return Ancestor(
    action=action,
    source='somewhere',
    step=STEP,
    model=model or tiny_model(),
    grow=growth(**changes),
    updates=updates,
  )


def _old(growth, *names):
  """The ranges of old entries of an array of the layers."""
  tree = growth.old['blocks']
  for name in names:
    tree = tree[name]
  return tree.ranges


def test_the_optimizer_is_told_of_the_last_growth():
  assert last_growth((), TARGET) is None, 'a model that never grew has a growth'
  growth = last_growth((_born('grow', 3), _born('grow', 7)), TARGET)
  assert growth.updates == 7, 'not the last growth counts'
  assert _old(growth, 'attention', 'proj', 'keys') == {'param_tokens': ((0, 40),)}
  assert _old(growth, 'ffn', 'values') == {'param_tokens': ((0, 48),)}
  assert growth.old['embedding'].ranges == {}, 'an array without tokens is old'


WIDE_EXPERTS = widen.resized(upcycled(), ffn_width=160)


@pytest.mark.parametrize(
  ('source', 'target', 'method'),
  [
    (tiny_model(), TARGET, 'zero_keys'),
    (DENSE_MODEL, tiny_model(**DENSE, ffn_width=160), 'neurons'),
    (upcycled(), WIDE_EXPERTS, 'neurons'),
    (sparse(), with_experts(sparse(), 6), 'group'),
    (tiny_model(dense=True), upcycled(), 'group'),
    (tiny_model(), tiny_model(layers=4), 'group'),
    (upcycled(), dataclasses.replace(with_experts(WIDE_EXPERTS, 6), pattern='layer*4'), 'neurons'),
  ],
  ids=['tokens', 'neurons', 'in experts', 'experts', 'upcycled', 'layers', 'all at once'],
)
def test_what_a_growth_added_is_what_an_optimizer_sees(source, target, method):
  born = last_growth((_born('grow', model=source, method=method),), target)
  after = define_lm(target)

  def seen(array, old) -> int:
    return int(np.broadcast_to(visible(array.shape, old), array.shape).sum())

  new = jax.tree.leaves(jax.tree.map(seen, after.abstract, born.old))
  assert sum(new) == after.count - define_lm(source).count


@pytest.mark.parametrize('action', ['shrink', 'remove', 'slice', 'as_tokens'])
def test_a_growth_without_new_parameters_is_not_the_last_growth(action):
  """A cosine run that lost tokens would warm up again."""
  assert last_growth((_born(action, 7, TARGET),), tiny_model()) is None
  growth = last_growth((_born('grow', 3), _born(action, 7, TARGET)), tiny_model())
  assert _old(growth, 'ffn', 'keys') == {'param_tokens': ((0, 48),)}, 'a token is new'
  assert growth.updates == 3, 'the schedule restarts'
  anew = _born(action, 0, TARGET, step='restart')
  assert last_growth((_born('grow', 3), anew), tiny_model()).updates == 0, 'updates count from 0'


@SLOW
def test_frozen_training_moves_new_neurons_only_and_remove_gives_the_base_back():
  source, target = DENSE_MODEL, tiny_model(**DENSE, ffn_width=160)
  how = growth(method='neurons')
  born = _born('grow', model=source, method='neurons')
  assert _old(last_growth((born,), target), 'ffn', 'down', 'kernel') == {'hidden': ((0, 128),)}
  base = jax.tree.map(np.asarray, state_of(source))
  first = grow(jax.tree.map(jnp.asarray, base), source, target, how)
  start = paths(jax.tree.map(np.asarray, first['params']))
  after = trained(first, target, 3, last_growth((born,), target), old_tokens='freeze')
  moved = {path for path, array in paths(after['params']).items() if (array != start[path]).any()}
  assert moved == {f'blocks/ffn/{name}' for name in ('up/kernel', 'up/bias', 'down/kernel')}
  back = remove(after, target, source, how)
  assert_same(back['params'], base['params'], 'remove does not give the base back')
  assert_same(adam(back).mu, adam(base).mu, 'a moment of the base moved')


def test_the_structure_of_the_optimizer_does_not_depend_on_what_is_frozen():
  frozen = optimizer(
    TARGET, AdamWConfig(old_tokens='freeze'), last_growth((_born('grow'),), TARGET)
  )
  one, other = (
    jax.eval_shape(tx.init, define_lm(TARGET).abstract) for tx in (frozen, optimizer(TARGET))
  )
  assert one == other, 'a run cannot be frozen, or freed, in the middle'
