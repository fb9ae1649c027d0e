"""Models of several kinds of layers grow, lose and regain parameter tokens as those of one kind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grow_commands import grow as grow_command
from grow_commands import meta_of, read, write_run
from growing import (
  IDS,
  STEP,
  UPDATES,
  adam,
  apply_steps,
  difference,
  forward,
  grow,
  grow_params,
  inexact,
  logits,
  merge,
  mesh_of,
  optimizer,
  params_of,
  remove,
  state_of,
)
from outcomes import assert_same, paths
from tiny import tiny_model
from tiny_run import write_corpus

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  Config,
  Layers,
  ModelConfig,
  NoFeedForwardConfig,
  growth,
  named_counts,
  token_counts,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import diff_table, importance, merging, plan, subsets, verify
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs.checkpoint_meta import Ancestor
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.last_growth import last_growth

ZERO_KEYS, DUPLICATE = growth(method='zero_keys'), growth(method='duplicate')
SLOW = pytest.mark.slow  # because of what is compiled


def _model(score: str = 'l2_norm_gelu', local_score: str | None = None) -> ModelConfig:
  """Five layers in three stacks; those called local have a window, fewer tokens and no ffn."""
  base = tiny_model(score=score)
  local = tiny_model(window=8, tokens={'qkv': 16, 'proj': 20}, score=local_score or score).layer
  local = dataclasses.replace(local, ffn=NoFeedForwardConfig())
  return dataclasses.replace(
    base, pattern='(local layer)*2 local', variants=Layers({'local': local})
  )


MODEL = _model()
COUNTS = {'local.qkv': 16, 'local.proj': 20, 'qkv': 24, 'proj': 40, 'ffn': 48}
LARGER = COUNTS | {'local.qkv': 32, 'ffn': 64}
DOUBLE = {name: 2 * count for name, count in COUNTS.items()}
TARGET = grown_model(MODEL, LARGER, ZERO_KEYS)
BORN = Ancestor('grow', 'somewhere', STEP, MODEL, ZERO_KEYS, UPDATES)


@functools.cache
def _grown():
  return grow(state_of(MODEL), MODEL, TARGET, ZERO_KEYS)


def test_the_parameters_are_where_this_test_expects_them():
  names = set(define_lm(MODEL).abstract['blocks'])
  assert names == {'local_0', 'layer_1', 'local_2'}, 'the other tests look elsewhere'
  assert token_counts(MODEL) == COUNTS


@pytest.mark.parametrize(
  ('given', 'changed'),
  [
    ({'ffn': 64}, {'ffn': 64}),
    ({'qkv': 32}, {'qkv': 32, 'local.qkv': 32}),
    ({'local.qkv': 32}, {'local.qkv': 32}),
    ({'local.qkv': 40, 'qkv': 32}, {'qkv': 32, 'local.qkv': 40}),
  ],
)
def test_a_count_is_for_all_layers_or_for_those_it_names(given, changed):
  counts = named_counts(MODEL, given, '--param_tokens')
  assert counts == COUNTS | changed, 'other layers grow than were asked for'


@pytest.mark.parametrize(
  ('config', 'counts', 'score'),
  [
    (ZERO_KEYS, LARGER, 'l2_norm_gelu'),
    pytest.param(DUPLICATE, DOUBLE, 'l2_norm_gelu', marks=SLOW),
    pytest.param(DUPLICATE, COUNTS | {'local.proj': 60}, 'softmax', marks=SLOW),
  ],
  ids=['zero_keys', 'duplicate', 'one of softmax'],
)
def test_growth_changes_no_logit(config, counts, score):
  source = _model(score)
  target = grown_model(source, counts, config)
  plan.check(source, target, config)
  assert not inexact(source, target, config), 'an exact growth is said not to be'
  params = params_of(source)
  grown = grow_params(params, source, target, config)
  assert jax.tree.map(jnp.shape, grown) == jax.tree.map(
    lambda a: a.shape, define_lm(target).abstract
  ), 'the arrays are not those of the target'
  got = difference(logits(target, grown), logits(source, params))
  assert got <= 1e-5, f'{config.method.kind} changes the logits by {got}'


def test_old_entries_stay_bit_for_bit_and_new_moments_are_zero():
  before, after = state_of(MODEL), _grown()
  for name, old, new in (
    ('parameter', before['params'], after['params']),
    ('first moment', adam(before).mu, adam(after).mu),
    ('second moment', adam(before).nu, adam(after).nu),
  ):
    new = paths(new)
    for path, array in paths(old).items():
      rows = tuple(slice(size) for size in array.shape)
      np.testing.assert_array_equal(new[path][rows], array, err_msg=f'the {name} {path} changed')
      rest = new[path].copy()
      rest[rows] = 0
      if name != 'parameter' or path.endswith('keys'):
        assert not rest.any(), f'new tokens of the {name} {path} are not zero'
  shapes = {path: array.shape[1] for path, array in paths(after['params']['blocks']).items()}
  for stack, query, ffn in (('local_0', 32, None), ('layer_1', 24, 64), ('local_2', 32, None)):
    assert shapes[f'{stack}/attention/query/keys'] == query, f'queries of {stack}'
    assert shapes.get(f'{stack}/ffn/keys') == ffn, f'the feed-forward part of {stack}'


def test_new_tokens_of_two_stacks_are_not_the_same():
  params = paths(_grown()['params']['blocks'])
  one, other = (
    params[f'{stack}/attention/query/values'][0, 16:] for stack in ('local_0', 'local_2')
  )
  assert not np.allclose(one, other), 'the draws do not depend on the path'


@SLOW
def test_growth_on_a_mesh_is_growth():
  target = grown_model(MODEL, LARGER | {'qkv': 48}, ZERO_KEYS)
  mesh = mesh_of(fsdp=4, tokens=2)
  places = [
    step_lib.state_shardings(mesh, define_lm(model), optimizer(model)) for model in (MODEL, target)
  ]

  def run(state):
    return grow(state, MODEL, target, ZERO_KEYS)

  old = state_of(MODEL)
  with jax.set_mesh(mesh):
    new = jax.jit(run, out_shardings=places[1])(jax.device_put(old, places[0]))
    got = np.asarray(forward(target)(new['params'], np.repeat(IDS[:, :-1], 2, axis=0)))[::2]
  # Where a stack has one layer, its draws may be rounded in another way on a mesh.
  for path, want in paths(jax.jit(run)(old)).items():
    message = f'on a mesh other tokens are drawn for {path}'
    np.testing.assert_allclose(paths(new)[path], want, rtol=1e-6, err_msg=message)
  assert difference(got, logits(MODEL, old['params'])) <= 1e-5, 'not exact on a mesh'
  keys = new['params']['blocks']['local_2']['attention']['query']['keys']
  assert {shard.data.shape for shard in keys.addressable_shards} == {(1, 16, 8)}, 'not split'


def test_extract_merge_and_remove_are_inverse():
  base, grown = state_of(MODEL), _grown()
  added = subsets.extract(grown['params'], TARGET, MODEL)
  assert set(paths(added)) == {
    f'blocks/{stack}/{module}/{array}'
    for stack, modules in {
      'local_0': ['attention/query', 'attention/key', 'attention/value'],
      'layer_1': ['ffn'],
      'local_2': ['attention/query', 'attention/key', 'attention/value'],
    }.items()
    for module in modules
    for array in ('keys', 'values')
  }, 'something else than the added tokens was taken out'
  merged = merge(base, added, MODEL, TARGET)
  assert_same(merged['params'], grown['params'], 'extracted and merged')
  removed = remove(grown, TARGET, MODEL, ZERO_KEYS)
  assert_same(removed['params'], base['params'], 'grown and removed')
  assert_same(adam(removed).nu, adam(base).nu, 'moments after the removal')


def test_the_optimizer_is_told_how_many_tokens_of_each_stack_are_old():
  old = last_growth((BORN,), TARGET).old['blocks']
  assert old['local_2']['attention']['query']['keys'].ranges == {'param_tokens': ((0, 16),)}
  assert old['layer_1']['ffn']['values'].ranges == {'param_tokens': ((0, 48),)}


@SLOW
def test_shrinking_right_after_a_growth_drops_what_it_added():
  task = verify.exact_task(Config(), TARGET)
  after = grown_model(TARGET, COUNTS, ZERO_KEYS)
  steps = subsets.shrink(_grown()['params'], task, after, IDS)
  shrunken = apply_steps(_grown(), TARGET, steps)
  assert after == MODEL, 'the model is not the one before the growth'
  base = state_of(MODEL)
  assert_same(shrunken['params'], base['params'], 'an unused token was kept instead of a used one')
  assert_same(adam(shrunken).mu, adam(base).mu, 'the moments are of other tokens')


@SLOW
def test_importance_is_of_every_token_of_every_stack():
  definition = define_lm(MODEL)

  def loss(params, rows):
    return verify.loss(verify.exact_task(Config(), MODEL), params, rows)[0]

  params = params_of(MODEL)
  found = jax.jit(functools.partial(importance.score_tokens, loss, info=definition.info))(
    params, batch=IDS
  )
  counts = definition.token_counts
  for path, count in paths(counts).items():
    scores = paths(found)[path]
    if count:
      assert scores.shape == (*paths(params)[path].shape[:1], count), path
      assert np.all(scores > 0), f'a token of {path} does nothing'
      np.testing.assert_array_equal(scores, paths(found)[path.replace('keys', 'values')])


@pytest.mark.parametrize(
  ('source', 'counts', 'config', 'sentence'),
  [
    (MODEL, {'local.proj': 16}, ZERO_KEYS, 'local.proj has 20 parameter tokens .* and 16 are few'),
    (MODEL, {'local.proj': 30}, DUPLICATE, r'local\.proj=30 is not a multiple of the 20'),
  ],
)
def test_refusals_name_the_layer(source, counts, config, sentence):
  with pytest.raises(UserError, match=sentence):
    plan.check(source, grown_model(source, counts, config), config)


@pytest.mark.parametrize(
  ('name', 'config', 'sentence'),
  [
    ('local.qkv', ZERO_KEYS, 'score softmax of local.qkv'),
    (
      'local.proj',
      growth('zero_keys', scale='resize'),
      'reference count of local.proj changes from 20',
    ),
    ('local.qkv', growth('duplicate', scale='keep'), r'local\.qkv .* 2 times'),
  ],
)
def test_the_reason_names_the_layer_that_is_not_exact(name, config, sentence):
  source = _model(local_score='softmax')
  target = grown_model(source, {name: 2 * COUNTS[name]}, config)
  with pytest.raises(AssertionError, match=sentence):  # re.search with a message
    raise AssertionError(inexact(source, target, config))


def test_growth_of_one_layer_is_exact_whatever_the_score_of_the_others():
  source = _model(local_score='softmax')
  assert not inexact(source, grown_model(source, {'ffn': 64}, ZERO_KEYS), ZERO_KEYS)


def test_only_models_of_the_same_variants_merge():
  other = dataclasses.replace(MODEL, variants=Layers({'local': tiny_model(window=4).layer}))
  with pytest.raises(UserError, match=r'model\.variants\.local\.\S+ is .* in the source and'):
    merging.check_mergeable(MODEL, other)
  assert merging.check_mergeable(MODEL, TARGET) is None


def test_the_table_has_a_row_for_every_projection():
  rows = diff_table.render(MODEL, TARGET, 32).splitlines()
  assert [row.split() for row in rows if row.startswith('local.qkv tokens')] == [
    ['local.qkv', 'tokens', '16', '32', '×', '2.00']
  ]
  assert {name for name in COUNTS for row in rows if row.startswith(f'{name} tokens')} == {*COUNTS}


@SLOW
def test_the_command_grows_what_it_is_told(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  text = write_corpus(tmp_path / 'corpus')
  local = config_lib.to_json(MODEL)['variants']['local']
  changes = {'model.pattern': '(local layer)*2 local', 'model.variants': {'local': local}}
  write_run(tmp_path / 'run', text, tmp_path / 'cache', **changes)
  source, target = f'--source={tmp_path}/run', f'--target={tmp_path}/new'
  grow_command(source, target, '--param_tokens=local.qkv=32,ffn=96')
  said = capsys.readouterr().err
  assert 'exact: the grown model computes what the source does' in said, said
  counts = token_counts(meta_of(tmp_path / 'new').config.model)
  assert (counts['local.qkv'], counts['ffn'], counts['qkv']) == (32, 96, 32)
  back = f'--target={tmp_path}/back'
  grow_command('remove', f'--source={tmp_path}/new', back)
  assert_same(read(tmp_path / 'back'), read(tmp_path / 'run'), 'grown and removed')
