"""Parameter tokens taken out and put back, array by array."""

import jax
import jax.numpy as jnp
import numpy as np
from growing import SMALL, by_name, grow_params, params_of
from outcomes import assert_same, paths
from tiny import tiny_model

from tokenformer_jax.config import GrowConfig, growth
from tokenformer_jax.grow import grown_model, tokens
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import ParamInfo, Role
from tokenformer_jax.parallel.rules import is_axes

SOURCE = tiny_model()
LARGER = by_name(32, 48, 64)
TARGET = grown_model(SOURCE, LARGER, GrowConfig())

AXES = {'ffn': {'keys': ('layers', 'param_tokens', 'width')}, 'norm': ('layers', 'norm')}


def _info(groups):
  return jax.tree.map(lambda a: ParamInfo(a, Role.KEY, None, groups=groups), AXES, is_leaf=is_axes)


def _counts(model):
  definition = define_lm(model)
  return definition.token_counts


def test_counts_are_those_of_every_kind():
  got = _counts(TARGET)
  qkv, proj, ffn = ({'keys': n, 'values': n} for n in (32, 48, 64))
  attention = {'query': qkv, 'key': qkv, 'value': qkv, 'proj': proj}
  assert got['blocks']['attention'] == attention
  assert got['blocks']['ffn'] == ffn
  assert got['embedding'] == 0, 'an embedding has no parameter tokens'


def test_extract_gives_the_tokens_behind_the_old_ones_and_nothing_else():
  params, axes = params_of(TARGET), define_lm(TARGET).axes
  got = paths(tokens.extract(params, axes, _counts(SOURCE)))
  whole = paths(params)
  assert set(got) == {path for path in whole if path.endswith(('keys', 'values'))}, (
    'something else than parameter tokens is in it'
  )
  for path, old in paths(_counts(SOURCE)).items():
    if old:
      np.testing.assert_array_equal(got[path], whole[path][:, int(old) :], err_msg=path)


def test_remove_and_extract_and_merge_are_inverse():
  params, axes = params_of(TARGET), define_lm(TARGET).axes
  base = tokens.remove(params, axes, _counts(SOURCE))
  assert jax.tree.map(jnp.shape, base) == jax.tree.map(
    lambda a: a.shape, define_lm(SOURCE).abstract
  ), 'what remains is not the model before'
  added = tokens.extract(params, axes, _counts(SOURCE))
  assert_same(tokens.merge(base, added, axes), params, 'put together again')


def test_remove_undoes_a_growth():
  params = params_of(SOURCE)
  grown = grow_params(params, SOURCE, TARGET, growth(method='random'))
  base = tokens.remove(grown, define_lm(TARGET).axes, _counts(SOURCE))
  assert_same(base, params, 'after growth and removal')


def test_shrink_keeps_the_most_important_tokens_of_each_layer_in_their_order():
  keys = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)
  params = {'ffn': {'keys': jnp.asarray(keys)}, 'norm': jnp.ones((2, 3))}
  importance = {
    'ffn': {'keys': jnp.asarray([[5.0, 1.0, 4.0, 2.0, 6.0], [0.0, 0.0, 0.0, 1.0, 0.0]])},
    'norm': jnp.zeros(()),
  }
  got = tokens.shrink(params, _info((5,)), importance, _info((3,)))
  np.testing.assert_array_equal(got['ffn']['keys'][0], keys[0, [0, 2, 4]], err_msg='not the best')
  np.testing.assert_array_equal(
    got['ffn']['keys'][1], keys[1, [0, 1, 3]], err_msg='of equal tokens, not the first ones stay'
  )
  assert_same(got['norm'], params['norm'], 'an array without tokens')


def test_of_duplicates_one_has_each_entry_of_the_value():
  config = growth(method='duplicate')
  target = grown_model(SOURCE, SMALL | {'qkv': 72}, config)
  params = params_of(SOURCE)
  old, new = paths(params), paths(grow_params(params, SOURCE, target, config))
  query = 'blocks/attention/query'
  np.testing.assert_array_equal(new[f'{query}/keys'], np.tile(old[f'{query}/keys'], (1, 3, 1)))
  copies = np.split(new[f'{query}/values'], 3, axis=1)
  np.testing.assert_array_equal(
    sum(copies), old[f'{query}/values'], err_msg='the copies do not add up to the value'
  )
  owned = np.stack(copies) != 0
  assert np.all(owned.sum(0) == 1), 'an entry is in several copies, which may round it'
  shares = owned.mean((1, 2, 3))
  assert np.all(np.abs(shares - 1 / 3) < 0.05), f'the copies have {shares} of the entries'
  for a, b in ((0, 1), (0, 2), (1, 2)):
    same = np.all(copies[a] == copies[b], axis=-1)
    assert not same.any(), 'two copies of a token are equal, and would stay so for ever'
  np.testing.assert_array_equal(
    new['blocks/ffn/values'], old['blocks/ffn/values'], err_msg='a kind that does not grow changed'
  )


def test_noise_is_relative_and_on_the_copies_only():
  config = growth(method='duplicate', noise=0.1)
  target = grown_model(SOURCE, by_name(48, 80, 96), config)
  params = params_of(SOURCE)
  old, new = paths(params), paths(grow_params(params, SOURCE, target, config))
  keys = new['blocks/ffn/keys']
  np.testing.assert_array_equal(keys[:, :48], old['blocks/ffn/keys'], err_msg='old ones are noisy')
  noise = keys[:, 48:] - old['blocks/ffn/keys']
  ratio = noise.std() / np.sqrt(np.mean(old['blocks/ffn/keys'] ** 2))
  assert abs(ratio - 0.1) < 0.01, f'the noise is {ratio} of the root mean square, not 0.1'
  other = new['blocks/attention/proj/keys'][:, 40:] - old['blocks/attention/proj/keys']
  assert not np.allclose(other[:, :40], noise[:, :40]), 'two arrays have the same noise'


def test_shrink_keeps_the_best_of_each_group():
  keys = jnp.arange(2 * 5 * 3, dtype=jnp.float32).reshape(2, 5, 3)
  params = {'ffn': {'keys': keys}, 'norm': jnp.ones((2, 3))}
  importance = {
    'ffn': {'keys': jnp.float32([[1, 2, 9, 7, 8], [2, 1, 7, 9, 8]])},
    'norm': jnp.zeros(()),
  }
  got = tokens.shrink(params, _info((2, 3)), importance, _info((1, 2)))
  np.testing.assert_array_equal(got['ffn']['keys'][0], keys[0, jnp.array([1, 2, 4])])
  np.testing.assert_array_equal(got['ffn']['keys'][1], keys[1, jnp.array([0, 3, 4])])
