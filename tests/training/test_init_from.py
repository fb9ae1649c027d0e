"""Runs that start from another run, grown or not."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from outcomes import assert_same, losses
from tiny_run import begun, broken, train_on_one_device

from tokenformer_jax import config as config_lib
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import checkpoint
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow  # because a run is trained first


@pytest.fixture(scope='module')
def ancestor(source, tmp_path_factory):
  """A run of 20 steps that others start from, and its last state."""
  root = tmp_path_factory.mktemp('ancestor')
  return root / 'run', train_on_one_device(tiny_run.config(source, root / 'cache'), root / 'run')


LARGER = {'model__layer__mixer__qkv__tokens': 48, 'model__layer__ffn__tokens': 96}


def test_a_grown_run_goes_on_bit_for_bit_without_its_source(make, tmp_path, one_device, ancestor):
  """With init_from still in its config, more tokens and layers, and the old ones frozen."""
  shutil.copytree(ancestor[0], tmp_path / 'source')
  changes = {'model__pattern': 'layer*4', 'optim__old_tokens': 'freeze', **LARGER}
  changes['init_from'] = str(tmp_path / 'source')
  config = make(train__steps=30, train__keep_checkpoints=9, **changes)
  whole = loop.train(config, tmp_path / 'run')
  assert sorted(losses(tmp_path / 'run')) == [25, 30], 'the steps of the source are made again'
  shutil.rmtree(tmp_path / 'source')
  resumed = loop.train(config, broken(tmp_path / 'run', tmp_path / 'again', 25))
  assert_same(resumed, whole, 'after a resume')

  old, new = (state['params']['blocks']['ffn']['values'] for state in (ancestor[1], whole))
  np.testing.assert_array_equal(new[::2, :64], old, 'frozen layers moved')
  assert np.all(np.any(np.asarray(new[1::2]), axis=-1)), 'a token of a new layer is still zero'
  np.testing.assert_array_equal(whole['params']['embedding'], ancestor[1]['params']['embedding'])

  meta = checkpoint.open_source(tmp_path / 'run').meta
  (born,) = meta.lineage
  origin = (str(tmp_path / 'source'), 20, 20)
  assert (born.source, born.step, born.updates, born.action) == (*origin, 'grow')
  counts = config_lib.token_counts(born.model)
  assert counts == {'qkv': 32, 'proj': 32, 'ffn': 64}
  groups = {n: p.groups for n, p in config_lib.pattentions(meta.config.model).items()}
  assert {n: first.reference for n, (first, *_) in groups.items()} == counts, 'τ is not kept'


def test_a_growth_of_init_from_says_that_it_is_not_exact(
  make, tmp_path, one_device, ancestor, capsys
):
  config = make(train__steps=30, init_from=str(ancestor[0]), **LARGER)
  begun(config, tmp_path / 'exact')
  assert 'will not compute' not in capsys.readouterr().err, 'an exact growth is doubted'
  grow = dataclasses.replace(config.grow, method='random')
  begun(dataclasses.replace(config, grow=grow), tmp_path / 'random')
  said = capsys.readouterr().err
  assert f'the grown model will not compute what {ancestor[0]} does: the scores of random' in said


def test_a_growth_on_one_mesh_goes_on_on_another(make, tmp_path, monkeypatch, ancestor):
  grown = make(train__log_every=1, train__steps=24, init_from=str(ancestor[0]), **LARGER)
  many = dataclasses.replace(grown.mesh, fsdp=4, tokens=2)

  def on(config, eight, workdir):
    with monkeypatch.context() as patch:
      if eight:
        config = dataclasses.replace(config, mesh=many)
      else:
        patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
      loop.train(config, workdir)

  on(grown, False, tmp_path / 'stay')
  started = dataclasses.replace(grown, train=dataclasses.replace(grown.train, checkpoint_every=21))
  on(started, True, tmp_path / 'move')
  moved = broken(tmp_path / 'move', tmp_path / 'moved', 21)
  on(started, False, moved)
  stay, move = losses(tmp_path / 'stay'), losses(moved)
  assert list(stay) == list(move) == list(range(21, 25))
  np.testing.assert_allclose(
    list(move.values()), list(stay.values()), rtol=1e-4, err_msg='the mesh changes the losses'
  )
