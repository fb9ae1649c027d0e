"""Models of several kinds of layers grow, lose and regain parameter tokens as those of one kind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  STEP,
  UPDATES,
  adam,
  difference,
  grow,
  grow_params,
  inexact,
  logits,
  merge,
  params_of,
  remove,
  state_of,
)
from outcomes import assert_same, paths
from tiny import tiny_model

from tokenformer_jax.config import (
  Layers,
  ModelConfig,
  NoFeedForwardConfig,
  growth,
)
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import merging, plan, subsets
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs.checkpoint_meta import Ancestor
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
  grown = _grown()['params'] if target == TARGET else grow_params(params, source, target, config)
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


def test_growth_of_one_layer_is_exact_whatever_the_score_of_the_others():
  source = _model(local_score='softmax')
  assert not inexact(source, grown_model(source, {'ffn': 64}, ZERO_KEYS), ZERO_KEYS)


def test_only_models_of_the_same_variants_merge():
  other = dataclasses.replace(MODEL, variants=Layers({'local': tiny_model(window=4).layer}))
  with pytest.raises(UserError, match=r'model\.variants\.local\.\S+ is .* in the source and'):
    merging.check_mergeable(MODEL, other)
  assert merging.check_mergeable(MODEL, TARGET) is None
