"""The life of a run whose mixer the package does not have: a config and a name are all it takes."""

import jax
import numpy as np
import pytest
import third_architecture as third
import tiny_run

import tokenformer_jax
from tokenformer_jax.model import models
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow  # because of the run
STEPS = 4


@pytest.fixture(autouse=True, scope='module')
def third_architecture():
  with third.named():
    yield


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  return tmp_path_factory.mktemp('third')


@pytest.fixture(scope='module')
def run(source, home):
  """A run of all steps, on one device."""
  changes = {name.replace('.', '__'): value for name, value in third.CHANGES.items()}
  changes['model__pattern'] = 'local recurrent'
  config = tiny_run.config(source, home / 'cache', train__steps=STEPS, **changes)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    loop.train(config, home / 'run')
    yield tokenformer_jax.load(home / 'run')


def test_a_third_architecture_reports_figures_of_its_layers(run):
  lines = metrics.read(run.directory)
  for kind in ('train', 'eval'):
    said = [line for line in lines if f'{kind}/loss' in line]
    assert said and all({f'{kind}/recurrent/size', f'{kind}/aux_loss'} <= m.keys() for m in said), (
      f'what layers say is not in the lines of {kind}'
    )


def test_a_third_architecture_grows_exactly_and_trains_on(run, home, one_device):
  grown = run.grow(home / 'grown', {'ffn': 96, 'recurrent.qkv': 48})
  counts = models.define(grown.config.model).abstract['blocks']
  found = [counts[name]['attention']['query']['keys'].shape[1] for name in sorted(counts)]
  assert found == [32, 48], 'other projections have grown than those that were named'
  ids = np.arange(24)[None] % 256
  np.testing.assert_allclose(
    grown.logits(ids), run.logits(ids), atol=1e-6, err_msg='growth changes what the model computes'
  )
  trained = grown.train(steps=STEPS + 1)
  assert trained.step == STEPS + 1, 'the grown run does not go on'


def test_a_third_architecture_generates_text(run):
  assert run.generate('def', length=4, temperature=0.0), 'nothing is decoded with its caches'
