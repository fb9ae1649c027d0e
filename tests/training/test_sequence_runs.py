"""Runs whose rows are split over devices: they learn, evaluate, write, resume and move."""

import jax
import numpy as np
import pytest
import tiny_run
from outcomes import assert_same, losses
from tiny_run import broken, train_on_one_device, trainer

from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow
SPLIT = {'mesh__fsdp': 2, 'mesh__sequence': 2, 'mesh__tokens': 2}
CHANGES = {
  'train__eval_every': 10,
  'train__log_every': 1,
  'train__sample_tokens': 4,
  'train__keep_checkpoints': 9,
}


@pytest.fixture(scope='module')
def split(source, tmp_path_factory):
  """The work directory of a run with split rows, its config, and its last state."""
  root = tmp_path_factory.mktemp('split')
  config = tiny_run.config(source, root / 'cache', **SPLIT, **CHANGES)
  run = trainer(config, root / 'run')
  with jax.set_mesh(run.mesh):
    state = run.train(*run.first_state())
  assert run.train_step._cache_size() == 1, 'the training step was compiled more than once'
  return root / 'run', config, state


@pytest.fixture(scope='module')
def one(source, tmp_path_factory):
  """The same of one device."""
  root = tmp_path_factory.mktemp('one')
  config = tiny_run.config(source, root / 'cache', **CHANGES)
  return root / 'run', config, train_on_one_device(config, root / 'run')


def assert_same_losses(workdir, one, figure='train/loss'):
  ours, theirs = losses(workdir, figure), losses(one[0], figure)
  assert ours.keys() == theirs.keys()
  np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4, err_msg=figure)


def test_a_run_with_split_rows_is_that_of_one_device(split, one):
  assert metrics.read_lines(split[0] / 'samples.jsonl')[-1]['text'], 'it writes no text'
  for figure in ('train/loss', 'eval/loss'):
    assert_same_losses(split[0], one, figure)


def test_a_run_with_split_rows_resumes_bit_for_bit(split, tmp_path):
  resumed = loop.train(split[1], broken(split[0], tmp_path / 'run', 10))
  assert_same(resumed, split[2], 'after a resume')


def test_a_run_with_split_rows_resumes_on_another_mesh(split, one, tmp_path, one_device):
  workdir = broken(split[0], tmp_path / 'run', 10)
  loop.train(one[1], workdir)
  assert_same_losses(workdir, one)
