"""Check the updates of each optimizer, also with frozen tokens."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from outcomes import paths
from tiny import OLD, STEADY, make_optimizer, tiny_model

from tokenformer_jax.config import OPTIMIZERS, OptimConfig
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.model.params import ParamInfo, Role
from tokenformer_jax.steps import entries, optimizers, statistics
from tokenformer_jax.steps.entries import LastGrowth

# Muon leaves some arrays to Adam; the state of Adafactor is most unlike theirs.
EACH = pytest.mark.parametrize('name', ['muon', 'adafactor'])
ZEROS = jax.nn.initializers.zeros
TOKENS = ('layers', 'param_tokens', 'width')
EXPERTS = ('layers', 'experts', 'expert_width', 'expert_hidden')
INFO = {
  'keys': ParamInfo(TOKENS, Role.KEY, ZEROS, (1, 2), groups=(7,)),
  'values': ParamInfo(TOKENS, Role.VALUE, ZEROS, (1, 2), groups=(7,)),
  'kernel': ParamInfo(('layers', 'width', 'hidden'), Role.KERNEL, ZEROS, (1, 2)),
  'embedding': ParamInfo(('vocab', 'width'), Role.EMBEDDING, ZEROS, 0),
  'gain': ParamInfo(('norm',), Role.GAIN, ZEROS),
}
SHAPES = {
  'keys': (2, 7, 3),
  'values': (2, 7, 4),
  'kernel': (2, 3, 5),
  'embedding': (6, 3),
  'gain': (3,),
}
OLD_TOKENS = {name: OLD * (name in ('keys', 'values')) for name in SHAPES}
GROWTH = LastGrowth(100, entries.old_entries(INFO, OLD_TOKENS))
LAYERS = (1, 2)


def _kernel(*axes: str, role: Role = Role.KERNEL) -> ParamInfo:
  return ParamInfo(('layers', *axes), role, ZEROS, LAYERS)


# Arrays by the axis of which the first `OLD` entries are old.
GROWN = {
  'param_tokens': {'keys': INFO['keys'], 'values': INFO['values']},
  'hidden': {
    'up': _kernel('width', 'hidden'),
    'down': _kernel('hidden', 'width'),
    'bias': _kernel('hidden', role=Role.BIAS),
  },
  'expert_hidden': {'experts_up': _kernel('experts', 'expert_width', 'expert_hidden')},
  'experts': {'experts': _kernel('experts', 'expert_width', 'expert_hidden')},
  'routes': {'router': _kernel('width', 'routes', role=Role.ROUTER)},
}
SIZES = {'layers': 2, 'width': 3, 'experts': 2, 'expert_width': 3, 'expert_hidden': 2}
GROWN_AXES = {key: axis for axis, arrays in GROWN.items() for key in arrays}
GROWN_INFO = {key: one for arrays in GROWN.values() for key, one in arrays.items()}
ALONG_EACH = LastGrowth(
  100,
  {
    key: entries.Entries(one.axes, {GROWN_AXES[key]: ((0, OLD),)})
    for key, one in GROWN_INFO.items()
  },
)


def _draw_grown(seed: int) -> dict:
  """Arrays that have 9 entries along the axis of their growth."""
  rng, sizes = np.random.default_rng(seed), {}
  for key, one in GROWN_INFO.items():
    sizes[key] = [9 if axis == GROWN_AXES[key] else SIZES[axis] for axis in one.axes]
  return {key: np.float32(rng.normal(size=shape)) for key, shape in sizes.items()}


def _new(tree: dict) -> dict:
  """The new entries of arrays."""
  before = {key: GROWN_INFO[key].axes.index(GROWN_AXES[key]) for key in tree}
  return {
    key: array[(slice(None),) * before[key] + (slice(OLD, None),)] for key, array in tree.items()
  }


def _draw(seed: int) -> dict:
  rng = np.random.default_rng(seed)
  return {k: np.float32(rng.normal(size=shape)) for k, shape in SHAPES.items()}


def _scaled(name: str, gradients: list[dict], **changes) -> dict:
  """The last update that the optimizer makes of some gradients, before decay and rate."""
  info = {key: INFO[key] for key in gradients[0]}
  tx = optimizers.scale(OPTIMIZERS[name](**changes), info)
  state, update = jax.jit(tx.init)(gradients[0]), jax.jit(tx.update)
  for gradient in gradients:
    updates, state = update(gradient, state, gradient)
  return updates


def test_muon_orthogonalizes_each_layer_by_itself():
  gradients = _draw(0)
  got = _scaled('muon', [gradients])
  for key in ('keys', 'values', 'kernel'):
    for layer, update in enumerate(np.asarray(got[key])):
      values = np.linalg.svd(update, compute_uv=False) / np.sqrt(max(update.shape))
      assert np.all((values > 0.1) & (values < 0.3)), f'{key} {layer}: {values}, and not about 0.2'
  three = np.float32([1, 3])[:, None, None]
  other = {k: v * three if v.ndim == 3 else v for k, v in gradients.items()}
  again = _scaled('muon', [other])
  np.testing.assert_allclose(
    got['keys'][0], again['keys'][0], rtol=1e-6, err_msg='a layer depends on another one'
  )


GROUPED = {
  key: dataclasses.replace(one, groups=(OLD, 7 - OLD) if one.token_axis else ())
  for key, one in INFO.items()
}


def _part(tree: dict, where: slice) -> dict:
  """Some tokens of the arrays that have any."""
  return {key: tree[key][:, where] for key in ('keys', 'values')}


def test_muon_moves_a_group_as_if_it_were_alone():
  """Also with moments, which the other group has as well."""
  groups = {key: GROUPED[key] for key in ('keys', 'values')}
  tx = optimizers.scale(OPTIMIZERS['muon'](), groups)
  other = optimizers.scale(OPTIMIZERS['muon'](), {key: INFO[key] for key in groups})

  def last(tx, where: slice) -> dict:
    state, update = tx.init(_part(_draw(0), where)), jax.jit(tx.update)
    for seed in (1, 2, 3):
      updates, state = update(_part(_draw(seed), where), state)
    return updates

  both = last(tx, slice(None))
  for where in (slice(0, OLD), slice(OLD, 7)):
    for key, want in last(other, where).items():
      np.testing.assert_allclose(
        both[key][:, where], want, rtol=1e-5, atol=1e-6, err_msg=f'{key} depends on other groups'
      )


@pytest.mark.parametrize(
  ('frozen', 'old', 'seen'),
  [((), 2, '0011111'), ((), 5, '0000011'), ((2,), 0, '1110000'), ((1,), 4, '0000111')],
)
def test_old_tokens_and_frozen_groups_are_hidden(frozen, old, seen):
  numbers = range(1, 3)
  info = dataclasses.replace(GROUPED['keys'], frozen=tuple(number in frozen for number in numbers))
  trees = filter(None, (entries.old_entries(info, old), entries.frozen_entries(info)))
  mask = entries.visible(SHAPES['keys'], *trees)
  assert mask.shape == (1, 7, 1) and ''.join(map(str, mask.astype(int).ravel())) == seen
  assert entries.visible(SHAPES['kernel'], *trees).all(), 'an array without tokens hides some'


def test_new_layers_and_experts_hide_nothing():
  new_layer = entries.Entries(TOKENS, {'param_tokens': ((0, 5),), 'layers': ((0, 1),)})
  seen = entries.visible(SHAPES['keys'], new_layer)
  assert seen.sum(1).ravel().tolist() == [2, 7]
  axes = ('layers', 'experts', 'width', 'expert_hidden')
  both = entries.Entries(axes, {'experts': ((0, 1),), 'expert_hidden': ((0, 5),)})
  assert entries.visible((2, 3, 4, 8), both).sum(-1).ravel().tolist() == [3, 8, 8]


def test_muon_leaves_the_rest_to_adam():
  gradients = [_draw(0), _draw(1)]
  rest = [{k: one[k] for k in ('embedding', 'gain')} for one in gradients]
  got, want = _scaled('muon', gradients), _scaled('adamw', rest)
  for key in want:
    np.testing.assert_allclose(got[key], want[key], rtol=1e-6, err_msg=f'{key} is not under Adam')


@pytest.mark.parametrize('changes', [{'tied_head': False}, {'dense': True, 'bias': True}])
def test_muon_has_the_matrices_of_layers(changes):
  definition = define_lm(tiny_model(**changes))
  tx = make_optimizer(OPTIMIZERS['muon'](), 10, definition.info)
  ((_, parts), *_) = jax.eval_shape(tx.init, definition.abstract)
  by_muon = set(paths_of(parts.inner_states['muon'].inner_state.mu))
  by_adam = set(paths_of(parts.inner_states['adam'].inner_state.mu))
  assert by_muon | by_adam == set(paths_of(definition.abstract)) and not by_muon & by_adam
  endings = ('keys', 'values', 'kernel')
  wrong = [p for p in by_adam if p.startswith('blocks') and p.endswith(endings)]
  wrong += [p for p in by_muon if not (p.startswith('blocks') and p.endswith(endings))]
  assert not wrong, f'these are with the wrong optimizer: {wrong}'


def paths_of(tree) -> list[str]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in leaves]


def test_lion_takes_signs():
  got = paths(_scaled('lion', [_draw(0)]))
  for key, gradient in paths(_draw(0)).items():
    np.testing.assert_array_equal(got[key], np.sign(gradient), err_msg=key)


@pytest.mark.parametrize('key', ['gain', 'keys'])
def test_adafactor_is_that_of_optax(key):
  """Compare a matrix or a single layer, because optax does not treat layers apart."""
  gradients = [{key: _draw(seed)[key]} for seed in range(3)]
  got = np.asarray(_scaled('adafactor', gradients)[key])
  tx = optax.chain(
    optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0)
  )

  init, update = jax.jit(tx.init), jax.jit(tx.update)

  def last(arrays: list) -> np.ndarray:
    state = init(arrays[0])
    for array in arrays:
      updates, state = update(array, state, array)
    return np.asarray(updates)

  layers = range(2) if key == 'keys' else [...]
  for layer in layers:
    want = last([one[key][layer] for one in gradients])
    np.testing.assert_allclose(got[layer], want, rtol=1e-5, atol=1e-6, err_msg=f'{key}, {layer}')


# Old and new tokens


def _drawn_state(tx, params: dict):
  """A state with random statistics, and counts of two updates."""
  rng = np.random.default_rng(5)
  return jax.tree.map(
    lambda a: rng.random(a.shape, a.dtype) if a.shape else np.full((), 2, a.dtype),
    jax.eval_shape(tx.init, params),
  )


def _config(name: str, **changes) -> OptimConfig:
  return OPTIMIZERS[name](**{**STEADY, **changes})


@EACH
def test_the_state_has_one_structure_and_known_parts(name):
  params = _draw(0)
  plain = make_optimizer(_config(name), 10, INFO).init(params)
  for changes in ({}, {'old_tokens': 'freeze'}, {'clip_norm': 0.0}):
    tx = make_optimizer(_config(name, **changes), 10, INFO, GROWTH)
    after = jax.eval_shape(lambda: tx.update(_draw(1), tx.init(params), params)[1])  # noqa: B023
    assert jax.tree.structure(after) == jax.tree.structure(plain), f'{changes}: another structure'
  same = statistics.map_state(lambda name, tree: tree, lambda part, count: count, plain)
  assert jax.tree.structure(same) == jax.tree.structure(plain), 'a part of the state is lost'


@EACH
def test_frozen_tokens_stay_bit_for_bit(name):
  params = _draw(0)
  tx = make_optimizer(_config(name, old_tokens='freeze'), 10, INFO, GROWTH)
  state = _drawn_state(tx, params)
  updates, new = jax.jit(tx.update)(_draw(1), state, params)
  for key, update in paths(updates).items():
    new_tokens = update[:, OLD:] if key in ('keys', 'values') else update[:0]
    assert np.count_nonzero(update) == np.count_nonzero(new_tokens), f'{key}: old entries move'
    assert np.all(new_tokens), f'{key}: new tokens stand'
  kept = []

  def of_statistic(which, before, after):
    for key in before:
      if statistics.is_masked(before[key]):
        continue
      a, b = np.asarray(before[key]), np.asarray(after[key])
      if key in ('keys', 'values'):
        if which == 'v_col':
          continue  # a mean over old and new tokens
        a, b = a[:, :OLD], b[:, :OLD]
      kept.append((which, key, a.tobytes() == b.tobytes()))
    return after

  statistics.map_state(of_statistic, lambda _, before, after: after, state, new)
  assert kept, 'nothing was compared'
  assert all(same for *_, same in kept), f'statistics of old entries change: {kept}'


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_what_is_new_moves_as_if_what_is_frozen_were_not_there(name):
  """From an empty state, for growth along each axis: means and sizes are those of the new part."""
  params, *gradients = map(_draw_grown, range(4))
  # The last gradient is smaller, so that Adafactor's clip has no effect.
  gradients[2] = {key: array / 4 for key, array in gradients[2].items()}
  tx = make_optimizer(_config(name, old_tokens='freeze'), 10, GROWN_INFO, ALONG_EACH)
  other = make_optimizer(_config(name), 10, GROWN_INFO)
  state, state_alone = tx.init(params), other.init(_new(params))
  update, update_alone = jax.jit(tx.update), jax.jit(other.update)
  for number, gradient in enumerate(gradients, start=1):
    got, state = update(gradient, state, params)
    want, state_alone = update_alone(_new(gradient), state_alone, _new(params))
    for key, new in _new(got).items():
      what = f'{name}: update {number} of {key}, grown by {GROWN_AXES[key]}'
      np.testing.assert_allclose(new, want[key], rtol=1e-4, atol=1e-6, err_msg=what)


@EACH
def test_a_new_layer_moves_as_if_the_old_one_were_not_there(name):
  """All its tokens are new. The old layer has new keys, and no new values."""
  counts = {'keys': OLD, 'values': 7}
  params, gradient = ({key: _draw(seed)[key] for key in counts} for seed in (0, 1))
  config = _config(name, clip_norm=0.0, old_tokens='freeze')

  def updates(tx, *last: slice):
    g, p = ({key: tree[key][last] for key in counts} for tree in (gradient, params))
    return jax.jit(tx.update)(g, tx.init(p), p)[0]

  alone = {key: dataclasses.replace(INFO[key], depth=(1,)) for key in counts}
  want = updates(make_optimizer(config, 10, alone), slice(1, None))
  info = {key: INFO[key] for key in counts}
  growth = LastGrowth(100, entries.old_entries(info, counts, (2,)))
  got = updates(make_optimizer(config, 10, info, growth))
  for key, old in counts.items():
    np.testing.assert_allclose(
      got[key][1:], want[key], rtol=1e-4, atol=1e-7, err_msg=f'{name}: {key} of the new layer'
    )
    assert np.array_equal(np.any(got[key][0], -1), np.arange(7) >= old), f'{name}: old {key} move'


@EACH
def test_rates_by_age_hold_for_every_optimizer(name):
  """Old and new entries have the updates of one model, each times its factor."""
  params = _draw_grown(0)
  changes = {'old_tokens': 'scale:0.1', 'new_token_warmup': 3}
  plain = make_optimizer(_config(name), 1000, GROWN_INFO, ALONG_EACH)
  tx = make_optimizer(_config(name, **changes), 1000, GROWN_INFO, ALONG_EACH)
  *others, rates = _drawn_state(plain, params)
  state = (*others, rates._replace(count=np.int32(ALONG_EACH.updates)))
  got, want = (jax.jit(one.update)(_draw_grown(1), state, params)[0] for one in (tx, plain))
  for key, update in want.items():
    is_old = ALONG_EACH.old[key].mask(update.shape)
    factors = np.where(is_old, 0.1, 0.25)
    np.testing.assert_allclose(got[key], factors * update, rtol=1e-5, err_msg=f'{name}: {key}')
