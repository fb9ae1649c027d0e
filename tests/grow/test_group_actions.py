"""Groups of parameter tokens after a growth by groups: listed, taken apart, joined, weighted."""

import dataclasses
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  STEP,
  UPDATES,
  adam,
  apply_steps,
  by_name,
  difference,
  group_masks,
  grow,
  inexact,
  logits,
  merge,
  params_of,
  remove,
  state_of,
)
from outcomes import assert_same, paths
from tiny import tiny_model

from tokenformer_jax import config as config_lib
from tokenformer_jax.config import (
  AdamWConfig,
  Config,
  GrowConfig,
  TokenGroup,
  from_groups,
  growth,
  pattentions,
  token_counts,
)
from tokenformer_jax.config import groups as chosen
from tokenformer_jax.config.pattention import SCORES, ScoreConfig, SoftmaxScore
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import groups, merging, plan, subsets
from tokenformer_jax.grow.steps import layers
from tokenformer_jax.grow.steps.remove import ScaleGroups, TakeGroups
from tokenformer_jax.model import group_trees
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.pattention import pattention
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta
from tokenformer_jax.steps.last_growth import last_growth

SLOW = pytest.mark.slow  # because whole commands compile two models each
BASE = tiny_model()
GROUP, KEEP = growth(method='group'), GrowConfig()
HERE = pathlib.Path('/here')


def _grown(model, counts, config=GROUP):
  return grown_model(model, counts, config)


# A model whose projections have 3, 2 and 3 groups.
TWICE = _grown(_grown(BASE, by_name(32, 40, 64)), by_name(40, 48, 80))
SPECIALIST = _grown(BASE, by_name(32, 48, 64))


def _born(action, source, model, method='group', **details):
  grow = growth(method=method)
  return Ancestor(action, source, STEP, model, grow, UPDATES, run=f'id of {source}', **details)


def _meta(lineage=(), model=BASE, contents='model', **optim):
  config = Config(model=model, optim=AdamWConfig(**optim))
  return Meta(STEP, config, {}, lineage, contents, run='id', updates=UPDATES)


def _saved(model, run, source=None):
  """The model as a run saves it; it was made from `source`."""
  model = model if source is None else chosen.with_records_of(model, source)
  return chosen.with_births(model, run, run, 0 if run == '/base' else STEP)


def _births(model, name='ffn'):
  groups = pattentions(model)[name].groups
  return [[(birth.run, birth.tokens) for birth in group.born] for group in groups]


AT_BASE = _saved(BASE, '/base')
AT_ONE = _saved(_grown(AT_BASE, by_name(32, 40, 64)), '/one')
AT_TWO = _saved(_grown(AT_ONE, by_name(40, 48, 80)), '/two')


def _runs(meta):
  return {birth.run for birth in subsets.births(meta)}


def _sizes(model):
  return {
    name: [group.tokens for group in found] for name, found in chosen.named_groups(model).items()
  }


# The scores of groups

OPTIONS = {'gelu': ('exact', 'tanh')}
ALL_SCORES = [
  score(*values)
  for score in SCORES.values()
  for values in itertools.product(*(OPTIONS[field.name] for field in dataclasses.fields(score)))
]


def _scored(first: ScoreConfig, *others: ScoreConfig, model=SPECIALIST):
  """A model whose projections have groups with these scores."""
  groups = [TokenGroup(24, 24, first), *(TokenGroup(8, 32, score) for score in others)]
  return config_lib.with_pattentions(
    model, {name: from_groups(groups) for name in pattentions(model)}
  )


def _scores(model):
  found = {tuple(group.score for group in groups) for groups in chosen.named_groups(model).values()}
  assert len(found) == 1
  return found.pop()


def test_a_group_keeps_its_whole_score_through_every_action():
  for first, second in itertools.pairwise([*ALL_SCORES, ALL_SCORES[0]]):
    model, alone = _scored(first, second), _scored(first)
    assert _scores(model) == (first, second)
    assert _scores(chosen.choose(model, chosen.without([1]))) == (second,), 'remove'
    assert chosen.choose(model, chosen.first(1)) == alone, 'slice'
    lineage, whole = subsets.extraction(_meta((), model), HERE, [2])
    extracted = _meta(lineage, whole, 'added_tokens')
    assert _scores(merging.merged_model(alone, extracted, KEEP)) == (first, second), 'extract'
    other = _scored(second)
    assert merging.check_mergeable(other, model) is None
    assert _scores(merging.merged_model(other, _whole(model), KEEP)) == (second, first, second)


def test_a_group_is_taken_out_whole():
  model = _scored(SCORES['softmax'](), SCORES['l2_norm_gelu']('tanh'), SCORES['gelu']('tanh'))
  ffn, info = params_of(model)['blocks']['ffn'], define_lm(model).info['blocks']['ffn']
  groups = pattentions(model)['ffn'].groups
  for number, (group, tokens) in enumerate(zip(groups, ((0, 24), (24, 32), (32, 40)), strict=True)):
    choice = chosen.only([number + 1])
    alone = chosen.choose(model, choice)
    assert pattentions(alone)['ffn'].groups == (group,)
    kept = jax.jit(functools.partial(group_trees.take, info=info, choice=choice))(ffn)
    want = {name: np.asarray(array)[:, slice(*tokens)] for name, array in ffn.items()}
    assert_same(kept, want, f'alone, group {number + 1}')


def test_the_score_of_the_last_group_decides_whether_tokens_join_it_exactly():
  model, zero_keys = _scored(SCORES['gelu'](), SoftmaxScore()), growth(method='zero_keys')
  larger = _grown(model, by_name(40, 40, 40), zero_keys)
  assert 'the score softmax of qkv gives a new token' in inexact(model, larger, zero_keys)
  model, duplicate = _scored(SCORES['gelu']()), growth(method='duplicate')
  assert not inexact(model, _grown(model, by_name(48, 48, 48), duplicate), duplicate)


@pytest.mark.parametrize('method', ['group', 'zero_keys'])
def test_a_growth_changes_no_score_of_an_old_group(method):
  first = SCORES['l2_norm_gelu']()
  before, after = (_scored(first, SCORES['gelu'](form)) for form in OPTIONS['gelu'])
  with pytest.raises(UserError, match=r"group 2 of qkv .*'exact'\) in the source and .*'tanh'\)"):
    plan.check(before, after, growth(method=method))


# Choices of groups


def test_the_first_groups_of_each_projection():
  assert _sizes(TWICE) == {'qkv': [24, 8, 8], 'proj': [40, 8], 'ffn': [48, 16, 16]}
  two = chosen.choose(TWICE, chosen.first(2))
  assert _sizes(two) == {'qkv': [24, 8], 'proj': [40, 8], 'ffn': [48, 16]}
  assert chosen.choose(TWICE, chosen.first(1)) == BASE, 'the first groups are not the base'


def test_any_groups_can_go_if_every_projection_keeps_one():
  assert _sizes(chosen.choose(TWICE, chosen.without([2])))['proj'] == [40]
  assert _sizes(chosen.choose(TWICE, chosen.without([1])))['ffn'] == [16, 16]
  with pytest.raises(UserError, match=r'proj would keep none of its groups .*, of which it has 2'):
    chosen.choose(TWICE, chosen.without([1, 2]))


# States


def _choose(state, model, choice):
  after = chosen.choose(model, choice)
  return apply_steps(state, model, (TakeGroups(model, after, choice),))


def _scale(state, model, numbers, factor):
  return apply_steps(state, model, (ScaleGroups(model, model, tuple(numbers), factor),))


def test_removed_groups_leave_the_others_with_their_moments():
  old = state_of(TWICE)
  new = _choose(old, TWICE, chosen.without([2]))
  for name in ('params', 'mu', 'nu'):
    before, after = (
      paths(one['params'] if name == 'params' else getattr(adam(one), name)) for one in (old, new)
    )
    keys = before['blocks/ffn/keys']
    want = np.concatenate([keys[:, :48], keys[:, 64:]], axis=1)
    np.testing.assert_array_equal(after['blocks/ffn/keys'], want, err_msg=name)
    np.testing.assert_array_equal(after['embedding'], before['embedding'], err_msg=name)
  assert int(adam(new).count) == UPDATES


@SLOW
def test_the_first_group_alone_computes_what_the_base_does():
  old = state_of(BASE)
  whole = grow(old, BASE, SPECIALIST, growth(method='group', new_values='init'))
  alone = _choose(whole, SPECIALIST, chosen.first(1))
  assert_same(alone, old, 'sliced')
  assert difference(logits(SPECIALIST, whole['params']), logits(BASE, old['params'])) > 1e-3


def test_a_factor_multiplies_values_only():
  old = {**state_of(TWICE), 'ema': params_of(TWICE, 7)}
  new = _scale(old, TWICE, [2], 0.5)
  for name in ('params', 'ema'):
    before, after = paths(old[name]), paths(new[name])
    values = before['blocks/ffn/values'].copy()
    values[:, 48:64] *= 0.5
    np.testing.assert_array_equal(after['blocks/ffn/values'], values, err_msg=name)
    for path in before.keys() - {path for path in before if path.endswith('/values')}:
      np.testing.assert_array_equal(after[path], before[path], err_msg=f'{path} of {name}')
  assert_same(new['opt_state'], old['opt_state'], 'moments')
  assert_same(_scale(old, TWICE, [2, 3], 1.0), old, 'a factor of 1')


# Merging


@functools.cache
def _base():
  return _choose(state_of(SPECIALIST), SPECIALIST, chosen.first(1))


@functools.cache
def _trained(seed):
  """A specialist: the tokens and the rest of the base, and a group of random keys and values."""
  whole, base, info = state_of(SPECIALIST, seed), state_of(SPECIALIST), define_lm(SPECIALIST).info
  masks = group_masks(info, [2])
  masks = jax.tree.unflatten(jax.tree.structure(info), masks.values())
  params = jax.tree.map(jnp.where, masks, whole['params'], base['params'])
  return {**whole, 'params': params}


def _specialist(name):
  return _meta((_born('grow', '/base', AT_BASE),), _saved(SPECIALIST, name, AT_BASE)), HERE


@functools.cache
def _merged():
  """The first specialist with what was extracted from the second, and the merge's model."""
  meta, directory = _specialist('/second')
  lineage, model = subsets.extraction(meta, directory, [])
  added = subsets.extract(_trained(2)['params'], model, lineage[-1].model)
  extracted = _meta(lineage, model, 'added_tokens')
  after = merging.merged_model(SPECIALIST, extracted, KEEP)
  return after, merge(_trained(1), added, SPECIALIST, after), extracted


def test_merged_groups_stay_groups():
  after, state, _ = _merged()
  assert _sizes(after) == {'qkv': [24, 8, 8], 'proj': [40, 8, 8], 'ffn': [48, 16, 16]}
  assert pattentions(after)['ffn'].groups[2] == TokenGroup(16, 16)
  want = jax.tree.map(lambda a: a.shape, define_lm(after).abstract)
  assert jax.tree.map(jnp.shape, state['params']) == want


def test_two_specialists_add_up():
  """The merged model adds to each Pattention of the base what both specialists add together."""
  after, merged, _ = _merged()
  x = jnp.float32(np.random.default_rng(3).normal(size=(2, 5, 32)))

  @functools.cache
  def program(groups):
    return jax.jit(functools.partial(pattention, groups=groups))

  def output(model, params, layer):
    keys, values = (np.asarray(params['blocks']['ffn'][name])[layer] for name in ('keys', 'values'))
    return np.asarray(program(pattentions(model)['ffn'].groups)(x, keys, values))

  for layer in range(2):
    base = output(BASE, _base()['params'], layer)
    one, two = (output(SPECIALIST, _trained(i)['params'], layer) - base for i in (1, 2))
    got = output(after, merged['params'], layer) - base
    size = np.abs(np.stack([base, one, two])).max()
    assert np.abs(one).max() > 0.1 and np.abs(two).max() > 0.1, 'nothing was added'
    np.testing.assert_allclose(got, one + two, rtol=0, atol=1e-6 * size)


def test_merge_then_remove_is_the_first_specialist():
  after, merged, extracted = _merged()
  lineage = (
    *_specialist('/first')[0].lineage,
    _born('merge', '/first', SPECIALIST),
  )
  last = subsets.last_addition(_meta(lineage, after), HERE)
  assert last.model == SPECIALIST
  assert_same(remove(merged, after, last.model, KEEP), _trained(1), 'merged and removed')
  without = _choose(merged, after, chosen.without([3]))
  assert_same(without, _trained(1), 'merged, and its group removed')
  assert _runs(extracted) == {'/second'}


@pytest.mark.parametrize('numbers', [[], [2]])
def test_extract_then_merge_is_the_grown_model(numbers):
  meta, directory = _specialist('/first')
  lineage, model = subsets.extraction(meta, directory, numbers)
  added = subsets.extract(_trained(1)['params'], SPECIALIST, lineage[-1].model, numbers)
  extracted = _meta(lineage, model, 'added_tokens')
  assert _runs(extracted) == {'/first'}
  base = _meta(model=AT_BASE)
  merging.check_not_twice(base, pathlib.Path('/base'), extracted, pathlib.Path('/added'))
  assert merging.merged_model(BASE, extracted, KEEP) == SPECIALIST
  merged = merge(_base(), added, BASE, SPECIALIST)
  assert_same(merged['params'], _trained(1)['params'], 'extracted and merged')


def test_a_group_in_the_middle_is_extracted():
  lineage = (
    _born('grow', '/base', BASE),
    _born('grow', '/one', _grown(BASE, by_name(32, 40, 64))),
  )
  meta, old = _meta(lineage, AT_TWO), state_of(TWICE)
  lineage, model = subsets.extraction(meta, HERE, [2])
  extracted = _meta(lineage, model, 'added_tokens')
  assert subsets.added_counts(extracted) == by_name(8, 8, 16)
  assert _runs(extracted) == {'/one', '/two'}, 'of one or the other projection'
  added = paths(subsets.extract(old['params'], TWICE, lineage[-1].model, [2]))
  keys = paths(old['params'])['blocks/ffn/keys']
  np.testing.assert_array_equal(added['blocks/ffn/keys'], keys[:, 48:64])


def _whole(model):
  return _meta((), model)


ZERO_KEYS = _grown(BASE, by_name(32, 48, 64), growth(method='zero_keys'))
OF_ZERO_KEYS = _meta((_born('grow', '/base', BASE, 'zero_keys'),), ZERO_KEYS, 'added_tokens')


@pytest.mark.parametrize(
  ('ours', 'added', 'ffn'),
  [
    (BASE, _whole(BASE), [96]),
    (SPECIALIST, _whole(BASE), [48, 16, 48]),
    (BASE, _whole(SPECIALIST), [48, 48, 16]),
    (BASE, OF_ZERO_KEYS, [64]),
    (SPECIALIST, OF_ZERO_KEYS, [48, 16, 16]),
  ],
  ids=['one norm', 'a whole model', 'groups into one', 'into the norm', 'out of a norm'],
)
def test_where_merged_tokens_go(ours, added, ffn):
  assert _sizes(merging.merged_model(ours, added, KEEP))['ffn'] == ffn
  got = token_counts(merging.merged_model(ours, added, KEEP))
  want = {name: n + subsets.added_counts(added)[name] for name, n in token_counts(ours).items()}
  assert got == want


def test_a_scale_of_tokens_that_join_is_compared_with_their_group():
  resized = _grown(BASE, by_name(32, 48, 64), growth(method='random', scale='resize'))
  added = _meta((_born('grow', '/base', BASE, 'random'),), resized, 'added_tokens')
  own = merging.own_groups(BASE, added)
  assert 'qkv 32 there and 24 here' in merging.other_scale(BASE, resized, own)
  own = merging.own_groups(SPECIALIST, added)
  assert own['qkv'] == (TokenGroup(8, 32),), 'a group of its own has another scale'
  assert merging.other_scale(SPECIALIST, resized, own) == ''


def test_groups_are_not_resized_by_a_merge():
  with pytest.raises(UserError, match='scale=resize is for tokens that join a group'):
    merging.merged_model(SPECIALIST, _whole(BASE), growth('zero_keys', scale='resize'))


def test_tokens_of_another_score_do_not_join_a_group():
  sentence = r'tokens of qkv have score\.kind=l2_norm_gelu in the source and softmax in the added'
  with pytest.raises(UserError, match=sentence):
    merging.merged_model(BASE, _whole(tiny_model(score='softmax')), KEEP)


# The lineage


ONCE = _grown(BASE, by_name(32, 40, 64))
GREW_TWICE = (_born('grow', '/base', BASE), _born('grow', '/one', ONCE))
WITHOUT_2 = chosen.choose(TWICE, chosen.without([2]))


def test_tokens_are_born_in_the_run_that_adds_them():
  assert _births(AT_TWO) == [[('/base', 48)], [('/one', 16)], [('/two', 16)]]
  assert _births(AT_TWO, 'proj') == [[('/base', 40)], [('/two', 8)]]
  assert _births(_saved(chosen.choose(AT_TWO, chosen.without([2])), '/c')) == [
    [('/base', 48)],
    [('/two', 16)],
  ]
  for method, counts in (('zero_keys', by_name(32, 48, 64)), ('duplicate', by_name(48, 80, 96))):
    larger = _saved(_grown(AT_BASE, counts, growth(method)), '/c')
    assert _births(larger) == [[('/base', 48), ('/c', counts['ffn'] - 48)]]
  deeper = _saved(layers.wanted(AT_TWO, 3, None), '/c')
  assert _births(deeper) == _births(AT_TWO)


def test_fewer_tokens_keep_every_run_that_they_may_be_from():
  mixed = _saved(_grown(AT_BASE, by_name(32, 48, 64), growth('zero_keys')), '/c')
  fewer = _saved(_grown(mixed, by_name(24, 40, 32), growth('zero_keys')), '/d')
  assert _births(fewer) == [[('/base', 24), ('/c', 8)]]


def test_a_model_from_a_config_gets_the_records_of_its_source():
  source = chosen.with_frozen(AT_ONE, [2])
  again = _saved(_grown(_grown(BASE, by_name(32, 40, 64)), by_name(40, 48, 80)), '/two', source)
  assert _births(again) == _births(AT_TWO)
  assert chosen.frozen_numbers(again) == (2,)
  assert chosen.with_frozen(again, []) == TWICE, 'births make equal models unequal'
  stored = json.loads(json.dumps(config_lib.to_json(Config(model=again))))
  assert _births(config_lib.from_dict(Config, stored).model) == _births(AT_TWO)


@pytest.mark.parametrize('method', ['group', 'zero_keys'])
def test_merged_tokens_keep_their_birth(method):
  grown = _saved(_grown(AT_BASE, by_name(32, 48, 64), growth(method)), '/grown')
  lineage, model = subsets.extraction(_meta((_born('grow', '/base', AT_BASE),), grown), HERE, [])
  merged = merging.merged_model(AT_BASE, _meta(lineage, model, 'added_tokens'), KEEP)
  assert list(itertools.chain(*_births(merged))) == [('/base', 48), ('/grown', 16)]


def test_scaling_and_freezing_leave_other_arrays_unchanged():
  """The last growth is still the last: for the optimizer, and for remove and extract."""
  for action in ('scale', 'freeze'):
    meta = _meta((*GREW_TWICE, _born(action, '/two', TWICE, groups='1')), TWICE)
    assert subsets.last_addition(meta, HERE) is GREW_TWICE[-1]
    got, want = last_growth(meta.lineage, TWICE), last_growth(GREW_TWICE, TWICE)
    assert got == want
    lineage, _ = subsets.extraction(meta, HERE, [])
    assert lineage[-1].model == ONCE


def test_a_removed_group_hides_the_last_growth():
  meta = _meta((*GREW_TWICE, _born('remove', '/two', TWICE, groups='2')), WITHOUT_2)
  with pytest.raises(UserError, match='not the result of grow or merge; groups=N,… names'):
    subsets.last_addition(meta, HERE)


def test_the_table_of_groups():
  model = chosen.with_frozen(AT_TWO, [1])
  lines = groups.render(_meta(GREW_TWICE, model)).splitlines()
  words = [line.split() for line in lines]
  assert words[0][:3] == ['group', 'qkv', '(tokens:τ²)']
  assert words[1][:4] == ['1', '24:24', '40:40', '48:48']
  assert '  /base from step 0  ' in lines[1] and lines[1].endswith('  frozen')
  assert words[2][:4] == ['2', '8:8', '–', '16:16']
  assert f'  /one from step {STEP}  ' in lines[2] and lines[2].endswith('  trained')
  assert words[3][:4] == ['2', '–', '8:8', '–'], 'a group of another growth is in one row'
  assert len(lines) == 5


def test_the_table_of_a_model_with_one_group():
  mixed = _saved(_grown(AT_BASE, by_name(32, 48, 64), growth('zero_keys')), '/c')
  grown = _meta((_born('grow', '/base', AT_BASE, 'zero_keys'),), mixed, old_tokens='freeze')
  _, line = groups.render(grown).splitlines()
  assert f'/base from step 0, /c from step {STEP}  ' in line
  assert line.endswith('new tokens trained')


# Frozen groups


def test_frozen_groups_stay_frozen_when_others_go():
  frozen = chosen.with_frozen(TWICE, [1, 3])
  for choice, numbers in (
    (chosen.without([2]), (1, 2)),
    (chosen.first(2), (1,)),
    (chosen.without([1]), (2,)),
  ):
    assert chosen.frozen_numbers(chosen.choose(frozen, choice)) == numbers


def test_new_tokens_are_not_frozen():
  frozen = chosen.with_frozen(SPECIALIST, [2])
  chosen.check_new_tokens_train(frozen, _grown(frozen, by_name(40, 56, 80)))
  into = _grown(frozen, by_name(40, 48, 64), growth(method='zero_keys'))
  with pytest.raises(UserError, match=r'new tokens of qkv would be in group 2, which is frozen'):
    chosen.check_new_tokens_train(frozen, into)
