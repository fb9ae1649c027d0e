"""Experts are added without a change of what the model computes."""

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
  inexact,
  logits,
  loss_and_gradient,
  params_of,
  remove,
  state_of,
)
from mixtures import PLAIN, by_bias, sparse, upcycled, with_experts, with_ffn
from outcomes import assert_same, paths
from tiny import tiny_model, two_kinds
from tiny_run import environment

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  CapacityConfig,
  LossBalanceConfig,
  MLPConfig,
  NoFeedForwardConfig,
  RouterConfig,
  growth,
)
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import plan
from tokenformer_jax.model.execution import DEFAULT
from tokenformer_jax.model.feed_forward import feed_forward
from tokenformer_jax.model.lm import define_lm

SLOW = pytest.mark.slow  # because of what is compiled
ZERO_KEYS = growth('zero_keys')


def _exact(source, target, config=PLAIN):
  plan.check(source, target, config)
  return inexact(source, target, config)


# Names of projections


def test_the_projections_of_experts_have_names():
  model = sparse()
  assert config_lib.token_counts(model)['ffn.shared'] == 48
  assert config_lib.token_counts(model)['ffn.expert'] == 16
  larger = config_lib.with_token_counts(model, {'ffn.expert': 20})
  assert larger.layer.ffn.expert.tokens == 20
  layers = config_lib.Layers({'moe': model.layer})
  both = dataclasses.replace(model, pattern='moe layer', variants=layers)
  counts = config_lib.named_counts(both, {'ffn.expert': 20, 'moe.ffn.expert': 24}, 'here')
  assert (counts['ffn.expert'], counts['moe.ffn.expert'], counts['moe.ffn.shared']) == (20, 24, 48)


# A Pattention with experts beside it


@SLOW
@pytest.mark.parametrize(
  ('score', 'dtype'),
  [('l2_norm_gelu', 'bfloat16'), ('softmax', 'float32'), ('exp_l2_norm', 'float32')],
)
def test_routed_experts_beside_a_pattention_add_exactly_zero(score, dtype):
  """Operation by operation: what XLA makes of a whole model depends on its flags."""
  source, target = tiny_model(score=score), sparse(score)
  old, new = (
    feed_forward(model.layer.ffn, model, execution=DEFAULT, rngs=nnx.Rngs(0))
    for model in (source, target)
  )
  new.shared = old
  new.experts.values[...] = jnp.zeros_like(new.experts.values[...])
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 32)), dtype)
  np.testing.assert_array_equal(new(x)[0], old(x), err_msg='the experts add something')


@SLOW
def test_the_compiled_model_has_the_same_bits_as_before():
  """In a process with XLA's own flags, which the tests change."""
  tests = pathlib.Path(__file__).parent.parent
  folder = tests / 'support'
  program = [sys.executable, str(folder / 'mixtures.py')]
  search = f'{folder}:{tests}:{tests.parent}'
  done = subprocess.run(
    program,
    env=environment()
    | {
      'PYTHONPATH': search,
      'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
    },
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ['True'] * 2, 'some logits change'


def test_the_dense_part_stays_array_for_array_with_its_moments():
  source, target = tiny_model(), sparse()
  old = state_of(source)
  new = jax.tree.map(np.asarray, grow(old, source, target, PLAIN))
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
  assert not _exact(source, target)
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-6


# Copies of an MLP


def test_experts_that_are_copies_compute_what_the_mlp_did():
  source, target = tiny_model(dense=True), upcycled()
  assert not _exact(source, target)
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-5
  for name, kernel in (('up', 'up'), ('down', 'down')):
    copies = np.asarray(new['blocks']['ffn']['experts'][name])
    for i in range(4):
      np.testing.assert_array_equal(copies[:, i], params['blocks']['ffn'][kernel]['kernel'])


@SLOW
def test_experts_can_be_copies_of_a_pattention():
  source = tiny_model()
  router = RouterConfig(top_k=2, renormalize=True)
  target = with_ffn(sparse(), shared=NoFeedForwardConfig(), expert=source.layer.ffn, router=router)
  assert not _exact(source, target)
  old = state_of(source)
  new = grow(old, source, target, PLAIN)
  assert difference(logits(target, new['params']), logits(source, old['params'])) < 1e-5
  assert_same(remove(new, target, source, PLAIN), old, 'what was there before the growth')


@SLOW
def test_copies_have_their_part_of_the_moments():
  """The gradients of copies add up to the old one; each has K/E of the tokens."""
  source, count = tiny_model(dense=True), 4
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
  assert sentence in reason if sentence else not reason


# More experts


@SLOW
def test_experts_that_a_bias_keeps_back_change_nothing():
  source = by_bias(sparse())
  target = with_experts(source, 6)
  assert not _exact(source, target)
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
  assert not _exact(source, target)
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
  new = jax.tree.map(np.asarray, grow(old, source, target, PLAIN))
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
  routed = with_experts(tiny_model(), 4, 16)
  larger = grown_model(routed, {'ffn.shared': 80, 'proj': 48}, PLAIN)
  within = grown_model(larger, {'ffn.expert': 24}, ZERO_KEYS)
  models = [tiny_model(), routed, larger, within, dataclasses.replace(within, pattern='layer*4')]
  first = params = params_of(models[0])
  for old, new in itertools.pairwise(models):
    config = ZERO_KEYS if new is within else PLAIN
    assert not _exact(old, new, config)
    params = grow_params(params, old, new, config)
  assert difference(logits(models[-1], params), logits(models[0], first)) < 1e-5
  assert params['blocks']['ffn']['experts']['keys'].shape == (4, 4, 24, 32)


@SLOW
def test_tokens_experts_and_layers_at_once():
  source = tiny_model()
  target = with_experts(grown_model(source, {'ffn': 64}, PLAIN), 4, 16)
  target = dataclasses.replace(target, pattern='layer*3')
  assert not _exact(source, target)
  old = state_of(source)
  new = grow(old, source, target, PLAIN)
  assert difference(logits(target, new['params']), logits(source, old['params'])) < 1e-6
  want = define_lm(target).abstract
  for tree in (new['params'], adam(new).mu):
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, want)
  back = remove(new, target, source, PLAIN)
  assert_same(back, old, 'what was there before the growth')


@SLOW
def test_tokens_of_one_layer_of_a_pattern_become_experts():
  source = two_kinds()
  target = with_experts(source, 4, 16)
  assert target.experts.keys() == {'layer'}, 'a layer without a feed-forward part has some'
  params = params_of(source)
  new = grow_params(params, source, target, PLAIN)
  assert difference(logits(target, new), logits(source, params)) < 1e-6


@SLOW
def test_tokens_inside_experts_are_duplicated_exactly():
  config, source = growth('duplicate'), sparse()
  target = grown_model(source, {'ffn.expert': 32}, config)
  assert not _exact(source, target, config)
  params = params_of(source)
  new = grow_params(params, source, target, config)
  assert difference(logits(target, new), logits(source, params)) < 1e-5


def test_a_group_inside_an_expert_is_refused():
  source = sparse()
  target = grown_model(source, {'ffn.expert': 32}, PLAIN)
  with pytest.raises(UserError, match='each expert is one group; use method=zero_keys'):
    plan.check(source, target, PLAIN)


def test_fewer_experts_and_other_routers_are_refused():
  source = sparse()
  with pytest.raises(UserError, match='ffn has 4 experts in the source, and 2 are fewer'):
    plan.check(source, with_ffn(source, count=2), PLAIN)
  with pytest.raises(UserError, match=r'balance\.weight is 0\.01 in the source and 0.5'):
    plan.check(source, with_ffn(source, balance=LossBalanceConfig(0.5)), PLAIN)
