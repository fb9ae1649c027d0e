"""More layers: they compute nothing at first, learn at once, and come out again bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  DENSE,
  DOUBLE,
  IDS,
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
  trained,
)
from outcomes import assert_same, paths
from tiny import gated_model, linear, tiny_model, tiny_vit, two_kinds

from tokenformer_jax.config import (
  GrowConfig,
  LayerConfig,
  NoProjectionConfig,
  ParallelConfig,
  PostNormConfig,
  PreNormConfig,
  SandwichConfig,
  SkiplessConfig,
  growth,
  matching,
)
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import diff_table, plan
from tokenformer_jax.grow.steps import layers as layers_lib
from tokenformer_jax.model import models
from tokenformer_jax.model.lm import Execution, define_lm, unstack
from tokenformer_jax.runs.checkpoint_meta import Ancestor
from tokenformer_jax.steps.last_growth import last_growth

SLOW = pytest.mark.slow  # because of what is compiled
PLAIN, DUPLICATE = (growth(one, place='between') for one in ('group', 'duplicate'))
BEHIND, COPIES, STACKED, WHOLE = (
  GrowConfig(place=place) for place in ('behind', 'copies', 'stacked_copies', 'whole_copies')
)
SOURCE = tiny_model()
TARGET = tiny_model(layers=4)
KINDS = two_kinds()  # (local layer)*2 local
MORE_KINDS = dataclasses.replace(KINDS, pattern='(local layer)*4 local*2')


def _layers(pattern, target, place='between'):
  """Return which layers of a pattern are old, from 1 on, and 0 for new ones."""
  one, other = (dataclasses.replace(KINDS, pattern=text) for text in (pattern, target))
  return [0 if old is None else old + 1 for old in matching.old_layers(one, other, place)]


def _with_wiring(model, wiring, **changes):
  layer: LayerConfig = dataclasses.replace(model.layer, wiring=wiring, **changes)
  return dataclasses.replace(model, layer=layer)


# Which layers are new


@pytest.mark.parametrize(
  ('pattern', 'target', 'place', 'want'),
  [
    ('layer*2', 'layer*4', 'between', [1, 0, 2, 0]),
    ('layer*2', 'layer*4', 'behind', [1, 2, 0, 0]),
    ('layer*3', 'layer*4', 'copies', [1, 2, 3, 0]),
    ('layer*2', 'layer*4', 'stacked_copies', [1, 2, 0, 0]),
    ('local*2 layer', 'local*4 layer', 'stacked_copies', [1, 2, 0, 0, 3]),
    ('layer*2', 'layer*7', 'between', [1, 0, 0, 2, 0, 0, 0]),
    ('(local layer)*2', '(local layer)*4', 'between', [1, 2, 0, 0, 3, 4, 0, 0]),
    ('(local layer)*2', '(local layer)*3', 'behind', [1, 2, 3, 4, 0, 0]),
    ('local*2 layer', 'local*4 layer', 'between', [1, 0, 2, 0, 3]),
    ('local*2 layer', 'local*4 layer', 'behind', [1, 2, 0, 0, 3]),
    ('local*2 layer', '(local*2 layer)*2', 'behind', [1, 2, 3, 0, 0, 0]),
    ('layer*2', '(local layer)*2', 'between', [0, 1, 0, 2]),
    ('layer', 'local layer local', 'behind', [0, 1, 0]),
  ],
)
def test_the_layers_that_are_old(pattern, target, place, want):
  assert _layers(pattern, target, place) == want


@pytest.mark.parametrize('place', ['between', 'behind'])
def test_old_layers_keep_their_order_and_their_names(place):
  rng = np.random.default_rng(0)
  for _ in range(200):
    after = rng.choice(['local', 'layer'], rng.integers(1, 12))
    before = after[np.sort(rng.permutation(len(after))[: rng.integers(1, len(after) + 1)])]
    found = [one for one in _layers(' '.join(before), ' '.join(after), place) if one]
    assert found == list(range(1, len(before) + 1)), f'{before} in {after}'


def test_patterns_whose_layers_are_not_the_sources_are_refused():
  with pytest.raises(UserError, match="does not have the source's layers in their order"):
    _layers('local layer', 'layer*2 local')


def test_impossible_numbers_of_layers_are_refused():
  assert layers_lib.wanted(SOURCE, 6, None).pattern == 'layer*6'
  rows = dataclasses.replace(KINDS, pattern='(local layer)*2')
  assert layers_lib.wanted(rows, 8, None).pattern == '(local layer)*4'
  for model, layers, sentence in (
    (SOURCE, 1, 'at least as many'),
    (rows, 7, 'a multiple of the row'),
    (KINDS, 8, 'write the new pattern: pattern='),
  ):
    with pytest.raises(UserError, match=sentence):
      layers_lib.wanted(model, layers, None)
  with pytest.raises(UserError, match='give one of them'):
    layers_lib.wanted(SOURCE, 4, 'layer*4')


# What the grown model computes


def _one_by_one(model, params):
  """The logits without a loop over layers, which XLA rounds as it likes."""
  definition = define_lm(model, Execution(attention='xla', layers='list'))
  return np.asarray(definition.bind(unstack(params, model))(IDS[:, :-1])[0])


@functools.cache
def _grown(place):
  """The state of TARGET."""
  return grow(state_of(SOURCE), SOURCE, TARGET, GrowConfig(place=place))


def _assert_exact(source, target, config=PLAIN, *, within=0.0, compute=logits, grown=None):
  plan.check(source, target, config)
  assert not inexact(source, target, config), 'an exact growth is said not to be'
  params = params_of(source)
  grown = grown or grow_params(params, source, target, config)
  assert jax.tree.map(jnp.shape, grown) == jax.tree.map(
    lambda a: a.shape, define_lm(target).abstract
  ), 'the arrays are not those of the target'
  got = difference(compute(target, grown), compute(source, params))
  assert got <= within, f'new layers change the logits by {got}'
  return grown


@SLOW
@pytest.mark.parametrize(
  ('source', 'target', 'config'),
  [
    (KINDS, MORE_KINDS, BEHIND),
    (
      dataclasses.replace(KINDS, pattern='layer*2'),
      dataclasses.replace(KINDS, pattern='layer local layer*2'),
      PLAIN,
    ),
    (tiny_model(**DENSE), tiny_model(**DENSE, layers=4), COPIES),
    (KINDS, MORE_KINDS, STACKED),
  ],
)
def test_new_layers_change_no_logit(source, target, config):
  _assert_exact(source, target, config, compute=_one_by_one)


@pytest.mark.parametrize('config', [PLAIN, COPIES, STACKED])
def test_new_layers_change_no_bit_of_compiled_logits(config):
  _assert_exact(SOURCE, TARGET, config, grown=_grown(config.place)['params'])


@SLOW
def test_a_transformer_gets_wider_and_deeper():
  source = tiny_model(**DENSE, tied_head=False)
  target = tiny_model(**DENSE, tied_head=False, layers=4, width=64, heads=8)
  _assert_exact(source, target, growth('net2net', place='between'), within=1e-5)
  with pytest.raises(UserError, match='would stay equal for ever'):
    plan.check(source, target, growth('net2net'))


@SLOW
def test_branches_in_parallel_with_a_skip_connection():
  of = [_with_wiring(model, ParallelConfig(skip=True)) for model in (SOURCE, TARGET)]
  _assert_exact(*of)


@pytest.mark.parametrize(
  ('model', 'arrays'),
  [
    (
      tiny_model(**DENSE),
      {'attention/proj/kernel', 'attention/proj/bias', 'ffn/down/kernel', 'ffn/down/bias'},
    ),
    (linear(tiny_model()), {'attention/proj/values', 'ffn/values'}),
    (_with_wiring(gated_model(), PreNormConfig()), {'attention/out/values'}),
    (tiny_vit(), {'attention/proj/values', 'ffn/values'}),
  ],
)
def test_metadata_marks_the_residual_outputs_of_a_layer(model, arrays):
  info = jax.tree_util.tree_leaves_with_path(models.define(model).info['blocks'])
  found = {
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, one in info
    if one.adds_to_residual
  }
  assert found == arrays


@SLOW
@pytest.mark.parametrize(
  ('norm', 'before', 'config'),
  [('rms_offset', True, COPIES), ('affine', False, COPIES), ('rms_plain', True, PLAIN)],
)
def test_branches_that_end_with_a_norm(norm, before, config):
  """The scale of the norm is zero, so that small steps change little."""
  models = [
    _with_wiring(tiny_model(**DENSE | {'norm': norm}, layers=layers), SandwichConfig(before))
    for layers in (2, 4)
  ]
  grown = _assert_exact(*models, config, compute=_one_by_one)
  block, has_scale = grown['blocks'], norm != 'rms_plain'
  assert np.any(block['ffn']['down']['kernel'][-1]) == has_scale
  if has_scale:
    np.testing.assert_array_equal(
      block['ffn_after_norm']['scale'][-1], -1 if norm == 'rms_offset' else 0
    )


def test_whole_copies_are_not_exact_and_compute_what_their_layers_compute():
  assert 'once more' in inexact(SOURCE, TARGET, WHOLE)
  grown = _grown('whole_copies')['params']
  for path, array in paths(grown).items():
    if path.startswith('blocks'):
      np.testing.assert_array_equal(array[::2], array[1::2], err_msg=f'{path} is no copy')
  assert difference(logits(TARGET, grown), logits(SOURCE, params_of(SOURCE))) > 1e-3


@pytest.mark.parametrize('place', ['stacked_copies', 'whole_stacked_copies'])
def test_stacked_copies_repeat_the_layers_in_their_order_and_have_no_moments(place):
  is_whole = place == 'whole_stacked_copies'
  assert ('once more' in inexact(SOURCE, TARGET, GrowConfig(place=place))) == is_whole
  params, grown = paths(params_of(SOURCE)), _grown(place)
  for path, array in paths(grown['params']).items():
    if path.startswith('blocks'):
      want = params[path][[0, 1, 0, 1]]
      if not is_whole and path in ('blocks/attention/proj/values', 'blocks/ffn/values'):
        want[2:] = 0
      np.testing.assert_array_equal(array, want, err_msg=path)
  for path, array in paths(adam(grown).nu).items():
    if path.startswith('blocks'):
      assert not array[2:].any(), path


def test_stacked_copies_stay_within_their_repeat():
  copied = layers_lib._stacked(['a', 'b', 'b', 'b', 'b', 'a'], [0, 1, 2, None, None, 3])
  assert copied == [None, None, None, 1, 2, None]


def test_new_layers_are_drawn_as_in_a_new_model_and_their_outputs_are_zero():
  grown = paths(_grown('between')['params'])
  flagged = {
    jax.tree_util.keystr(path, simple=True, separator='/')
    for path, one in jax.tree_util.tree_leaves_with_path(define_lm(TARGET).info)
    if one.adds_to_residual
  }
  zero = {path for path in grown if path.startswith('blocks') and not grown[path][[1, 3]].any()}
  assert zero == flagged == {'blocks/attention/proj/values', 'blocks/ffn/values'}
  keys = grown['blocks/ffn/keys'][[1, 3]]
  assert abs(keys.std() / TARGET.init.std - 1) < 0.1, 'new keys have another deviation'
  assert not np.array_equal(*keys), 'two new layers are equal'


def test_copies_are_of_the_layer_before():
  params = paths(params_of(SOURCE))
  grown = paths(_grown('copies')['params'])
  for path in ('blocks/ffn/keys', 'blocks/attention/query/values'):
    np.testing.assert_array_equal(grown[path], params[path][[0, 0, 1, 1]])
  values = grown['blocks/ffn/values']
  np.testing.assert_array_equal(values[[0, 2]], params['blocks/ffn/values'])
  assert not values[[1, 3]].any(), 'a copy adds something'


@SLOW
def test_layers_with_old_tokens_and_layers_with_new_ones():
  zero = growth('zero_keys')
  target = dataclasses.replace(grown_model(SOURCE, {'ffn': 64}, zero), pattern='layer*4')
  grown = paths(_assert_exact(SOURCE, target, zero, within=1e-6))
  keys = grown['blocks/ffn/keys']
  assert not keys[[0, 2], 48:].any(), 'new tokens of old layers have keys'
  assert keys[[1, 3]].any(axis=-1).all(), 'a token of a new layer has no key'
  alone = grown_model(SOURCE, {'ffn': 64}, zero)
  tokens_alone = paths(grow_params(params_of(SOURCE), SOURCE, alone, zero))
  np.testing.assert_array_equal(
    grown['blocks/ffn/values'][[0, 2]], tokens_alone['blocks/ffn/values']
  )


# The optimizer


@functools.cache
def _gradients():
  grown = _grown('between')['params']
  return loss_and_gradient(SOURCE)(params_of(SOURCE)), loss_and_gradient(TARGET)(grown)


@SLOW
def test_the_outputs_of_new_layers_have_a_gradient_at_once():
  (_, small), (_, large) = _gradients()
  small, large = paths(small), paths(large)
  for path, gradient in large.items():
    if not path.startswith('blocks'):
      continue
    new = np.abs(gradient[[1, 3]]).reshape(2, -1).max(axis=1)
    adds = path in ('blocks/attention/proj/values', 'blocks/ffn/values')
    assert (new > 0).all() if adds else not new.any(), path
    np.testing.assert_allclose(gradient[[0, 2]], small[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize('place', ['between', 'copies', 'whole_copies'])
def test_moments_of_new_layers(place):
  state, grown = state_of(SOURCE), _grown(place)
  for order in ('mu', 'nu'):
    old, new = (paths(getattr(adam(one), order)) for one in (state, grown))
    for path, array in old.items():
      if path.startswith('blocks'):
        np.testing.assert_array_equal(new[path][[0, 2]], array, err_msg=path)
        want = array if place == 'whole_copies' else np.zeros_like(array)
        np.testing.assert_array_equal(new[path][[1, 3]], want, err_msg=path)
      else:
        np.testing.assert_array_equal(new[path], array, err_msg=path)
  assert int(grown['step']) == STEP


def _born(target=TARGET, config=PLAIN, model=SOURCE):
  return last_growth((Ancestor('grow', 'somewhere', STEP, model, config, UPDATES),), target)


def test_the_optimizer_is_told_of_new_layers():
  def old_layers(growth):
    return growth.old['blocks']['ffn']['keys'].ranges.get('layers')

  assert old_layers(_born()) == ((0, 1), (2, 3))
  assert old_layers(_born(config=BEHIND)) == ((0, 1), (1, 2))
  assert old_layers(_born(SOURCE)) is None
  growth = _born(MORE_KINDS, model=KINDS)
  assert growth.old.keys() == define_lm(MORE_KINDS).abstract.keys()


@SLOW
@pytest.mark.parametrize(
  ('how', 'were', 'new'), [(COPIES, [0, 2], [1, 3]), (STACKED, [0, 1], [2, 3])]
)
def test_all_new_arrays_learn_and_frozen_layers_do_not(how, were, new):
  target = dataclasses.replace(grown_model(SOURCE, {'ffn': 64}, how), pattern='layer*4')
  grown = grow(state_of(SOURCE), SOURCE, target, how)
  before = paths(jax.tree.map(np.array, grown['params']))
  moments = paths(jax.tree.map(np.array, adam(grown).mu))
  after = trained(grown, target, 20, _born(target, how), old_tokens='freeze')
  for path, array in paths(after['params']).items():
    if not path.startswith('blocks'):
      continue
    changed = array != before[path]
    assert changed[new].any(axis=-1).all(), f'a row of {path} in a new layer is dead'
    old = changed[were]
    if path.startswith('blocks/ffn'):
      assert old[:, 48:].any(axis=-1).all(), f'a new token of {path} is dead'
      old = old[:, :48]
    assert not old.any(), f'old layers of {path} move'
  first, last = (one['blocks/ffn/keys'][were, :48] for one in (moments, paths(adam(after).mu)))
  np.testing.assert_array_equal(last, first, err_msg='moments of frozen layers')


# Back again


@pytest.mark.parametrize(
  ('source', 'target', 'how'),
  [
    (SOURCE, TARGET, PLAIN),
    pytest.param(
      SOURCE,
      tiny_model(layers=5, tokens={'ffn': 64}, reference={'ffn': 48}),
      BEHIND,
      marks=SLOW,
    ),
    pytest.param(
      KINDS,
      dataclasses.replace(KINDS, pattern='local layer*2 local*2 layer local'),
      COPIES,
      marks=SLOW,
    ),
    (SOURCE, TARGET, STACKED),
  ],
)
def test_removing_gives_back_the_old_model(source, target, how):
  state = state_of(source)
  grown = grow(state, source, target, how)
  assert_same(remove(grown, target, source, how), state, 'remove')


# Refusals and messages


@pytest.mark.parametrize(
  ('wiring', 'sentence'),
  [
    (PostNormConfig(), 'model.layer.wiring.kind=post_norm it is normalized again'),
    (SkiplessConfig(), 'wiring.kind=skipless there is no skip connection'),
    (ParallelConfig(), 'wiring.kind=parallel there is no skip connection'),
  ],
)
def test_wirings_that_pass_nothing_on_are_refused(wiring, sentence):
  models = [_with_wiring(model, wiring) for model in (SOURCE, TARGET)]
  with pytest.raises(UserError, match=sentence):
    plan.check(*models, PLAIN)
  plan.check(*models, WHOLE)


def test_mixers_without_an_output_projection_are_refused():
  mixer = dataclasses.replace(SOURCE.layer.mixer, proj=NoProjectionConfig())
  models = [_with_wiring(model, SOURCE.layer.wiring, mixer=mixer) for model in (SOURCE, TARGET)]
  with pytest.raises(UserError, match='no output projection that could be zero'):
    plan.check(*models, PLAIN)


@pytest.mark.parametrize(
  ('source', 'target', 'how', 'sentence'),
  [
    (SOURCE, SOURCE, BEHIND, 'place=behind is for new layers, and this growth has none'),
    (TARGET, SOURCE, PLAIN, 'growth only adds layers'),
    (SOURCE, tiny_model(layers=4, width=64), PLAIN, 'model.width is 32 in the source'),
    (
      SOURCE,
      dataclasses.replace(grown_model(SOURCE, DOUBLE, DUPLICATE), pattern='layer*4'),
      growth('duplicate', place='copies'),
      'would stay equal for ever',
    ),
    (
      tiny_model(**DENSE),
      tiny_model(**DENSE, layers=4, width=64),
      PLAIN,
      'growth by group changes',
    ),
  ],
)
def test_impossible_growths_in_depth_are_refused(source, target, how, sentence):
  with pytest.raises(UserError, match=sentence):
    plan.check(source, target, how)


def _lineage(*how):
  """Growths of SOURCE without training between them; each is at the step where it was."""
  return tuple(Ancestor('grow', 'somewhere', STEP, SOURCE, one, UPDATES) for one in how)


TWINS = growth(new_keys='copies')
DEEPER = plan.plan_growth(SOURCE, TARGET, GrowConfig(place='copies'))


@pytest.mark.parametrize('how', [(DUPLICATE,), (TWINS,), (DUPLICATE, PLAIN)])
def test_copies_that_were_not_trained_are_not_copied_again(how):
  with pytest.raises(UserError, match='train the model before you add layers, or use place=bet'):
    plan.check_no_duplicated_layers(DEEPER, _lineage(*how), STEP)
  between = plan.plan_growth(SOURCE, TARGET, GrowConfig(place='between'))
  plan.check_no_duplicated_layers(between, _lineage(*how), STEP)
  plan.check_no_duplicated_layers((), _lineage(*how), STEP)  # No layer is added.
  plan.check_no_duplicated_layers(DEEPER, _lineage(*how), STEP + 1)  # They have been trained.


@pytest.mark.parametrize('how', [PLAIN, growth('duplicate', noise=0.1)])
def test_tokens_that_differ_are_copied(how):
  plan.check_no_duplicated_layers(DEEPER, _lineage(how), STEP)


def test_the_table_has_the_layers():
  lines = diff_table.render(KINDS, MORE_KINDS, 32).splitlines()
  rows = {line.split('  ')[0]: line.split()[-4:-2] for line in lines[1:]}
  assert rows['layers'] == ['5', '10']
  assert rows['local layers'] == ['3', '6']
  assert rows['layer layers'] == ['2', '4']
