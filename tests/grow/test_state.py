"""Growth is exact, or said not to be, and takes the optimizer's state along."""

import concurrent.futures
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
  SMALL,
  STEP,
  UPDATES,
  adam,
  assert_shared,
  by_name,
  difference,
  forward,
  grow,
  grow_params,
  inexact,
  logits,
  loss_and_gradient,
  mesh_of,
  moments_and_gradient,
  optimizer,
  params_of,
  schedule_count,
  state_of,
)
from outcomes import assert_same, paths
from tiny import gated_model, tiny_model

from tokenformer_jax.config import (
  GrowConfig,
  InitConfig,
  ModelConfig,
  growth,
  pattentions,
  token_counts,
)
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import apply, plan
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.steps import step as step_lib

SLOW = pytest.mark.slow  # because each case compiles two models
ZERO_KEYS, DUPLICATE = growth(method='zero_keys'), growth(method='duplicate')
GROUP = growth(method='group')
SCORES = ('l2_norm_gelu', 'gelu_l2_norm', 'gelu_l1_norm', 'softmax', 'exp_l2_norm')
LARGER = by_name(32, 48, 64)
CHAINS = {
  'zero_keys': [
    (ZERO_KEYS, LARGER),
    (ZERO_KEYS, by_name(32, 48, 96)),
    (ZERO_KEYS, by_name(32, 64, 100)),
  ],
  'duplicate': [
    (DUPLICATE, DOUBLE),
    (DUPLICATE, DOUBLE | {'proj': 160}),
    (DUPLICATE, by_name(144, 160, 192)),
  ],
  'group': [
    (GROUP, LARGER),
    (GROUP, by_name(40, 48, 96)),
    (GROUP, by_name(48, 64, 100)),
  ],
  'group and others': [
    (DUPLICATE, DOUBLE),
    (GROUP, by_name(64, 96, 128)),
    (ZERO_KEYS, by_name(70, 100, 140)),
  ],
  'mixed': [
    (ZERO_KEYS, LARGER),
    (DUPLICATE, by_name(64, 96, 128)),
    (ZERO_KEYS, by_name(70, 100, 140)),
  ],
}


def _chain(name, model):
  """The last model, and the function from the parameters of the first to those of the last."""
  steps = []
  for config, counts in CHAINS[name]:
    target = grown_model(model, counts, config)
    plan.check(model, target, config)
    assert not inexact(model, target, config), f'{config.method.kind} is exact and said not to be'
    steps.append((model, target, config))
    model = target

  def run(state):
    for source, target, config in steps:
      state = grow(state, source, target, config)
    return state

  return model, run


@pytest.mark.parametrize(
  ('chain', 'score', 'tied'),
  [
    ('zero_keys', 'l2_norm_gelu', True),
    pytest.param('duplicate', 'softmax', False, marks=SLOW),
    pytest.param('mixed', 'gelu_l1_norm', False, marks=SLOW),
    pytest.param('group', 'exp_l2_norm', True, marks=SLOW),
    pytest.param('group and others', 'gelu_l2_norm', True, marks=SLOW),
  ],
)
def test_a_chain_of_three_growths_changes_no_logit(chain, score, tied):
  source = tiny_model(score=score, tied_head=tied)
  target, run = _chain(chain, source)
  params = params_of(source)
  grown = run({'params': params, 'opt_state': ()})['params']
  assert jax.tree.map(jnp.shape, grown) == jax.tree.map(
    lambda a: a.shape, define_lm(target).abstract
  ), 'the arrays are not those of the target'
  got = difference(logits(target, grown), logits(source, params))
  # XLA fuses the operations of the other scores in another way in the larger program.
  apart = {'l2_norm_gelu': 0, 'softmax': 0}.get(score, 1e-6)
  allowed = apart if chain == 'group' else 1e-5
  assert got <= allowed, f'three growths by {chain} change the logits by {got}'


@SLOW
def test_a_gated_attention_unit_grows_exactly():
  source = gated_model(scores='squared_relu', window=5)
  assert token_counts(source) == {'uvq': 24, 'out': 40}
  different, reason = _grown_and_said(source, {'uvq': 32, 'out': 56}, ZERO_KEYS)
  assert not reason, 'the growth is exact and said not to be'
  # Against float64, the rounding of the source alone is 1.3e-6.
  assert different <= 3e-6, f'growth changes the logits by {different}'


@SLOW
def test_bfloat16_activations_add_at_most_one_rounding():
  source = tiny_model()
  target, run = _chain('duplicate', source)
  params = params_of(source)
  grown = run({'params': params, 'opt_state': ()})['params']
  want = logits(source, params, 'bfloat16')
  got = np.max(np.abs(logits(target, grown, 'bfloat16') - want)) / np.max(np.abs(want))
  assert got <= 2**-8, f'growth changes logits in bfloat16 by {got}, more than a rounding'


@SLOW
def test_growth_on_a_mesh_is_growth():
  """Under jit, straight into the target's shardings, of parameters and moments."""
  source = tiny_model()
  target, run = _chain('group and others', source)
  old = state_of(source)
  alone = jax.jit(run)(old)
  mesh = mesh_of(fsdp=4, tokens=2)
  places = [
    step_lib.state_shardings(mesh, define_lm(model), optimizer(model)) for model in (source, target)
  ]
  with jax.set_mesh(mesh):
    new = jax.jit(run, out_shardings=places[1])(jax.device_put(old, places[0]))
    got = np.asarray(forward(target)(new['params'], np.repeat(IDS[:, :-1], 2, axis=0)))[::2]
  assert_same(new, alone, 'on a mesh other tokens are drawn')
  assert difference(got, logits(source, old['params'])) <= 1e-5, 'not exact on a mesh'
  elsewhere = [
    path
    for (path, a), s in zip(
      jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(places[1]), strict=True
    )
    if not a.sharding.is_equivalent_to(s, a.ndim)
  ]
  assert not elsewhere, f'{elsewhere} do not live where the target has them'


def _grown_and_said(
  source: ModelConfig, counts: dict[str, int], config: GrowConfig
) -> tuple[float, str]:
  """By how much the logits differ after a growth, and what is said of it beforehand."""
  target = grown_model(source, counts, config)
  params = params_of(source)
  grown = grow_params(params, source, target, config)
  different = difference(logits(target, grown), logits(source, params))
  return different, inexact(source, target, config)


@pytest.mark.parametrize(
  ('model', 'counts', 'config'),
  [
    ({}, {'ffn': 64}, growth('zero_keys', scale='resize')),
    ({'reference': by_name(20, 30, 40)}, {'ffn': 64}, ZERO_KEYS),
    *(
      pytest.param(*case, marks=SLOW)
      for case in [
        *(({'score': score}, {'ffn': 64}, ZERO_KEYS) for score in SCORES[1:]),
        ({'score': 'softmax'}, {'ffn': 96}, growth(method='duplicate', scale='keep')),
        ({'score': 'softmax'}, {'ffn': 96}, growth(method='duplicate', noise=0.1)),
        ({}, {'ffn': 64}, growth(method='random', new_values='zero')),
        ({}, SMALL, growth('zero_keys', scale='resize')),
        ({'reference': by_name(20, 30, 40)}, {'ffn': 96}, DUPLICATE),
      ]
    ),
  ],
)
def test_a_reason_is_given_exactly_when_logits_differ(model, counts, config):
  different, reason = _grown_and_said(tiny_model(**model), counts, config)
  if not reason:
    assert different <= 1e-5, f'said to be exact, but the logits differ by {different}'
  else:
    assert different > 1e-4, f'said not to be exact ({reason}), but the logits are the same'


@pytest.mark.parametrize(
  ('counts', 'config', 'references'),
  [
    (LARGER, ZERO_KEYS, SMALL),
    (LARGER, growth('zero_keys', scale='resize'), LARGER),
    (DOUBLE, DUPLICATE, DOUBLE),
    (DOUBLE, growth(method='duplicate', scale='keep'), SMALL),
    (LARGER, growth(method='random'), LARGER),
    (LARGER, growth(method='random', scale='keep'), SMALL),
  ],
)
def test_reference_counts_after_a_growth(counts, config, references):
  target = grown_model(tiny_model(), counts, config)
  assert token_counts(target) == counts
  found = {name: one.reference for name, one in pattentions(target).items()}
  assert found == references, 'the scale τ is not the one asked for'


# Refusals


DENSE_MODEL = tiny_model(**DENSE)


@pytest.mark.parametrize(
  ('source', 'target', 'config', 'sentence'),
  [
    (
      tiny_model(),
      tiny_model(),
      growth(new_keys='trained'),
      'new_keys=trained is for new tokens or a larger width, and this growth has none',
    ),
    (
      DENSE_MODEL,
      DENSE_MODEL,
      growth('net2net'),
      'method=net2net is for new tokens or a larger width, and this growth has none',
    ),
    (tiny_model(), tiny_model(width=64), ZERO_KEYS, r'model\.width is 32 in the source and 64'),
    (tiny_model(), tiny_model(score='softmax'), ZERO_KEYS, r"qkv\.score\.kind is 'l2_norm_"),
    (
      gated_model(dense=True),
      gated_model(dense=True, width=64),
      growth(method='net2net'),
      "layer 'layer' has a mixer other than softmax attention.* net2net cannot widen",
    ),
    (
      DENSE_MODEL,
      tiny_model(),
      growth(method='hypercloning'),
      r"qkv\.kind is 'dense' in the source and 'pattention' .* by hypercloning changes .*heads",
    ),
  ],
)
def test_impossible_growths_are_refused_in_one_sentence(source, target, config, sentence):
  with pytest.raises(UserError, match=sentence):
    plan.check(source, target, config)


def test_the_same_model_is_no_growth():
  assert plan.check(DENSE_MODEL, DENSE_MODEL, GrowConfig(moments='drop')) == ()
  assert not inexact(DENSE_MODEL, DENSE_MODEL, growth('net2net', noise=0.1))


# The optimizer's state and the counters


TARGET = grown_model(tiny_model(), {'proj': 48, 'ffn': 64}, ZERO_KEYS)


@functools.cache
def _grown():
  return grow(state_of(tiny_model()), tiny_model(), TARGET, ZERO_KEYS)


def _growth(**changes):
  steps = plan.plan_growth(tiny_model(), TARGET, ZERO_KEYS)
  return apply.Growth(tiny_model(), steps, growth('zero_keys', **changes))


def _with_counts(**changes):
  """The small state, with the counters that a growth makes of its own."""
  return _growth(**changes).map_state(lambda name, tree: tree, state_of(tiny_model()))


def test_old_tokens_keep_their_moments_and_new_ones_start_at_zero():
  before, after = adam(state_of(tiny_model())), adam(_grown())
  assert int(after.count) == UPDATES, "Adam's count is not kept"
  for name in ('mu', 'nu'):
    new = paths(getattr(after, name))
    for path, old in paths(getattr(before, name)).items():
      rows = tuple(slice(size) for size in old.shape)
      np.testing.assert_array_equal(new[path][rows], old, err_msg=f'{name} of {path} changed')
      rest = new[path].copy()
      rest[rows] = 0
      assert not rest.any(), f'{name} of new tokens in {path} is not zero'


def test_new_keys_are_zero_and_new_values_are_as_in_a_new_model():
  new = paths(_grown()['params'])
  keys, values = new['blocks/ffn/keys'][:, 48:], new['blocks/ffn/values'][:, 48:]
  assert not keys.any(), 'new keys are not zero'
  expected = 2 / (2 * np.sqrt(32))  # 2 / (L √D)
  assert abs(values.std() / expected - 1) < 0.1, 'new values are not drawn as in a new model'
  first, second = values
  assert not np.allclose(first, second), 'both layers have the same new values'
  seeded = _growth(seed=1)
  path = tuple(map(jax.tree_util.DictKey, ('blocks', 'ffn', 'values')))
  inputs = seeded.inputs(seeded.recipe('', path), params_of(tiny_model()))
  make = jax.jit(functools.partial(seeded.make, seeded.recipe('', path)))
  assert not np.allclose(make(inputs)[:, 48:], values), 'the seed has no effect'


def test_new_tokens_are_drawn_as_the_target_says():
  config = growth(method='random')
  source = tiny_model()
  target = dataclasses.replace(
    grown_model(source, by_name(24, 40, 480), config), init=InitConfig(std=0.5)
  )
  plan.check(source, target, config)  # A model may start otherwise and compute the same.
  keys = paths(grow_params(params_of(source), source, target, config))['blocks/ffn/keys']
  assert abs(keys[:, 48:].std() / 0.5 - 1) < 0.05, 'new keys are drawn as those of the source were'


def test_moments_can_be_dropped():
  dropped = _with_counts(moments='drop')
  assert int(adam(dropped).count) == 0, 'Adam corrects for moments that it has lost'
  assert schedule_count(dropped) == UPDATES, 'the schedule starts anew'
  moments = functools.partial(_growth(moments='drop').make_tree, 'mu')
  new = paths(jax.jit(moments)(adam(state_of(tiny_model())).mu))
  assert not any(array.any() for array in new.values()), 'moments are kept'


def test_the_count_of_steps_goes_on():
  new = _grown()
  assert (int(new['step']), int(new['skipped'])) == (STEP, STEP - UPDATES), 'steps are forgotten'
  assert schedule_count(new) == UPDATES, 'the learning rate does not go on'


def test_the_count_of_steps_can_restart():
  new = _with_counts(step='restart')
  assert (int(new['step']), int(new['skipped'])) == (0, 0), 'the step does not restart'
  assert schedule_count(new) == 0, 'the schedule does not restart'
  assert int(adam(new).count) == UPDATES, "Adam's moments are kept, but not their count"


@pytest.mark.parametrize('config', [ZERO_KEYS, DUPLICATE], ids=['zero_keys', 'duplicate'])
def test_the_state_is_that_of_a_new_run_of_the_target(config):
  source = tiny_model()
  target = grown_model(source, DOUBLE, config)
  got = jax.eval_shape(lambda state: grow(state, source, target, config), state_of(source))
  definition = define_lm(target)
  want = jax.eval_shape(lambda: step_lib.initial_state(definition, optimizer(target), 0))
  assert jax.tree.structure(got) == jax.tree.structure(want), 'the optimizer cannot go on with it'
  assert jax.tree.leaves(got) == jax.tree.leaves(want), 'shapes or dtypes are others'


@SLOW
def test_copies_have_the_moments_that_they_would_have_had():
  """Exactly so for values. Keys have them in the mean: each reads other entries of the value."""
  source = tiny_model()
  target = grown_model(source, SMALL | {'ffn': 192, 'qkv': 48}, DUPLICATE)
  params = params_of(source)
  _, small = loss_and_gradient(source)(params)
  _, large = loss_and_gradient(target)(grow_params(params, source, target, DUPLICATE))
  (step,) = plan.plan_growth(source, target, DUPLICATE)
  for path, (first, second, want) in moments_and_gradient(step, small, large).items():
    if path.endswith('keys'):
      assert_shared(first, second, want, path)
    else:
      close = {'rtol': 1e-3, 'atol': 1e-4 * np.max(np.abs(want)), 'err_msg': path}
      np.testing.assert_allclose(first, want, **close)
      np.testing.assert_allclose(second, want**2, **close)


def test_each_array_is_made_by_its_own_program_and_the_old_one_is_freed():
  mesh, source = mesh_of(), tiny_model(layers=1)
  target = grown_model(source, {'ffn': 64}, ZERO_KEYS)
  want = jax.tree.map(np.asarray, grow(state_of(source), source, target, ZERO_KEYS))
  places = step_lib.state_shardings(mesh, define_lm(source), optimizer(source))
  old = jax.device_put(state_of(source), places)
  shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), old)
  seen, growth = [], apply.Growth(source, plan.plan_growth(source, target, ZERO_KEYS), ZERO_KEYS)
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    programs = apply.Programs(growth, mesh, pool)
    programs.compile(shapes)
    new = programs.run(old, seen.append)
  assert_same(new, want, 'array by array')
  assert seen == [new['params']]
  ffn = old['params']['blocks']['ffn']
  assert ffn['keys'].is_deleted() and ffn['values'].is_deleted(), 'old arrays stay in memory'
  assert new['params']['embedding'] is old['params']['embedding'], 'what stays is copied'
