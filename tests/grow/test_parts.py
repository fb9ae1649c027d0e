"""Parts of a model as training states: added, merged, taken out, and the important ones."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from growing import (
  DENSE,
  IDS,
  SMALL,
  STEP,
  UPDATES,
  adam,
  apply_steps,
  by_name,
  difference,
  grow,
  logits,
  merge,
  mesh_of,
  params_of,
  remove,
  schedule_count,
  state_of,
)
from outcomes import assert_same, paths
from routed import by_bias, sparse
from tiny import tiny_model, tiny_vit, with_mixer

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  AdamWConfig,
  Config,
  ModelConfig,
  RotaryConfig,
  TrainConfig,
  growth,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import merging, subsets, verify
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.runs.checkpoint_meta import Ancestor, Meta
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.steps.last_growth import last_growth

SLOW = pytest.mark.slow  # because of what is compiled
SOURCE = tiny_model()
LARGER = by_name(32, 48, 64)
KEEP = growth(method='zero_keys')
TARGET = grown_model(SOURCE, LARGER, KEEP)
MERGED = grown_model(TARGET, by_name(40, 56, 80), KEEP)
BORN = Ancestor('grow', 'somewhere', STEP, SOURCE, KEEP, UPDATES)


@functools.cache
def _grown():
  return grow(state_of(SOURCE), SOURCE, TARGET, KEEP)


ROUTED = by_bias(sparse())  # experts whose balance is a bias


@functools.cache
def _trained(source: ModelConfig = SOURCE, target: ModelConfig = TARGET):
  """Grown, then three steps with everything old frozen."""
  config = Config(
    model=target,
    optim=AdamWConfig(warmup_steps=0, old_tokens='freeze'),
    train=TrainConfig(steps=1000),
  )
  growth = last_growth((dataclasses.replace(BORN, model=source),), target)
  mesh = mesh_of()
  state = grow(state_of(source), source, target, KEEP)
  with jax.set_mesh(mesh):
    program = step_lib.make_program(tasks.make(config), config, growth)
    step = step_lib.make_train_step(program, mesh)
    for _ in range(3):
      state, _ = step(state, jnp.asarray(np.tile(IDS, (2, 1))))
  return state


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


def test_two_models_merge_into_one_with_the_tokens_of_both():
  other = state_of(SOURCE, seed=5)
  total = grown_model(SOURCE, by_name(48, 80, 96), KEEP)
  merged = merge(state_of(SOURCE), other['params'], SOURCE, total)
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
    (tiny_model(layers=3), r"model\.pattern is 'layer\*2' in the source and 'layer\*3'"),
    (tiny_model(heads=2), r'model\.layer\.mixer\.heads is 4'),
    (tiny_model(**DENSE), r"model\.layer\.mixer\.qkv\.kind is 'pattention'"),
    (tiny_model(norm='affine'), r"model\.layer\.norm is 'plain'"),
    (tiny_model(norm_epsilon=1e-6), r'model\.norm_epsilon is 1e-05'),
    (tiny_model(rotary=0), r"positions\.kind is 'rotary' in the source and 'none'"),
    (with_mixer(tiny_model(), positions=RotaryConfig(0.5, 500.0)), r'positions\.base is 10000\.0'),
    (tiny_model(window=8), r'mixer\.window is 0 in the source and 8'),
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


def test_another_scale_of_the_added_tokens_is_said():
  assert not merging.other_scale(SOURCE, TARGET), 'a growth that kept the scale is said not to'
  resized = grown_model(SOURCE, LARGER, growth('zero_keys', scale='resize'))
  said = merging.other_scale(SOURCE, resized)
  assert 'qkv 32 there and 24 here, proj 48 there and 40 here' in said


def _meta(lineage=(), model=SOURCE, contents='model', run='', **checksums):
  paths = {f'params/blocks/{name}/keys': value for name, value in checksums.items()}
  config = Config(model=model)
  return Meta(STEP, config, {}, lineage, contents, run=run, updates=UPDATES, checksums=paths)


def _born(action, source, model=SOURCE, tokens_of='', run=None):
  """An entry of a lineage; the id of a run is the path where it was trained."""
  runs = '\n'.join(f'{run}\t{run}' for run in tokens_of.splitlines())
  run = source if run is None else run
  return dataclasses.replace(
    BORN, action=action, source=source, model=model, tokens_of=runs, run=run
  )


BASE, GROWN = _meta(), _meta((_born('grow', '/base'),), TARGET)
OF_GROWN = _meta((_born('grow', '/base', SOURCE, '/grown'),), TARGET, 'added_tokens')
OF_TWIN = _meta((_born('grow', '/base', SOURCE, '/twin'),), TARGET, 'added_tokens')
# Copies of runs, or runs that decay from them, and one that grew from such a run.
OF_BASE = dataclasses.replace(BASE, run='/base')
GROWN_COPY = dataclasses.replace(GROWN, run='/grown')
OF_COPY = _meta((_born('grow', '/copy', run='/base'),), TARGET)
# Runs of a version that gave no ids.
OLD, OLD_GROWN = _meta(run='old'), _meta((_born('grow', '/base', run=''),), TARGET, run='old')
PUT_BACK = _meta((_born('merge', '/base', SOURCE, '/grown'),), TARGET)


@pytest.mark.parametrize(
  ('meta', 'runs'),
  [
    (_meta(), [['/here']]),
    (_meta((_born('grow', '/base'),), TARGET), [['/base'], ['/here']]),
    (_meta((_born('grow', '/base'),)), [['/base']]),  # init_from without growth
    (
      _meta((_born('grow', '/base'), _born('remove', '/grown', TARGET))),
      [['/base']],
    ),
    (
      _meta((_born('grow', '/base'), _born('merge', '/grown', TARGET, '/a\n/b')), MERGED),
      [['/base'], ['/grown'], ['/a', '/b']],
    ),
    (_meta((_born('grow', '/base', SOURCE, '/g'),), TARGET, 'added_tokens'), [['/g']]),
    (_meta((_born('grow', '/base'), _born('shrink', '/g', TARGET))), [['/base'], ['/g']]),
    (GROWN_COPY, [['/base'], ['/grown']]),
  ],
)
def test_where_tokens_come_from(meta, runs):
  named = dataclasses.replace(meta, run=meta.run or '/here')
  found = subsets.additions(named, pathlib.Path('/here'))
  assert [[run.id for run in added] for added in found] == runs


@pytest.mark.parametrize(
  ('source', 'run', 'added', 'added_run', 'sentence'),
  [
    (BASE, '/base', BASE, '/base', 'has parameter tokens of /base.*shares no tokens with it'),
    (_meta(ffn=7), '/base', _meta(ffn=7), '/copy', 'which /base has already.*shares no tokens'),
    (BASE, '/base', GROWN, '/grown', r'twice; append only .*extract --source=/grown --target=NEW'),
    (GROWN, '/grown', BASE, '/base', 'tokens of /base, which /grown has already'),
    (GROWN, '/grown', GROWN, '/twin', r'of /base, which /grown has.*extract --source=/twin'),
    (GROWN, '/grown', OF_GROWN, '/added', 'of /grown.*into a run without them, such as /base'),
    (PUT_BACK, '/back', OF_GROWN, '/added', 'of /grown, which /back has already'),
    (BASE, '/base', OF_BASE, '/copy', 'of /copy, which /base has already'),
    (BASE, '/base', OF_COPY, '/b', 'of /copy, which /base has.*extract --source=/b --target'),
    (GROWN, '/grown', OF_COPY, '/b', r'of /copy, which /grown has.*extract --source=/b'),
    (GROWN_COPY, '/b', OF_GROWN, '/added', 'of /grown, which /b has already'),
    (OLD, '/one', OLD, '/two', 'from /one and /two, which have no id.*merge runs that this'),
    (OLD_GROWN, '/one', OLD, '/two', 'from /base and /two, which have no id'),
    (OLD, '/base', OLD_GROWN, '/two', 'tokens of /base, which /base has already'),
  ],
  ids=[
    *('itself', 'a copy', 'grown', 'base', 'sibling', 'its own', 'again'),
    *('a changed copy', 'grown from a copy', 'grown from two copies', 'in a copy'),
    *('without ids', 'grown without ids', 'without ids in one place'),
  ],
)
def test_no_tokens_are_merged_twice(source, run, added, added_run, sentence):
  source, added = _named(source, run), _named(added, added_run)
  with pytest.raises(UserError, match=sentence):
    merging.check_not_twice(source, pathlib.Path(run), added, pathlib.Path(added_run))


def _named(meta, run):
  """A run with the id that the run trained there has; `old` stands for none."""
  return dataclasses.replace(meta, run={'': run, 'old': ''}.get(meta.run, meta.run))


@pytest.mark.parametrize(
  ('source', 'run', 'added', 'added_run'),
  [
    (BASE, '/base', OF_GROWN, '/added'),
    (_meta((_born('grow', '/base'), _born('remove', '/grown', TARGET))), '/b', OF_GROWN, '/added'),
    (PUT_BACK, '/back', OF_TWIN, '/added'),
    (GROWN, '/grown', OF_TWIN, '/added'),
    (_meta(ffn=7), '/base', _meta(ffn=8), '/other'),
    (BASE, '/base', _meta(run='other'), '/base'),
    (OLD_GROWN, '/one', OF_TWIN, '/added'),
  ],
  ids=[
    *('the base', 'removed before', 'a second specialist', 'beside its own', 'strangers'),
    *('another run in the place of the first', 'grown without ids'),
  ],
)
def test_tokens_that_a_run_does_not_have_may_be_merged(source, run, added, added_run):
  source, added = _named(source, run), _named(added, added_run)
  merging.check_not_twice(source, pathlib.Path(run), added, pathlib.Path(added_run))


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


@SLOW
def test_shrinking_right_after_a_growth_drops_what_it_added():
  after, shrunken = _shrunken(_grown(), TARGET, SMALL)
  assert after == SOURCE, 'the model is not the one before the growth'
  base = state_of(SOURCE)
  assert_same(shrunken['params'], base['params'], 'an unused token was kept instead of a used one')
  assert_same(adam(shrunken).mu, adam(base).mu, 'the moments are of other tokens')
  got = difference(logits(after, shrunken['params']), logits(TARGET, _grown()['params']))
  assert got <= 1e-6, 'shrinking back changes the logits'


@pytest.mark.slow
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
  _, shrunken = _shrunken(state_of(SOURCE), SOURCE, by_name(24, 40, 30))
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
    (by_name(24, 40, 64), 'ffn has 48 parameter tokens, and shrink cannot make 64 of them'),
    (by_name(24, 40, 48), 'nothing would shrink'),
  ],
)
def test_shrinking_to_more_is_refused(counts, sentence):
  with pytest.raises(UserError, match=sentence):
    subsets.check_smaller(SOURCE, grown_model(SOURCE, counts, KEEP))
