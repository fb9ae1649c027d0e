"""The driver of the experiments on growth makes the steps of `train.py`."""

import importlib
import sys

import jax
import numpy as np
import pytest
import tiny_run

from tokenformer_jax.training import loop

NAMES = ('branches', 'growth', 'trials')  # modules of experiments/


@pytest.fixture
def experiments(monkeypatch):
  """The modules of the driver and of an experiment that uses it."""
  monkeypatch.syspath_prepend(tiny_run.ROOT / 'experiments')
  yield [importlib.import_module(name) for name in NAMES[:2]]
  for name in NAMES:
    sys.modules.pop(name, None)


@pytest.mark.slow
def test_its_states_are_those_of_train_before_and_after_a_growth(experiments, tmp_path):
  branches, growth = experiments
  runs, constant = branches.Runs(tmp_path / 'runs'), {'kind': 'constant'}
  changes = {'optim__schedule': constant, 'train__sample_tokens': 0, 'train__eval_batches': 1}
  small = growth.config('tiny', '2x1', train__steps=32, **changes)
  _, points = runs.train('small', small, ends=[32])
  loop.train(small, tmp_path / 'small')
  changes |= {'train__steps': 64, 'grow__place': 'whole_stacked_copies'}
  _, grown = runs.train('large', growth.config('tiny', '4x1', **changes), points[32], ends=[64])
  large = growth.config('tiny', '4x1', **changes, init_from=str(tmp_path / 'small'))
  state = loop.train(large, tmp_path / 'large')
  with np.load(grown[64].path) as file:
    for number, array in enumerate(jax.tree.leaves(state)):
      np.testing.assert_allclose(file[str(number)], array, rtol=1e-4, atol=1e-5)
