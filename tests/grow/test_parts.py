"""Parts of a model as training states: added, merged, taken out, and the important ones."""

import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  DENSE,
  IDS,
  STEP,
  UPDATES,
  adam,
  apply_steps,
  by_name,
  difference,
  grow,
  logits,
  merge,
  remove,
  schedule_count,
  state_of,
  trained,
)
from mixtures import by_bias, sparse, with_experts
from outcomes import assert_same, paths
from tiny import tiny_model, tiny_vit

from tokenformer_jax.config import Config, ModelConfig, growth
from tokenformer_jax.config import groups as choices
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import merging, subsets, verify
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta
from tokenformer_jax.steps.last_growth import last_growth

SLOW = pytest.mark.slow  # because of what is compiled
SOURCE = tiny_model()
LARGER = by_name(32, 48, 64)
KEEP = growth(method='zero_keys')
TARGET = grown_model(SOURCE, LARGER, KEEP)
BORN = Ancestor('grow', 'somewhere', STEP, SOURCE, KEEP, UPDATES)


@functools.cache
def _grown():
  return grow(state_of(SOURCE), SOURCE, TARGET, KEEP)


ROUTED = by_bias(sparse())  # experts whose balance is a bias


@functools.cache
def _trained(source: ModelConfig = SOURCE, target: ModelConfig = TARGET):
  """Grown, then three steps with everything old frozen."""
  growth = last_growth((dataclasses.replace(BORN, model=source),), target)
  state = grow(state_of(source), source, target, KEEP)
  return trained(state, target, 3, growth, old_tokens='freeze')


@pytest.mark.parametrize(
  ('base', 'model', 'added'),
  [
    (ROUTED, with_experts(ROUTED, 6), 'added experts'),
    (SOURCE, tiny_model(pattern='layer*4'), 'added layers'),
  ],
)
def test_experts_and_layers_can_be_neither_extracted_nor_merged(base, model, added):
  born = dataclasses.replace(BORN, model=base)
  with pytest.raises(UserError, match=f'{added}.* cannot be extracted or merged'):
    subsets.check_no_layers(born, model, pathlib.Path('here'))


@SLOW
def test_frozen_training_then_extract_and_merge_gives_the_trained_model():
  added = subsets.extract(_trained()['params'], TARGET, SOURCE)
  merged = merge(state_of(SOURCE), added, SOURCE, TARGET)
  assert_same(merged['params'], _trained()['params'], 'merged into the base')
  keys = paths(added)['blocks/ffn/keys']
  assert keys.shape == (2, 16, 32) and keys.any(axis=-1).all(), 'the added tokens did not train'


@SLOW
def test_merged_tokens_have_no_moments_and_the_others_keep_theirs():
  added = subsets.extract(_trained()['params'], TARGET, SOURCE)
  merged = adam(merge(state_of(SOURCE), added, SOURCE, TARGET))
  old, new = paths(adam(state_of(SOURCE)).mu), paths(merged.mu)
  np.testing.assert_array_equal(new['blocks/ffn/keys'][:, :48], old['blocks/ffn/keys'])
  assert not new['blocks/ffn/keys'][:, 48:].any(), 'moments of merged tokens are not zero'
  assert int(merged.count) == UPDATES


@SLOW
@pytest.mark.parametrize(
  ('source', 'target'),
  [(SOURCE, TARGET), (ROUTED, grown_model(ROUTED, {'qkv': 32, 'ffn.shared': 64}, KEEP))],
  ids=['plain', 'with experts'],
)
def test_remove_after_frozen_training_gives_the_base(source, target):
  removed = remove(_trained(source, target), target, source, KEEP)
  base = state_of(source)
  assert_same(removed['params'], base['params'], 'parameters after the removal')
  for name in ('mu', 'nu'):
    assert_same(
      getattr(adam(removed), name), getattr(adam(base), name), f'{name} after the removal'
    )
  assert schedule_count(removed) == UPDATES + 3, 'the updates made are forgotten'


@pytest.mark.parametrize(
  ('theirs', 'sentence'),
  [
    (tiny_model(width=64), r'model\.width is 32 in the source and 64 in the added'),
    (tiny_model(layers=3), r"model\.pattern is 'layer\*2' in the source and 'layer\*3'"),
    (tiny_model(**DENSE), r"model\.layer\.mixer\.qkv\.kind is 'pattention'"),
    (tiny_model(rotary=0), r"positions\.kind is 'rotary' in the source and 'none'"),
    (tiny_vit(), r"model\.kind is 'lm'.*and 'vit'"),
  ],
)
def test_models_that_do_not_merge(theirs, sentence):
  with pytest.raises(UserError, match=sentence):
    merging.check_mergeable(SOURCE, theirs)


def test_models_that_merge():
  assert merging.check_mergeable(SOURCE, dataclasses.replace(TARGET, max_length=64)) is None
  with pytest.raises(UserError, match='is a Transformer, which has no parameter tokens to merge'):
    merging.check_mergeable(tiny_model(**DENSE), SOURCE)


def _meta(model, run, lineage=(), contents='model', **checksums):
  """A run, whose id is the path where it was trained; tokens that nobody has were born in it."""
  paths = {f'params/blocks/{name}/keys': value for name, value in checksums.items()}
  config = Config(model=choices.with_births(model, run, run, 0))
  return Meta(STEP, config, {}, lineage, contents, run=run, updates=UPDATES, checksums=paths)


def _from(source, action='grow'):
  """The lineage of a run made from another one."""
  model, path = source.config.model, source.run
  return (*source.lineage, dataclasses.replace(BORN, action=action, source=path, model=model))


def _grown_from(source, run):
  model = grown_model(source.config.model, LARGER, KEEP)
  return _meta(model, run, _from(source))


def _extracted(grown):
  return dataclasses.replace(grown, contents='added_tokens')


BASE = _meta(SOURCE, '/base')
GROWN, TWIN = _grown_from(BASE, '/grown'), _grown_from(BASE, '/twin')
PUT_BACK = _meta(merging.merged_model(BASE.config.model, _extracted(GROWN), KEEP), '/back')
WITHOUT = _meta(choices.with_records_of(SOURCE, GROWN.config.model), '/less')


@pytest.mark.parametrize(
  ('source', 'added', 'sentence'),
  [
    (BASE, BASE, 'has parameter tokens of /base.*shares no tokens with it'),
    (
      _meta(SOURCE, '/base', ffn=7),
      _meta(SOURCE, '/copy', ffn=7),
      'which /base has already.*shares no tokens',
    ),
    (BASE, GROWN, r'twice; append only .*extract --source=/grown --target=NEW'),
    (GROWN, BASE, 'tokens of /base, which /grown has already'),
    (GROWN, TWIN, r'of /base, which /grown has.*extract --source=/twin'),
    (GROWN, _extracted(GROWN), 'of /grown.*into a run without them, such as /base'),
    (PUT_BACK, _extracted(GROWN), 'of /grown, which /back has already'),
  ],
  ids=['itself', 'a copy without ids', 'grown', 'base', 'sibling', 'its own', 'again'],
)
def test_no_tokens_are_merged_twice(source, added, sentence):
  with pytest.raises(UserError, match=sentence):
    merging.check_not_twice(source, pathlib.Path(source.run), added, pathlib.Path(added.run))


@pytest.mark.parametrize(
  ('source', 'added'),
  [
    (BASE, _extracted(GROWN)),
    (WITHOUT, _extracted(GROWN)),
    (PUT_BACK, _extracted(TWIN)),
    (GROWN, _extracted(TWIN)),
    (_meta(SOURCE, '/base', ffn=7), _meta(SOURCE, '/other', ffn=8)),
  ],
  ids=['the base', 'removed before', 'a second specialist', 'beside its own', 'strangers'],
)
def test_tokens_that_a_run_does_not_have_may_be_merged(source, added):
  merging.check_not_twice(source, pathlib.Path(source.run), added, pathlib.Path(added.run))


@pytest.mark.parametrize('action', ['grow', 'merge'])
def test_the_last_addition(tmp_path, action):
  born = dataclasses.replace(BORN, action=action)
  meta = Meta(STEP, Config(model=TARGET), {}, (BORN, born), updates=UPDATES)
  assert subsets.last_addition(meta, tmp_path) is born


@pytest.mark.parametrize(
  ('model', 'lineage'),
  [
    (TARGET, ()),
    (TARGET, (dataclasses.replace(BORN, action='shrink'),)),
    (SOURCE, (BORN,)),  # init_from without growth
  ],
)
def test_a_run_without_growth_has_nothing_to_remove(tmp_path, model, lineage):
  meta = Meta(STEP, Config(model=model), {}, lineage, updates=UPDATES)
  with pytest.raises(UserError, match=r'nothing was added to .*: it is not the result'):
    subsets.last_addition(meta, tmp_path)


# Shrinking


def _shrunken(state, before, counts):
  after = grown_model(before, counts, KEEP)
  steps = subsets.shrink(state['params'], verify.exact_task(Config(), before), after, IDS)
  return after, apply_steps(state, before, steps)


@pytest.mark.parametrize(
  ('counts', 'sentence'),
  [
    (by_name(24, 40, 64), 'ffn has 48 parameter tokens, and shrink cannot make 64 of them'),
    (by_name(24, 40, 48), 'nothing would shrink'),
  ],
)
def test_shrinking_to_more_is_refused(counts, sentence):
  with pytest.raises(UserError, match=sentence):
    subsets.check_smaller(SOURCE, grown_model(SOURCE, counts, KEEP))


@pytest.mark.slow
def test_a_shrunken_model_computes_as_if_the_others_had_zero_keys():
  """A key of zero has a score of zero, which enters neither the norm nor the output."""
  state = state_of(SOURCE)
  after, shrunken = _shrunken(state, SOURCE, {'ffn': 30})
  blocks = state['params']['blocks']
  keys, left = (one['params']['blocks']['ffn']['keys'] for one in (state, shrunken))
  kept = np.stack([np.isin(keys[layer, :, 0], left[layer, :, 0]) for layer in range(2)])
  assert np.all(kept.sum(axis=1) == 30)
  ffn = {**blocks['ffn'], 'keys': jnp.where(kept[..., None], keys, 0)}
  dropped = {**state['params'], 'blocks': {**blocks, 'ffn': ffn}}
  assert difference(logits(SOURCE, dropped), logits(SOURCE, state['params'])) > 1e-3
  assert difference(logits(after, shrunken['params']), logits(SOURCE, dropped)) < 1e-5
  moments = paths(adam(shrunken).nu)['blocks/ffn/values']
  want = paths(adam(state).nu)['blocks/ffn/values']
  for layer in range(2):
    np.testing.assert_array_equal(moments[layer], want[layer][kept[layer]], 'others are kept')
