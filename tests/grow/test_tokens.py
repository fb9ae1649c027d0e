"""Parameter tokens taken out and put back, array by array."""

import dataclasses

import jax
import numpy as np
import pytest
from growing import SMALL, by_name, grow_params, params_of
from outcomes import paths
from tiny import tiny_model

from tokenformer_jax.config import GrowConfig, TokenGroup, from_groups, growth
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import plan
from tokenformer_jax.grow.steps.remove import most_important
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs.checkpoint_meta import Ancestor

SOURCE = tiny_model()
LARGER = by_name(32, 48, 64)
TARGET = grown_model(SOURCE, LARGER, GrowConfig())


def with_groups_of(*counts):
  """The source with groups of so many tokens in its feed-forward layers."""
  ffn = from_groups([TokenGroup(count, count) for count in counts])
  return dataclasses.replace(SOURCE, layer=dataclasses.replace(SOURCE.layer, ffn=ffn))


def test_copies_cannot_be_removed():
  how = growth(method='duplicate')
  last = Ancestor('grow', '/base', 0, SOURCE, how, 0)
  with pytest.raises(UserError, match='taking the copies out would not give back'):
    plan.plan_removal(last, grown_model(SOURCE, SMALL | {'ffn': 96}, how))


def test_the_most_important_tokens_of_each_group_of_each_layer_are_chosen_in_their_order():
  before = with_groups_of(48, 16)
  rng = np.random.default_rng(0)
  scores = np.float32(rng.permuted(np.tile(np.arange(64), (2, 1)), axis=1))
  importance = jax.tree.map(
    lambda info: scores if info.groups == (48, 16) else np.zeros((2, 64), np.float32),
    define_lm(before).info,
  )
  after = with_groups_of(8, 4)
  kept = jax.jit(lambda scores: most_important(scores, before, after))(importance)
  kept = kept['blocks']['ffn']['keys']
  for row, numbers in zip(scores, np.asarray(kept), strict=True):
    np.testing.assert_array_equal(numbers[:8], np.sort(np.argsort(-row[:48])[:8]))
    np.testing.assert_array_equal(numbers[8:], 48 + np.sort(np.argsort(-row[48:])[:4]))


def test_of_equal_tokens_the_first_ones_stay():
  before, after = with_groups_of(48), with_groups_of(3)
  importance = jax.tree.map(lambda info: np.zeros((2, sum(info.groups))), define_lm(before).info)
  kept = jax.jit(lambda scores: most_important(scores, before, after))(importance)
  kept = kept['blocks']['ffn']['values']
  np.testing.assert_array_equal(kept, [[0, 1, 2]] * 2)


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
  target = grown_model(SOURCE, SMALL | {'proj': 80, 'ffn': 96}, config)
  params = params_of(SOURCE)
  old, new = paths(params), paths(grow_params(params, SOURCE, target, config))
  keys = new['blocks/ffn/keys']
  np.testing.assert_array_equal(keys[:, :48], old['blocks/ffn/keys'], err_msg='old ones are noisy')
  noise = keys[:, 48:] - old['blocks/ffn/keys']
  ratio = noise.std() / np.sqrt(np.mean(old['blocks/ffn/keys'] ** 2))
  assert abs(ratio - 0.1) < 0.01, f'the noise is {ratio} of the root mean square, not 0.1'
  other = new['blocks/attention/proj/keys'][:, 40:] - old['blocks/attention/proj/keys']
  assert not np.allclose(other[:, :40], noise[:, :40]), 'two arrays have the same noise'
