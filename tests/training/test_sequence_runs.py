"""Runs whose rows are split over devices: they learn, evaluate, write, resume, move and grow."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_hosts
import tiny_run
from outcomes import assert_same, losses
from trainers import trainer

from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow
SPLIT = {'mesh__fsdp': 2, 'mesh__sequence': 2, 'mesh__tokens': 2}
FIGURES = ('train/loss', 'eval/loss')


def test_a_run_with_split_rows_is_that_of_one_device(make, tmp_path, monkeypatch):
  changes = {'train__eval_every': 10, 'train__log_every': 1, 'train__sample_tokens': 4}
  run = trainer(make(**SPLIT, **changes), tmp_path / 'split')
  with jax.set_mesh(run.mesh):
    run.train(*run.first_state())
  assert run.train_step._cache_size() == 1, 'the training step was compiled more than once'
  assert metrics.read_lines(tmp_path / 'split/samples.jsonl')[-1]['text'], 'it writes no text'
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  loop.train(make(**changes), tmp_path / 'one')
  for figure in FIGURES:
    one, split = (losses(tmp_path / name, figure) for name in ('one', 'split'))
    np.testing.assert_allclose(list(split.values()), list(one.values()), rtol=1e-4, err_msg=figure)


def test_a_run_with_split_rows_resumes_bit_for_bit_and_on_another_mesh(make, tmp_path):
  config = make(**SPLIT, train__keep_checkpoints=9)
  whole = loop.train(config, tmp_path / 'run')
  straight = losses(tmp_path / 'run')
  for step in (15, 20):
    (tmp_path / f'run/checkpoints/{step}').rename(tmp_path / f'{step}.lost')
  resumed = loop.train(config, tmp_path / 'run')
  assert_same(whole, resumed, 'after a resume')
  for step in (15, 20):
    (tmp_path / f'run/checkpoints/{step}').rename(tmp_path / f'{step}.again')
  mesh = dataclasses.replace(config.mesh, fsdp=8, sequence=1, tokens=1)
  loop.train(dataclasses.replace(config, mesh=mesh), tmp_path / 'run')
  np.testing.assert_allclose(
    list(losses(tmp_path / 'run').values()), list(straight.values()), rtol=1e-4
  )


def test_a_run_of_another_mesh_grows_into_split_rows(make, tmp_path):
  loop.train(make(train__steps=10), tmp_path / 'small')
  changes = {'train__steps': 15, 'model__layer__ffn__tokens': 96, 'train__log_every': 1}
  for name, split in (('whole', {}), ('split', SPLIT)):
    config = make(**changes, **split)
    loop.train(dataclasses.replace(config, init_from=str(tmp_path / 'small')), tmp_path / name)
  whole, split = losses(tmp_path / 'whole'), losses(tmp_path / 'split')
  assert whole.keys() == split.keys() and len(split) == 5
  np.testing.assert_allclose(list(split.values()), list(whole.values()), rtol=1e-4)


def test_rows_that_cross_hosts_are_those_of_one(source, tmp_path):
  """Each host reads the rows that its devices have a part of."""
  few = {'train__steps': 2, 'train__log_every': 1, 'train__eval_batches': 1}
  for count, split in ((1, {}), (2, {'mesh__fsdp': 1, 'mesh__sequence': 4})):
    command = tiny_run.command(source, tmp_path / 'cache', tmp_path / str(count), **few, **split)
    with tiny_hosts.started(command, count, devices=4 // count) as running:
      ended = tiny_hosts.ends(running, timeout=300)
    assert not any(process.status for process in ended), [process.err for process in ended]
  for figure in FIGURES:
    one, two = (losses(tmp_path / name, figure) for name in '12')
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-4, err_msg=figure)
