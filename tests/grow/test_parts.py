"""Parts of a model as training states: added, merged, taken out, and the important ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  DENSE,
  IDS,
  STEP,
  UPDATES,
  adam,
  assert_same,
  difference,
  grow,
  logits,
  mesh_of,
  optimizer,
  params_of,
  paths,
  schedule_count,
  state_of,
)
from tiny import tiny_model

from tokenformer_jax import checkpoint, tasks
from tokenformer_jax import step as step_lib
from tokenformer_jax.config import Config, GrowConfig, OptimConfig, TokenCounts, TrainConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grown_model, last_growth, parts, verify
from tokenformer_jax.lm import define_lm

SLOW = pytest.mark.slow  # because of what is compiled
SOURCE = tiny_model()
LARGER = TokenCounts(32, 48, 64)
KEEP = GrowConfig()
TARGET = grown_model(SOURCE, LARGER, KEEP)
BORN = checkpoint.Ancestor('grow', 'somewhere', STEP, SOURCE, KEEP, UPDATES)


@functools.cache
def _grown():
  return grow(state_of(SOURCE), SOURCE, TARGET, KEEP)


@functools.cache
def _trained():
  """Grown, then three steps with everything old frozen."""
  config = Config(
    model=TARGET,
    optim=OptimConfig(warmup_steps=0, old_tokens='freeze'),
    train=TrainConfig(steps=1000),
  )
  growth = last_growth((BORN,), TARGET)
  mesh, tx = mesh_of(), optimizer(TARGET, config.optim, growth)
  state = jax.tree.map(jnp.copy, _grown())
  with jax.set_mesh(mesh):
    step = step_lib.make_train_step(tasks.make(config), tx, config, mesh, growth)
    for _ in range(3):
      state, _ = step(state, jnp.asarray(np.tile(IDS, (2, 1))))
  return state


@SLOW
def test_frozen_training_then_extract_and_merge_gives_the_trained_model():
  added = parts.extract(_trained(), TARGET, BORN)['params']
  merged = parts.merge(state_of(SOURCE), added, SOURCE, KEEP)
  assert_same(merged['params'], _trained()['params'], 'merged into the base')
  keys = paths(added)['blocks/ffn/keys']
  assert keys.shape == (2, 16, 32) and keys.any(axis=-1).all(), 'the added tokens did not train'


@SLOW
def test_merged_tokens_have_no_moments_and_the_others_keep_theirs():
  added = parts.extract(_trained(), TARGET, BORN)['params']
  merged = adam(parts.merge(state_of(SOURCE), added, SOURCE, KEEP))
  old, new = paths(adam(state_of(SOURCE)).mu), paths(merged.mu)
  np.testing.assert_array_equal(new['blocks/ffn/keys'][:, :48], old['blocks/ffn/keys'])
  assert not new['blocks/ffn/keys'][:, 48:].any(), 'moments of merged tokens are not zero'
  assert int(merged.count) == UPDATES


@SLOW
def test_remove_after_frozen_training_gives_the_base():
  removed = parts.remove(_trained(), TARGET, SOURCE, KEEP)
  base = state_of(SOURCE)
  assert_same(removed['params'], base['params'], 'parameters after the removal')
  for name in ('mu', 'nu'):
    assert_same(
      getattr(adam(removed), name), getattr(adam(base), name), f'{name} after the removal'
    )
  assert schedule_count(removed) == UPDATES + 3, 'the updates made are forgotten'


def test_two_models_merge_into_one_with_the_tokens_of_both():
  other = state_of(SOURCE, seed=5)
  merged = parts.merge(state_of(SOURCE), other['params'], SOURCE, KEEP)
  total = grown_model(SOURCE, TokenCounts(48, 80, 96), KEEP)
  assert jax.tree.map(jnp.shape, merged['params']) == jax.tree.map(
    lambda a: a.shape, define_lm(total).abstract
  ), 'the counts do not add up'
  keys = paths(merged['params'])['blocks/ffn/keys']
  np.testing.assert_array_equal(keys[:, 48:], paths(other['params'])['blocks/ffn/keys'])
  np.testing.assert_array_equal(
    paths(merged['params'])['embedding'],
    paths(state_of(SOURCE)['params'])['embedding'],
    err_msg='the embedding is not that of the first model',
  )


@pytest.mark.parametrize(
  ('theirs', 'sentence'),
  [
    (tiny_model(width=64), r'model\.width is 32 in the source and 64 in the added'),
    (tiny_model(layers=3), r'model\.layers is 2'),
    (tiny_model(score='softmax'), r"model\.score is 'l2_norm_gelu' in the source and 'softmax'"),
    (tiny_model(heads=2), r'model\.heads is 4'),
    (tiny_model(gelu='tanh'), r"model\.gelu is 'exact'"),
    (tiny_model(**DENSE), r"model\.projection is 'pattention'"),
  ],
)
def test_models_that_do_not_merge(theirs, sentence):
  with pytest.raises(UserError, match=sentence):
    parts.check_mergeable(SOURCE, theirs)


def test_models_that_merge():
  assert parts.check_mergeable(SOURCE, dataclasses.replace(TARGET, max_length=64)) is None
  with pytest.raises(UserError, match='projection=dense has no parameter tokens to merge'):
    parts.check_mergeable(tiny_model(**DENSE), SOURCE)


@pytest.mark.parametrize('action', ['grow', 'merge'])
def test_the_last_addition(tmp_path, action):
  born = dataclasses.replace(BORN, action=action)
  meta = checkpoint.Meta(STEP, UPDATES, Config(model=TARGET), (BORN, born), 'model', {}, {})
  assert parts.last_addition(meta, tmp_path) is born


@pytest.mark.parametrize(
  ('model', 'lineage'),
  [
    (TARGET, ()),
    (TARGET, (dataclasses.replace(BORN, action='shrink'),)),
    (SOURCE, (BORN,)),  # init_from without growth
  ],
)
def test_nothing_was_added(tmp_path, model, lineage):
  meta = checkpoint.Meta(STEP, UPDATES, Config(model=model), lineage, 'model', {}, {})
  with pytest.raises(UserError, match=r'nothing was added to .*: it is not the result'):
    parts.last_addition(meta, tmp_path)


# Shrinking


def _shrunken(state, before, counts):
  after = grown_model(before, counts, KEEP)
  return after, parts.shrink(state, verify.exact_task(Config(), before), after, IDS, KEEP)


@SLOW
def test_shrinking_right_after_a_growth_drops_what_it_added():
  after, shrunken = _shrunken(_grown(), TARGET, SOURCE.param_tokens)
  assert after == SOURCE, 'the model is not the one before the growth'
  base = state_of(SOURCE)
  assert_same(shrunken['params'], base['params'], 'an unused token was kept instead of a used one')
  assert_same(adam(shrunken).mu, adam(base).mu, 'the moments are of other tokens')
  got = difference(logits(after, shrunken['params']), logits(TARGET, _grown()['params']))
  assert got <= 1e-6, 'shrinking back changes the logits'


def test_shrinking_keeps_the_most_important_tokens():
  params = params_of(SOURCE)
  definition = define_lm(SOURCE)

  def loss(params, rows):
    scores, _ = definition.bind(params)(rows[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), rows[:, 1:, None], axis=-1)
    return -jnp.mean(chosen)

  gradient = jax.jit(jax.grad(loss))
  total = 0
  for row in IDS:
    g = gradient(params, row[None])['blocks']['ffn']['values']
    total = total + np.abs(np.sum(np.asarray(params['blocks']['ffn']['values'] * g), axis=-1))
  _, shrunken = _shrunken(state_of(SOURCE), SOURCE, TokenCounts(24, 40, 30))
  for layer in range(2):
    kept = np.sort(np.argsort(-total[layer])[:30])
    for name in ('keys', 'values'):
      np.testing.assert_array_equal(
        shrunken['params']['blocks']['ffn'][name][layer],
        params['blocks']['ffn'][name][layer][kept],
        err_msg=f'other {name} were kept in layer {layer}, or in another order',
      )
      np.testing.assert_array_equal(
        adam(shrunken).nu['blocks']['ffn'][name][layer],
        adam(state_of(SOURCE)).nu['blocks']['ffn'][name][layer][kept],
        err_msg=f'the moments of {name} are of other tokens',
      )


@pytest.mark.parametrize(
  ('counts', 'sentence'),
  [
    (TokenCounts(24, 40, 64), r'param_tokens\.ffn is 48, and shrink cannot make 64 of it'),
    (TokenCounts(24, 40, 48), 'nothing would shrink'),
  ],
)
def test_what_is_no_shrinking(counts, sentence):
  with pytest.raises(UserError, match=sentence):
    parts.check_smaller(SOURCE, grown_model(SOURCE, counts, KEEP))
