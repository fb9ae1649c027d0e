"""Experts are added without a change of what the model computes, and are taken out again."""

import dataclasses
import itertools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from growing import (
  STEP,
  UPDATES,
  adam,
  difference,
  grow,
  grow_params,
  logits,
  loss_and_gradient,
  params_of,
  state_of,
)
from outcomes import assert_same, paths
from routed import PLAIN, by_bias, sparse, upcycled, with_experts, with_ffn
from tiny import tiny_model, two_kinds
from tiny_run import environment

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  CapacityConfig,
  GrowConfig,
  LossBalanceConfig,
  MLPConfig,
  NoFeedForwardConfig,
  OptimConfig,
  RouterConfig,
  former_names,
)
from tokenformer_jax.config.groups import check_new_tokens_train
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import (
  expert_arrays,
  experts,
  grown_model,
  growth_from,
  parts,
  table,
)
from tokenformer_jax.grow import state as state_lib
from tokenformer_jax.model.compute import DEFAULT
from tokenformer_jax.model.feed_forward import feed_forward
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.steps import optim

SLOW = pytest.mark.slow  # because of what is compiled
ZERO_KEYS = GrowConfig('zero_keys')
OTHERS = ('muon', 'adafactor', 'lion')  # optimizers
SCORES = ('l2_norm_gelu', 'gelu_l2_norm', 'gelu_l1_norm', 'softmax', 'exp_l2_norm')


def _exact(source, target, config=PLAIN):
  state_lib.check(source, target, config)
  return state_lib.inexact(source, target, config)


# Names of projections


def test_the_projections_of_experts_have_names():
  model = sparse()
  assert config_lib.token_counts(model)['ffn.shared'] == 48
  assert config_lib.token_counts(model)['ffn.expert'] == 16
  assert config_lib.key_of(model, 'ffn.expert') == 'model.layer.ffn.expert'
  larger = config_lib.with_token_counts(model, {'ffn.expert': 20})
  assert larger.layer.ffn.expert.tokens == 20
  layers = config_lib.Layers({'moe': model.layer})
  both = dataclasses.replace(model, pattern='moe layer', variants=layers)
  counts = config_lib.named_counts(both, {'ffn.expert': 20, 'moe.ffn.expert': 24}, 'here')
  assert (counts['ffn.expert'], counts['moe.ffn.expert'], counts['moe.ffn.shared']) == (20, 24, 48)
  assert 'ffn.shared' in config_lib.count_names(both)


# A Pattention with experts beside it


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('score', [SCORES[0], *(pytest.param(n, marks=SLOW) for n in SCORES[1:])])
def test_routed_experts_beside_a_pattention_add_exactly_zero(score, dtype):
  """Operation by operation: what XLA makes of a whole model depends on its flags."""
  source, target = tiny_model(score=score), sparse(score)
  old, new = (
    feed_forward(model.layer.ffn, model, compute=DEFAULT, rngs=nnx.Rngs(0))
    for model in (source, target)
  )
  new.shared = old
  new.experts.values[...] = jnp.zeros_like(new.experts.values[...])
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 32)), dtype)
  np.testing.assert_array_equal(new(x)[0], old(x), err_msg='the experts add something')


@SLOW
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_model_computes_the_same_with_routed_experts(dtype):
  source, target = tiny_model(), sparse()
  assert _exact(source, target) is None
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  found = difference(logits(target, new, dtype), logits(source, params, dtype))
  assert found < (1e-6 if dtype == 'float32' else 1e-2)


@SLOW
def test_the_compiled_model_has_the_same_bits_as_before():
  """In a process with XLA's own flags, which the tests change."""
  folder = pathlib.Path(__file__).parent
  program = [sys.executable, str(folder / 'routed.py'), 'l2_norm_gelu', 'softmax']
  search = f'{folder}:{folder.parent}:{folder.parent.parent}'
  done = subprocess.run(
    program,
    env=environment(8) | {'PYTHONPATH': search},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ['True'] * 4, 'some logits change'


def test_the_dense_part_stays_array_for_array_with_its_moments():
  source, target = tiny_model(), sparse()
  old = state_of(source)
  new = grow(old, source, target, PLAIN)
  for before, after in (
    (old['params'], new['params']),
    (adam(old).mu, adam(new).mu),
    (adam(old).nu, adam(new).nu),
  ):
    assert_same(after['blocks']['ffn']['shared'], before['blocks']['ffn'], 'the shared part')
    assert_same(after['blocks']['attention'], before['blocks']['attention'], 'the attention')
  made = new['params']['blocks']['ffn']
  assert made['experts']['keys'].shape == (2, 4, 16, 32)
  assert not made['experts']['values'].any() and made['experts']['keys'].any()
  assert made['router']['kernel'].any(), 'the router chooses the first experts for all tokens'
  assert not adam(new).mu['blocks']['ffn']['experts']['keys'].any()


@SLOW
def test_new_experts_and_their_router_learn():
  source, target = tiny_model(), sparse()
  params = grow_params(params_of(source), source, target, PLAIN)
  _, gradient = loss_and_gradient(target)(params)
  assert gradient['blocks']['ffn']['experts']['values'].any(), 'values have no gradient at first'


@SLOW
def test_an_mlp_can_stay_as_the_shared_part():
  source = tiny_model(dense=True)
  target = with_ffn(upcycled(), shared=MLPConfig(), expert=MLPConfig(64), router=RouterConfig())
  assert _exact(source, target) is None
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-6


# Copies of an MLP


def test_experts_that_are_copies_compute_what_the_mlp_did():
  source, target = tiny_model(dense=True), upcycled()
  assert _exact(source, target) is None
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-5
  for name, kernel in (('up', 'up'), ('down', 'down')):
    copies = new['blocks']['ffn']['experts'][name]
    for i in range(4):
      np.testing.assert_array_equal(copies[:, i], params['blocks']['ffn'][kernel]['kernel'])


@SLOW
def test_experts_can_be_copies_of_a_pattention():
  source = tiny_model()
  router = RouterConfig(top_k=2, renormalize=True)
  target = with_ffn(sparse(), shared=NoFeedForwardConfig(), expert=source.layer.ffn, router=router)
  assert _exact(source, target) is None
  old = state_of(source)
  new = grow(old, source, target, PLAIN)
  assert difference(logits(target, new['params']), logits(source, old['params'])) < 1e-5
  assert_same(parts.remove(new, target, source, PLAIN), old, 'what was there before the growth')


@SLOW
@pytest.mark.parametrize('count', [2, 4])
def test_copies_have_their_part_of_the_moments(count):
  """The gradients of copies add up to the old one; each has K/E of the tokens."""
  source = tiny_model(dense=True)
  target = with_experts(source, count)
  params = params_of(source)
  _, small = loss_and_gradient(source)(params)
  _, large = loss_and_gradient(target)(grow_params(params, source, target, PLAIN))
  old = paths(small['blocks']['ffn'])
  new = paths(large['blocks']['ffn']['experts'])
  for name in ('up', 'down'):
    gradient = old[f'{name}/kernel']
    np.testing.assert_allclose(
      np.sum(new[name], axis=1), gradient, atol=1e-5 * np.max(np.abs(gradient)), rtol=1e-4
    )
  state = grow(state_of(source), source, target, PLAIN)
  before = adam(state_of(source))
  for tree, was, parts_of in (
    (adam(state).mu, before.mu, count),
    (adam(state).nu, before.nu, 2 * count),
  ):
    np.testing.assert_allclose(
      tree['blocks']['ffn']['experts']['up'][:, 1],
      was['blocks']['ffn']['up']['kernel'] / parts_of,
      rtol=1e-6,
    )


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'router': RouterConfig(top_k=1)}, 'do not add up to 1'),
    ({'router': RouterConfig(top_k=2)}, 'do not add up to 1'),
    ({'dispatch': CapacityConfig(eval_factor=1.5)}, 'no places for all tokens'),
    ({'dispatch': CapacityConfig(eval_factor=2.0)}, None),
    ({'router': RouterConfig(top_k=4)}, None),  # all experts, whose softmax adds up to 1
  ],
)
def test_which_copies_are_exact(changes, sentence):
  source = tiny_model(dense=True)
  reason = _exact(source, with_ffn(upcycled(), **changes))
  assert reason is None if sentence is None else sentence in reason


# More experts


@SLOW
def test_experts_that_a_bias_keeps_back_change_nothing():
  source = by_bias(sparse())
  target = with_experts(source, 6)
  assert _exact(source, target) is None
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-6
  old, now = (tree['blocks']['ffn']['router']['bias'] for tree in (params, new))
  np.testing.assert_array_equal(now[:, :4], old)
  assert jnp.all(now[:, 4:] < jnp.min(old, axis=1, keepdims=True))


@SLOW
def test_if_all_experts_are_chosen_new_ones_of_zero_value_add_nothing():
  source = with_ffn(sparse(), router=RouterConfig('sigmoid', 4))
  target = with_experts(source, 6, top_k=6)
  assert _exact(source, target) is None
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-6


@pytest.mark.parametrize(
  ('router', 'top_k', 'sentence'),
  [
    (RouterConfig(), 1, 'gives new experts a part of the gates'),
    (RouterConfig('sigmoid'), 1, 'may choose new experts, which add nothing yet'),
    (RouterConfig('sigmoid'), 2, 'choose 2 experts in the place of 1'),
  ],
)
def test_more_experts_that_are_not_exact_have_a_reason(router, top_k, sentence):
  source = with_ffn(sparse(), router=router)
  assert sentence in _exact(source, with_experts(source, 6, top_k=top_k))


def test_old_experts_stay_before_the_new_ones_with_their_moments():
  source = upcycled()
  target = with_experts(source, 6)
  old = state_of(source)
  new = grow(old, source, target, PLAIN)
  for before, after in ((old['params'], new['params']), (adam(old).mu, adam(new).mu)):
    for name in ('up', 'down'):
      was, now = (tree['blocks']['ffn']['experts'][name] for tree in (before, after))
      np.testing.assert_array_equal(now[:, :4], was)
    routes = after['blocks']['ffn']['router']['kernel']
    np.testing.assert_array_equal(routes[..., :4], before['blocks']['ffn']['router']['kernel'])
  assert not new['params']['blocks']['ffn']['experts']['down'][:, 4:].any()
  assert not adam(new).nu['blocks']['ffn']['experts']['up'][:, 4:].any()
  assert (int(new['step']), int(new['skipped'])) == (STEP, STEP - UPDATES)


# With tokens and layers


@SLOW
def test_chains_of_tokens_experts_tokens_and_layers_are_exact():
  models = [tiny_model()]
  models.append(grown_model(models[0], {'ffn': 64, 'qkv': 32}, PLAIN))
  models.append(with_experts(models[1], 4, 16))
  models.append(grown_model(models[2], {'ffn.shared': 80, 'proj': 48}, PLAIN))
  models.append(grown_model(models[3], {'ffn.expert': 24}, ZERO_KEYS))
  models.append(dataclasses.replace(models[4], pattern='layer*4'))
  params = [params_of(models[0])]
  for old, new in itertools.pairwise(models):
    config = ZERO_KEYS if new is models[4] else PLAIN
    assert _exact(old, new, config) is None
    params.append(grow_params(params[-1], old, new, config))
  want = logits(models[0], params[0])
  for model, tree in zip(models[1:], params[1:], strict=True):
    assert difference(logits(model, tree), want) < 1e-5
  assert params[-1]['blocks']['ffn']['experts']['keys'].shape == (4, 4, 24, 32)


@SLOW
def test_tokens_experts_and_layers_at_once():
  source = tiny_model()
  target = with_experts(grown_model(source, {'ffn': 64}, PLAIN), 4, 16)
  target = dataclasses.replace(target, pattern='layer*3')
  assert _exact(source, target) is None
  old = state_of(source)
  new = grow(old, source, target, PLAIN)
  assert difference(logits(target, new['params']), logits(source, old['params'])) < 1e-6
  want = define_lm(target).abstract
  for tree in (new['params'], adam(new).mu):
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, want)
  back = parts.remove(new, target, source, PLAIN)
  assert_same(back, old, 'what was there before the growth')


@SLOW
def test_tokens_of_one_layer_of_a_pattern_become_experts():
  source = two_kinds()
  target = with_experts(source, 4, 16)
  assert experts.counts_of(target) == {'layer': 4}, 'a layer without a feed-forward part has some'
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-6


@SLOW
@pytest.mark.parametrize('method', ['zero_keys', 'duplicate'])
def test_tokens_inside_experts_grow_exactly(method):
  config, source = GrowConfig(method), sparse()
  target = grown_model(source, {'ffn.expert': 32}, config)
  assert _exact(source, target, config) is None
  params = params_of(source)
  new = grow_params(params, source, target, config)
  assert difference(logits(target, new), logits(source, params)) < 1e-5


def test_a_group_inside_an_expert_is_refused():
  source = sparse()
  target = grown_model(source, {'ffn.expert': 32}, PLAIN)
  with pytest.raises(UserError, match='each expert is one group; use method=zero_keys'):
    state_lib.check(source, target, PLAIN)


def test_fewer_experts_and_other_routers_are_refused():
  source = sparse()
  with pytest.raises(UserError, match='ffn has 4 experts in the source, and 2 are fewer'):
    state_lib.check(source, with_ffn(source, count=2), PLAIN)
  with pytest.raises(UserError, match=r'balance\.weight is 0\.01 in the source and 0.5'):
    state_lib.check(source, with_ffn(source, balance=LossBalanceConfig(0.5)), PLAIN)
  with pytest.raises(UserError, match='widens a Transformer without experts'):
    state_lib.check_method(upcycled(), 'net2net')


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
  assert_same(parts.remove(new, target, source, PLAIN), old, 'what was there before the growth')


def test_any_experts_can_be_taken_out():
  model = upcycled()
  after = experts.without(model, [1, 3], '--experts')
  assert after.layer.ffn.count == 2
  info, abstract = define_lm(model).info, define_lm(model).abstract
  old = state_of(model)
  kept = expert_arrays.without(info, abstract, [1, 3])
  new = parts.take_experts(old, model, kept, PLAIN)
  for before, now in ((old['params'], new['params']), (adam(old).nu, adam(new).nu)):
    was, left = (tree['blocks']['ffn'] for tree in (before, now))
    np.testing.assert_array_equal(left['experts']['up'], was['experts']['up'][:, jnp.array([1, 3])])
    np.testing.assert_array_equal(
      left['router']['kernel'], was['router']['kernel'][..., jnp.array([1, 3])]
    )
  for numbers, sentence in (
    ([5], 'names expert 5, and model.layer.ffn has the experts 1 to 4'),
    ([1, 2, 3, 4], 'would keep none of its 4 experts'),
    ([1, 2, 3], 'top_k is 2, and there are .*count=1 experts'),
  ):
    with pytest.raises(UserError, match=sentence):
      experts.without(model, numbers, '--experts')


def test_the_most_used_experts_stay_in_their_order():
  model = sparse()
  info, smaller = define_lm(model).info, define_lm(with_ffn(model, count=2)).abstract
  load = jnp.array([[0.1, 0.4, 0.2, 0.3], [0.5, 0.0, 0.4, 0.1]])
  loads = jax.tree.map(lambda one: load if expert_arrays.expert_axis(one) else jnp.zeros(()), info)
  kept = expert_arrays.most_used(loads, info, smaller)
  np.testing.assert_array_equal(kept['blocks']['ffn']['experts']['keys'], [[1, 3], [0, 2]])


# What else knows of experts


def test_only_what_is_new_counts_as_new():
  source = tiny_model()
  growth = growth_from(source, sparse())
  assert growth.old_experts['blocks']['ffn']['experts'] == {'keys': 0, 'values': 0}
  assert growth.old_experts['blocks']['ffn']['shared'] == {'keys': -1, 'values': -1}
  assert growth.old_experts['embedding'] == -1
  assert growth_from(tiny_model(dense=True), upcycled()).old_experts['blocks']['ffn'] == {
    'experts': {'up': 1, 'down': 1},
    'router': {'kernel': 0},
  }
  assert growth_from(sparse(), with_experts(sparse(), 6)).old_experts['blocks']['ffn'][
    'router'
  ] == {'kernel': 4}
  assert growth_from(source, tiny_model(layers=4)).old_experts is None


@SLOW
@pytest.mark.parametrize('name', ['adamw', *OTHERS])
def test_frozen_old_parts_stay_while_new_experts_train(name):
  source = sparse()
  target = with_experts(source, 6)
  growth = growth_from(source, target)
  config = OptimConfig(name=name, old_tokens='freeze', warmup_steps=0, weight_decay=0.0)
  params = params_of(target)
  tx = optim.make_optimizer(config, 100, define_lm(target).info, growth)
  gradient = jax.tree.map(jnp.ones_like, params)
  updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
  of_ffn = updates['blocks']['ffn']
  for array in (of_ffn['experts']['keys'], jnp.moveaxis(of_ffn['router']['kernel'], -1, 1)):
    assert not array[:, :4].any(), 'an old expert changes'
    assert array[:, 4:].all(), 'a new expert does not train'
    assert jnp.all(jnp.abs(array[:, 4:]) < 1), 'an update is too large'
  assert not of_ffn['shared']['keys'].any() and not updates['embedding'].any()


@SLOW
@pytest.mark.parametrize('name', OTHERS)
def test_the_state_of_every_optimizer_fits_the_larger_model(name):
  config = OptimConfig(name=name)
  for source, target in (
    (tiny_model(), sparse()),
    (tiny_model(dense=True), upcycled()),
    (by_bias(sparse()), with_experts(by_bias(sparse()), 6)),
  ):
    params = params_of(source)
    tx = [optim.make_optimizer(config, 100, define_lm(model).info) for model in (source, target)]
    new = grow({'params': params, 'opt_state': tx[0].init(params)}, source, target, PLAIN)
    want = jax.eval_shape(tx[1].init, define_lm(target).abstract)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (new['opt_state'], want)]
    assert shapes[0] == shapes[1], f'the state of {name} does not fit the larger model'
    back = parts.remove(new, target, source, PLAIN)['opt_state']
    want = jax.eval_shape(tx[0].init, define_lm(source).abstract)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (back, want)]
    assert shapes[0] == shapes[1], f'the state of {name} does not fit the model without experts'


def test_the_learning_rate_goes_by_what_a_token_uses():
  few, many = (with_experts(tiny_model(), count, 16) for count in (4, 64))
  rates = [state_lib.rate_factor(tiny_model(), model) for model in (few, many)]
  assert rates[0] > rates[1] > 0.8, 'unused experts lower the rate'


def test_the_table_shows_experts():
  text = table.render(tiny_model(), sparse(), 32)
  assert [line.split() for line in text.splitlines() if 'experts' in line] == [
    ['ffn', 'experts', '0', '4'],
    ['ffn', 'experts', 'of', 'a', 'token', '0', '1'],
  ]
  assert 'ffn.shared tokens' in text and 'ffn.expert tokens' in text
  assert 'ffn experts' in table.render(tiny_model(dense=True), upcycled(), 32)


def test_tokens_of_frozen_groups_are_known_by_their_former_name():
  source = grown_model(tiny_model(), {'ffn': 64}, PLAIN)
  target = with_experts(source, 4, 16)
  check_new_tokens_train(OptimConfig(frozen_groups='2'), source, target)
  with pytest.raises(UserError, match=r'new tokens of ffn\.expert would be in group 1'):
    check_new_tokens_train(OptimConfig(frozen_groups='1'), source, target)


def test_names_before_and_after():
  after = {'qkv', 'ffn.shared', 'ffn.expert'}
  assert former_names('ffn.shared', after)[1] == 'ffn'
  assert former_names('ffn.expert', after) == ('ffn.expert',), 'new tokens are taken for old'
  assert former_names('local.ffn.expert', {'local.ffn.expert'})[1] == 'local.ffn'
  assert former_names('ffn', {'ffn'}) == ('ffn', 'ffn', 'ffn.shared', 'ffn.expert')
  assert former_names('qkv', after) == ('qkv',)


@pytest.mark.parametrize(
  ('make', 'sentence'),
  [
    (lambda: with_experts(tiny_model(dense=True), 4, 16), 'ffn.kind is mlp; leave it out'),
    (lambda: with_experts(sparse(), 6, 16), '--param_tokens=ffn.expert=N --method=zero_keys'),
    (lambda: with_experts(tiny_model(dense=True, bias=True), 4), 'experts have no biases'),
    (lambda: with_experts(tiny_model(), 4, 16, 5), 'top_k is 5, and there are .*=4 experts'),
    (lambda: with_experts(tiny_model(), 0), 'here is 0 for layer; it must be at least 1'),
    (
      lambda: experts.named_counts(two_kinds(), {'local': 4}, '--experts'),
      "the layer 'local'",
    ),
    (
      lambda: experts.named_counts(tiny_model(), 2, '--experts', dense=False),
      'no layer .* has e',
    ),
    (lambda: experts.smaller(sparse(), {'layer': 6}, 'N'), 'shrink cannot make 6 of them'),
    (lambda: experts.smaller(sparse(), {'layer': 4}, '--experts=N'), 'nothing would shrink'),
  ],
)
def test_mistakes_have_a_sentence(make, sentence):
  with pytest.raises(UserError, match=sentence):
    make()


def test_a_layer_without_a_feed_forward_part_gets_no_experts():
  model = tiny_model()
  layer = dataclasses.replace(model.layer, ffn=NoFeedForwardConfig())
  with pytest.raises(UserError, match='no layer of this model has a feed-forward part'):
    experts.named_counts(dataclasses.replace(model, layer=layer), 4, '--experts')
