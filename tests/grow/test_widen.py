"""A wider Transformer computes what the narrow one did, and its moments are those it would have."""

import hub_folders
import numpy as np
import pytest
from growing import (
  DENSE,
  adam,
  assert_shared,
  difference,
  grow,
  grow_params,
  inexact,
  logits,
  loss_and_gradient,
  moments_and_gradient,
  params_of,
  state_of,
)
from outcomes import paths
from tiny import tiny_model, tiny_vit

from tokenformer_jax.config import Layers, growth
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import plan
from tokenformer_jax.grow.steps import widen

pytestmark = pytest.mark.slow  # because of what is compiled
HYPER, NET2NET = growth(method='hypercloning'), growth(method='net2net')
FILL, NEURONS = growth(method='net2net_fill'), growth(method='neurons')
TWICE = {'width': 64, 'heads': 8}
ODD = {**TWICE, 'ffn_width': 300}  # no multiple of the 128 units there are
LEARNED = {'position_embedding': 'learned', 'rotary': 0}

PLAIN = {'dense': True, 'final_norm': 'plain', 'tied_head': False}
CASES = {
  'plain': (PLAIN, TWICE),
  'gpt': ({**DENSE, **LEARNED}, TWICE),
  'no norm at the end': ({**PLAIN, 'bias': True, 'final_norm': 'none'}, TWICE),
  'three times': ({**DENSE, 'rotary': 0}, {'width': 96, 'heads': 12}),
}


def _models(changes, wider):
  return tiny_model(**changes), tiny_model(**{**changes, **wider})


@pytest.mark.parametrize(
  ('case', 'config'),
  [
    ('gpt', HYPER),
    ('three times', HYPER),
    ('plain', NET2NET),
    ('no norm at the end', NET2NET),
  ],
)
def test_a_wider_model_computes_the_same(case, config):
  changes, wider = CASES[case]
  source, target = _models(changes, ODD | wider if config.method.kind == 'net2net' else wider)
  plan.check(source, target, config)
  assert not inexact(source, target, config), 'an exact method is said not to be'
  params = params_of(source)
  wide = grow_params(params, source, target, config)
  got = difference(logits(target, wide), logits(source, params))
  assert got <= 1e-5, f'{config.method.kind} changes the logits by {got}'
  if config.method.kind == 'net2net':  # whose copies do not stand in the order of the units
    return
  query, size = paths(wide)['blocks/attention/query/kernel'], source.width
  assert not np.any(query[:, :size] * query[:, size : 2 * size]), 'two copies are read by a weight'
  assert not np.all(query[:, :size] == query[:, size : 2 * size], axis=-1).any(), (
    'two copies of a unit are read alike, so that they have one gradient and stay equal'
  )


def test_more_units_inside_the_feed_forward_layer_alone():
  source, target = _models(DENSE, {'ffn_width': 150})
  params = params_of(source)
  wide = grow_params(params, source, target, NET2NET)
  assert difference(logits(target, wide), logits(source, params)) <= 1e-5
  old, new = paths(params), paths(wide)
  np.testing.assert_array_equal(
    new['blocks/attention/query/kernel'], old['blocks/attention/query/kernel']
  )
  assert new['blocks/ffn/up/kernel'].shape == (2, 32, 150)


@pytest.mark.parametrize(
  ('changes', 'wider', 'config'),
  [
    ({**DENSE, 'tied_head': False}, TWICE, HYPER),
    ({**DENSE, **LEARNED}, ODD, NET2NET),
  ],
  ids=['hypercloning', 'net2net, tied'],
)
def test_moments_are_those_of_the_wide_models_gradient(changes, wider, config):
  source, target = _models(changes, wider)
  params = params_of(source)
  _, small = loss_and_gradient(source)(params)
  _, wide = loss_and_gradient(target)(grow_params(params, source, target, config))
  (step,) = plan.plan_growth(source, target, config)
  for path, (first, second, want) in moments_and_gradient(step, small, wide).items():
    if np.max(np.abs(want)) > 1e-6:  # the gradient of a key's bias is zero but for rounding
      assert_shared(first, second, want, path)


def test_net2net_fill_puts_the_old_matrix_into_the_corner():
  source, target = _models(DENSE, {'width': 48, 'heads': 4})
  state = state_of(source)
  wide = grow(state, source, target, FILL)
  new, mu = paths(wide['params']), paths(adam(wide).mu)
  old_mu = paths(adam(state).mu)
  for path, old in paths(state['params']).items():
    corner = tuple(slice(size) for size in old.shape)
    np.testing.assert_array_equal(new[path][corner], old, err_msg=f'{path} is not in the corner')
    np.testing.assert_array_equal(mu[path][corner], old_mu[path], err_msg=f'moment of {path}')
    rest = mu[path].copy()
    rest[corner] = 0
    assert not rest.any(), f'{path} has moments for what is new'
  assert new['blocks/ffn/up/kernel'][:, 32:].any(), 'the new blocks are zero'


@pytest.mark.parametrize(
  'config',
  [FILL, growth('net2net', noise=0.05)],
  ids=['net2net_fill', 'net2net with noise'],
)
def test_inexact_widening_gives_a_reason(config):
  source, target = _models(DENSE, TWICE)
  params = params_of(source)
  wide = grow_params(params, source, target, config)
  assert inexact(source, target, config), 'the logits change and no reason is given'
  assert difference(logits(target, wide), logits(source, params)) > 1e-3, 'exact after all'


@pytest.mark.parametrize(
  ('changes', 'wider', 'config', 'sentence'),
  [
    (
      DENSE,
      {'width': 48, 'heads': 6},
      NET2NET,
      'width 48 is not a multiple of the 32.*net2net_fill',
    ),
    (DENSE, {'width': 64, 'heads': 4}, HYPER, '4 heads of width 16.*so width 64 has 8 heads'),
    (DENSE, {'width': 16, 'heads': 4}, FILL, 'width=32, and 16 is smaller'),
    (DENSE, {'ffn_width': 64}, NET2NET, 'ffn_width=128, and 64 is smaller'),
    (
      DENSE,
      {'ffn_width': 150},
      HYPER,
      'ffn_width 150 is not a multiple of the 128.*method=net2net',
    ),
    (
      {**DENSE, 'final_norm': 'plain'},
      TWICE,
      NET2NET,
      'tied head under final_norm=plain cannot be widened exactly.*net2net_fill',
    ),
    ({**DENSE, 'final_norm': 'none'}, TWICE, HYPER, 'tied head under final_norm=none'),
    (DENSE, ODD, NEURONS, 'needs ffn_width=N, and keeps the width and the heads; leave'),
    (DENSE, {'ffn_width': 64}, NEURONS, 'ffn_width=128, and 64 is smaller'),
  ],
)
def test_impossible_widening_is_refused_in_one_sentence(changes, wider, config, sentence):
  source, target = _models(changes, wider)
  with pytest.raises(UserError, match=sentence):
    plan.check(source, target, config)


def test_layers_of_other_heads_are_not_widened():
  model = _with_other_layer(heads=2)
  with pytest.raises(UserError, match='different numbers of heads, or heads of different widths'):
    widen.resized(model, width=64)


def test_mlps_of_other_widths_are_kept_or_told():
  model = _with_other_layer(ffn_width=64)
  with pytest.raises(UserError, match=r'MLPs of this model have different widths.*leave it out'):
    widen.resized(model, width=64, ffn_width=256)
  assert widen.resized(model, width=64).variants['own'].ffn.width == 64


def _with_other_layer(**changes):
  """A model with a layer `own` beside `model.layer`."""
  variants = Layers({'own': tiny_model(**DENSE, **changes).layer})
  return tiny_model(**DENSE, pattern='own layer', variants=variants)


def test_heads_of_queries_that_no_head_of_keys_serves_are_told():
  model = hub_folders.model('llama')
  with pytest.raises(UserError, match='serves 2 heads of queries, and 9 is not a multiple of 2'):
    widen.resized(model, width=36, heads=9)
  model = hub_folders.model('mistral')
  with pytest.raises(UserError, match=r'6 heads of queries with 3 of keys .* 4 with 2.* heads=8'):
    plan.check(model, widen.resized(model, width=32, heads=6), NET2NET)


def test_positions_by_a_formula_are_told():
  source, target = (tiny_vit(**DENSE, **changes) for changes in ({}, TWICE))
  with pytest.raises(UserError, match='position_embedding=sincos has other numbers'):
    plan.check(source, target, NET2NET)


def test_net2net_fill_may_widen_a_transformer_with_a_plain_final_norm():
  source, target = _models({**DENSE, 'final_norm': 'plain'}, {'width': 40, 'heads': 4})
  assert plan.check(source, target, FILL)
