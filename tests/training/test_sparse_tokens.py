"""Runs that train only the parameter tokens that the new text uses and the old does not."""

import dataclasses
import re
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from outcomes import assert_same, paths
from tiny import tiny_model
from trainers import begun, broken, train_on_one_device

from tokenformer_jax.config import (
  AdamWConfig,
  Config,
  SourceConfig,
  Sources,
  TextConfig,
  growth,
)
from tokenformer_jax.config.groups import with_frozen
from tokenformer_jax.config.optim import MuonConfig
from tokenformer_jax.errors import UserError
from tokenformer_jax.grow.steps.tokens import grown_model
from tokenformer_jax.model.lm import define_lm
from tokenformer_jax.parallel import sharding
from tokenformer_jax.training import loop, sparse


def scores(definition, seed):
  """The importance of each token, by `score_tokens`, of which some have none."""
  rng = np.random.default_rng(seed)
  drawn = rng.exponential(size=(2, 64)) * (rng.random((2, 64)) > 0.1)
  return jax.tree.map(
    lambda info, array: np.float32(drawn[:, : array.shape[1]] if info.token_axis else 0),
    definition.info,
    definition.abstract,
  )


def config_of(kind=AdamWConfig, sparse_tokens=0.1, background='old'):
  """The config of a run whose old text is `old`."""
  sources = Sources({'old': SourceConfig(source='stdlib')})
  optim = kind(sparse_tokens=sparse_tokens, background=background)
  return Config(data=TextConfig(mixture=sources), optim=optim)


def values(tree):
  """The arrays of values by path."""
  return {path: array for path, array in paths(tree).items() if path.endswith('values')}


def test_the_tokens_with_the_largest_part_of_the_divergence_are_chosen():
  definition = define_lm(tiny_model())
  new, old = scores(definition, 0), scores(definition, 1)
  chosen = sparse.choose_tokens(definition.info, 30, new, old)

  ranks = {}
  for path, importance in values(new).items():
    for (layer, token), u in np.ndenumerate(importance):
      u = max(u / importance[layer].mean(), 1e-6)
      other = values(old)[path][layer]
      ranks[path, layer, token] = u * np.log(u / max(other[token] / other.mean(), 1e-6))
  best = set(sorted(ranks, key=lambda key: -ranks[key])[:30])
  got = {(path, *index) for path, m in values(chosen).items() for index in np.argwhere(m).tolist()}
  assert got == best

  for path, mask in paths(chosen).items():
    if path.endswith('keys'):
      np.testing.assert_array_equal(mask, paths(chosen)[path.replace('keys', 'values')])
    elif not path.endswith('values'):
      assert mask.shape == () and not mask, path


def test_tokens_of_frozen_groups_are_not_chosen():
  model = with_frozen(grown_model(tiny_model(), {'ffn': 64}, growth(method='group')), [1])
  definition = define_lm(model)
  new, old = scores(definition, 0), scores(definition, 1)
  chosen = values(sparse.choose_tokens(definition.info, 16, new, old))
  assert sum(mask.sum() for mask in chosen.values()) == 16
  assert chosen['blocks/ffn/values'][:, 48:].sum() == 16, 'frozen tokens would train'


TOO_FEW = 'neither a number of the 320 parameter tokens nor a share below 1'
NO_SOURCE = 'is not a source of config.data.mixture; add it'
REFUSED = {
  'a Transformer': ({}, {'dense': True}, 'this model has no parameter tokens'),
  'a share of no token': ({'sparse_tokens': 1e-4}, {}, f'sparse_tokens is 0.0001: it is {TOO_FEW}'),
  'part of a token': ({'sparse_tokens': 1.5}, {}, TOO_FEW),
  'more than there are': ({'sparse_tokens': 321}, {}, TOO_FEW),
  'no background text': ({'background': ''}, {}, NO_SOURCE),
  'another background text': ({'background': 'odl'}, {}, f'background=odl {NO_SOURCE}'),
  'whole matrices': ({'kind': MuonConfig}, {}, 'set config.optim.kind to adamw or lion'),
}


@pytest.mark.parametrize('optim, model, message', REFUSED.values(), ids=REFUSED)
def test_tokens_that_cannot_be_chosen_are_refused(optim, model, message):
  definition = define_lm(tiny_model(**model))
  with pytest.raises(UserError, match=re.escape(message)):
    sparse.check(config_of(**optim), definition, is_trained=True)


def test_a_new_model_has_no_use_of_its_tokens():
  with pytest.raises(UserError, match=r'a new model uses no token yet; set config.init_from=DIR'):
    sparse.check(config_of(), define_lm(tiny_model()), is_trained=False)


IDLE = {
  'a background without sparse tokens': (
    {'background': 'old'},
    'effect with optim.sparse_tokens=0',
  ),
  'old tokens': (
    {'background': 'old', 'sparse_tokens': 0.5, 'old_tokens': 'freeze'},
    "old_tokens is 'freeze', which has no effect with optim.sparse_tokens=0.5",
  ),
  'a negative share': ({'sparse_tokens': -0.5}, 'sparse_tokens is -0.5'),
}


@pytest.mark.parametrize('optim, message', IDLE.values(), ids=IDLE)
def test_keys_that_do_not_go_together_are_refused(optim, message):
  with pytest.raises(UserError, match=re.escape(message)):
    mixed('nowhere', **{f'optim__{key}': value for key, value in optim.items()})


def test_images_have_no_text_to_compare():
  with pytest.raises(UserError, match=r'which has no effect with model\.kind=vit'):
    tiny_run.vit_config(optim__sparse_tokens=0.1)


def mixed(texts, **changes):
  """The config of a run on the new text that evaluates the old one."""
  named = {
    f'data__mixture__{name}__{key}': value
    for name, weight in (('new', 1.0), ('old', 0.0))
    for key, value in (('source', f'files:{texts}/{name}/*.txt'), ('weight', weight))
  }
  return tiny_run.config('stdlib', f'{texts}/cache', **named, **changes)


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """The folder of two corpora."""
  return tiny_run.write_two_corpora(tmp_path_factory.mktemp('sparse'))


@pytest.fixture(scope='module')
def base(texts):
  """The last state of a run on the old text."""
  config = tiny_run.config(f'files:{texts}/old/*.txt', f'{texts}/cache')
  return train_on_one_device(config, texts / 'base')


@pytest.fixture(scope='module')
def config(texts, base):
  """The config of a run that trains a quarter of the tokens of a trained model."""
  start = {'init_from': f'{texts}/base', 'grow__step': 'restart', 'grow__moments': 'drop'}
  sparse_keys = {'optim__sparse_tokens': 0.25, 'optim__background': 'old'}
  return mixed(texts, train__checkpoint_every=10, **start, **sparse_keys)


@pytest.fixture(scope='module')
def run(texts, config):
  """The work directory of this run, and its last state."""
  return texts / 'run', train_on_one_device(config, texts / 'run')


@pytest.mark.slow
def test_all_other_tokens_and_arrays_stay_bit_for_bit(base, run):
  state = run[1]
  before = paths(base['params'])
  after, trained = paths(state['params']), paths(state['trained'])
  moments = paths(state['opt_state'][0])
  assert sum(mask.sum() for mask in values(state['trained']).values()) == 96
  for path, array in after.items():
    mask = trained[path] == 1
    if not mask.ndim:
      mask = np.zeros(array.shape[:-1], bool)
    old = before[path]
    np.testing.assert_array_equal(array[~mask], old[~mask], err_msg=f'{path} moved')
    assert np.all(np.any(array[mask] != old[mask], axis=-1)), f'{path}: tokens did not train'
    for name, moment in moments.items():
      if name.endswith(path):
        assert not np.any(moment[~mask]), f'{name} of what does not train'


@pytest.mark.slow
def test_a_resumed_run_has_the_same_tokens(texts, config, run, tmp_path, one_device):
  again = broken(run[0], tmp_path / 'broken', 10)
  assert_same(loop.train(config, again), run[1], 'resumed')


@pytest.mark.slow
def test_the_tokens_can_be_chosen_anew_and_set_free(config, run, tmp_path, one_device):
  shutil.copytree(run[0], tmp_path / 'more')
  shutil.copytree(run[0], tmp_path / 'all')
  more = dataclasses.replace(config.optim, sparse_tokens=200.0)
  every = dataclasses.replace(config.optim, sparse_tokens=0.0, background='')
  longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=21))
  _, state, _ = begun(dataclasses.replace(longer, optim=more), tmp_path / 'more')
  assert sum(mask.sum() for mask in values(state['trained']).values()) == 200
  _, state, _ = begun(dataclasses.replace(longer, optim=every), tmp_path / 'all')
  assert 'trained' not in state


@pytest.mark.slow
def test_a_mesh_trains_the_same_tokens(config, run, tmp_path, monkeypatch):
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:2])
  mesh = dataclasses.replace(config.mesh, fsdp=1, tokens=2)
  _, state, _ = begun(dataclasses.replace(config, mesh=mesh), tmp_path / 'many')
  assert_same(state['trained'], run[1]['trained'], 'on a mesh')
