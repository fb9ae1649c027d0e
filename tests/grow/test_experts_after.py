"""Experts are taken out again; optimizer, tables and messages know of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import adam, apply_steps, grow, params_of, remove, state_of
from mixtures import PLAIN, by_bias, sparse, upcycled, with_experts, with_ffn
from outcomes import assert_same
from tiny import make_optimizer, tiny_model

from tokenformer_jax.config import (
  OPTIMIZERS,
  AdamWConfig,
  NoFeedForwardConfig,
)
from tokenformer_jax.config.groups import named_groups, with_frozen, with_records_of
from tokenformer_jax.config.model import Layers
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import diff_table, plan
from tokenformer_jax.grow.steps import experts
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import lookup
from tokenformer_jax.steps.last_growth import growth_from

SLOW = pytest.mark.slow  # because of what is compiled


# Out again


@pytest.mark.parametrize(
  ('source', 'target'),
  [
    (tiny_model(), sparse()),
    (tiny_model(dense=True), upcycled()),
    pytest.param(upcycled(), with_experts(upcycled(), 6), marks=SLOW),
    pytest.param(by_bias(sparse()), with_experts(by_bias(sparse()), 6), marks=SLOW),
  ],
)
def test_remove_is_the_inverse(source, target):
  old = state_of(source)
  new = grow(old, source, target, PLAIN)
  assert_same(remove(new, target, source, PLAIN), old, 'what was there before the growth')


def test_any_experts_can_be_taken_out():
  model = upcycled()
  after = experts.without(model, [1, 3], '--experts')
  assert after.layer.ffn.count == 2
  kept = functools.partial(lookup, experts.all_but(model, [1, 3]))
  old = state_of(model)
  new = apply_steps(old, model, (experts.TakeExperts(model, after, data=kept),))
  old, new = (jax.tree.map(np.asarray, state) for state in (old, new))
  for before, now in ((old['params'], new['params']), (adam(old).nu, adam(new).nu)):
    was, left = (tree['blocks']['ffn'] for tree in (before, now))
    np.testing.assert_array_equal(left['experts']['up'], was['experts']['up'][:, [1, 3]])
    np.testing.assert_array_equal(left['router']['kernel'], was['router']['kernel'][..., [1, 3]])
  for numbers, sentence in (
    ([5], 'names expert 5, and model.layer.ffn has the experts 1 to 4'),
    ([1, 2, 3, 4], 'would keep none of its 4 experts'),
    ([1, 2, 3], 'top_k is 2, and there are .*count=1 experts'),
  ):
    with pytest.raises(UserError, match=sentence):
      experts.without(model, numbers, '--experts')


@pytest.mark.parametrize(
  ('count', 'sentence'), [(4, 'nothing would shrink'), (5, 'shrink cannot make 5 of them')]
)
def test_only_fewer_experts_are_kept(count, sentence):
  with pytest.raises(UserError, match=sentence):
    experts.smaller(sparse(), {'layer': count}, '--experts=N')


def test_the_most_used_experts_stay_in_their_order():
  model = sparse()
  info, smaller = define_lm(model).info, define_lm(with_ffn(model, count=2)).abstract
  load = jnp.array([[0.1, 0.4, 0.2, 0.3], [0.5, 0.0, 0.4, 0.1]])
  loads = jax.tree.map(lambda one: load if one.expert_axis else jnp.zeros(()), info)
  kept = experts.most_used(loads, info, smaller)
  np.testing.assert_array_equal(kept['blocks']['ffn']['experts']['keys'], [[1, 3], [0, 2]])


# What else knows of experts


def test_only_what_is_new_counts_as_new():
  source = tiny_model()
  growth = growth_from(source, sparse())
  ffn = growth.old['blocks']['ffn']
  assert ffn['experts']['keys'].ranges['experts'] == ((0, 0),)
  assert ffn['shared']['keys'].ranges == {'param_tokens': ((0, 48),)}
  assert growth.old['embedding'].ranges == {}
  ffn = growth_from(tiny_model(dense=True), upcycled()).old['blocks']['ffn']
  assert ffn['experts']['up'].ranges == {'experts': ((0, 1),)}
  assert ffn['router']['kernel'].ranges == {'routes': ((0, 0),)}
  ffn = growth_from(sparse(), with_experts(sparse(), 6)).old['blocks']['ffn']
  assert ffn['router']['kernel'].ranges == {'routes': ((0, 4),)}
  kernel = growth_from(source, tiny_model(layers=4)).old['blocks']['ffn']['keys']
  assert 'experts' not in kernel.ranges


def test_only_the_layers_with_new_experts_have_old_ones():
  model = sparse()
  two = dataclasses.replace(model, pattern='layer own', variants=Layers({'own': model.layer}))
  blocks = growth_from(two, with_experts(two, {'own': 6})).old['blocks']
  routers = {name: blocks[name]['ffn']['router']['kernel'] for name in blocks}
  assert {name: router.ranges for name, router in routers.items()} == {
    'layer_0': {},
    'own_1': {'routes': ((0, 4),)},
  }


@SLOW
def test_frozen_old_parts_stay_while_new_experts_train():
  source = sparse()
  target = with_experts(source, 6)
  growth = growth_from(source, target)
  config = AdamWConfig(old_tokens='freeze', warmup_steps=0, weight_decay=0.0)
  params = params_of(target)
  tx = make_optimizer(config, 100, define_lm(target).info, growth)
  gradient = jax.tree.map(jnp.ones_like, params)
  updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
  of_ffn = updates['blocks']['ffn']
  for array in (of_ffn['experts']['keys'], jnp.moveaxis(of_ffn['router']['kernel'], -1, 1)):
    assert not array[:, :4].any(), 'an old expert changes'
    assert array[:, 4:].all(), 'a new expert does not train'
    assert jnp.all(jnp.abs(array[:, 4:]) < 1), 'an update is too large'
  assert not of_ffn['shared']['keys'].any() and not updates['embedding'].any()


@pytest.mark.parametrize('name', ['muon', 'adafactor', 'lion'])
def test_the_state_of_every_optimizer_fits_the_larger_model(name):
  config = OPTIMIZERS[name]()
  for source, target in (
    (tiny_model(), sparse()),
    (tiny_model(dense=True), upcycled()),
    (by_bias(sparse()), with_experts(by_bias(sparse()), 6)),
  ):
    definitions = [define_lm(model) for model in (source, target)]
    small, large = (
      jax.eval_shape(make_optimizer(config, 100, one.info).init, one.abstract)
      for one in definitions
    )
    old = {'params': definitions[0].abstract, 'opt_state': small}
    new = jax.eval_shape(lambda state: grow(state, source, target, PLAIN), old)  # noqa: B023
    assert new['opt_state'] == large, f'the state of {name} does not fit the larger model'
    back = jax.eval_shape(lambda state: remove(state, target, source, PLAIN), new)  # noqa: B023
    assert back['opt_state'] == small, f'the state of {name} does not fit without experts'


def test_the_learning_rate_goes_by_what_a_token_uses():
  few, many = (with_experts(tiny_model(), count, 16) for count in (4, 64))
  rates = [plan.rate_factor(tiny_model(), model) for model in (few, many)]
  assert rates[0] > rates[1] > 0.8, 'unused experts lower the rate'


def test_the_table_shows_experts():
  text = diff_table.render(tiny_model(), sparse(), 32)
  assert [line.split() for line in text.splitlines() if 'experts' in line] == [
    ['ffn', 'experts', '0', '4'],
    ['ffn', 'experts', 'of', 'a', 'token', '0', '1'],
  ]
  words = [line.split() for line in text.splitlines()]
  for row in (['ffn.shared', 'tokens', '48', '48'], ['ffn.expert', 'tokens', '0', '16']):
    assert row in words
  back = [line.split() for line in diff_table.render(sparse(), tiny_model(), 32).splitlines()]
  assert ['ffn', 'tokens', '48', '48'] in back
  assert 'ffn experts' in diff_table.render(tiny_model(dense=True), upcycled(), 32)


def test_a_frozen_group_stays_frozen_beside_experts():
  source = with_frozen(grown_model(tiny_model(), {'ffn': 64}, PLAIN), [1])
  groups = named_groups(with_records_of(with_experts(tiny_model(), 4, 16), source))
  assert [group.frozen for group in groups['ffn.shared']] == [True]
  assert [group.frozen for group in groups['ffn.expert']] == [False]


def test_a_layer_without_a_feed_forward_part_gets_no_experts():
  model = tiny_model()
  layer = dataclasses.replace(model.layer, ffn=NoFeedForwardConfig())
  with pytest.raises(UserError, match='no layer of this model has a feed-forward part'):
    experts.named_counts(dataclasses.replace(model, layer=layer), 4, '--experts')
