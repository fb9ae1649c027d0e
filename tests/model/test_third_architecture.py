"""The life of a run whose mixer the package does not have: a config and a name are all it takes."""

import shutil

import jax
import numpy as np
import pytest
import third_architecture as third
import tiny_run
from outcomes import assert_same

import tokenformer_jax
from tokenformer_jax.model import flops, models, params
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow  # because of the run
STEPS, BROKEN_OFF = 6, 3


@pytest.fixture(autouse=True, scope='module')
def third_architecture():
  with third.named():
    yield


def config(source, cache, **changes):
  dotted = {name.replace('.', '__'): value for name, value in third.CHANGES.items()}
  sizes = {'train__steps': STEPS, 'train__checkpoint_every': BROKEN_OFF}
  return tiny_run.config(source, cache, **dotted, **sizes, **changes)


@pytest.fixture(scope='module')
def home(tmp_path_factory):
  return tmp_path_factory.mktemp('third')


@pytest.fixture(scope='module')
def wanted(source, home):
  return config(source, home / 'cache')


@pytest.fixture(scope='module')
def run(home, wanted):
  """A run of all steps, on one device."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
    loop.train(wanted, home / 'run')
    yield tokenformer_jax.load(home / 'run')


def losses(workdir):
  return {m['step']: m['train/loss'] for m in metrics.read(workdir) if 'train/loss' in m}


def test_a_third_architecture_reports_figures_of_its_layers(run):
  lines = metrics.read(run.directory)
  for kind in ('train', 'eval'):
    said = [line for line in lines if f'{kind}/loss' in line]
    assert said and all({f'{kind}/recurrent/size', f'{kind}/aux_loss'} <= m.keys() for m in said), (
      f'what layers say is not in the lines of {kind}'
    )


def test_a_third_architecture_resumes_bit_for_bit(run, home, wanted, one_device):
  broken = home / 'broken'
  shutil.copytree(run.directory, broken)
  shutil.rmtree(broken / 'checkpoints' / str(STEPS))
  loop.train(wanted, broken)
  resumed = tokenformer_jax.load(broken)
  assert_same(resumed.parameters, run.parameters, 'a resumed run is another run')


def test_a_third_architecture_grows_exactly_and_trains_on(run, home, one_device):
  grown = run.grow(home / 'grown', {'ffn': 96, 'recurrent.qkv': 48})
  counts = models.define(grown.config.model).abstract['blocks']
  found = [counts[name]['attention']['query']['keys'].shape[1] for name in sorted(counts)]
  assert found == [32, 48, 48], 'other projections have grown than those that were named'
  ids = np.arange(24)[None] % 256
  np.testing.assert_allclose(
    grown.logits(ids), run.logits(ids), atol=1e-6, err_msg='growth changes what the model computes'
  )
  trained = grown.train(steps=STEPS + 1)
  assert trained.step == STEPS + 1, 'the grown run does not go on'


def test_a_third_architecture_generates_text(run):
  assert run.generate('def', length=4, temperature=0.0), 'nothing is decoded with its caches'


def test_its_flops_are_counted(run):
  model, length = run.config.model, 32
  definition = models.define(model)
  matrices = params.matrix_entries(definition.bind(definition.abstract))
  window = third.WINDOW - third.WINDOW**2 / (2 * length)
  of_length = 2 * 4 * model.width * window + 3 * 4 * model.width * (length + 1) / 2
  assert flops.forward_flops(model, length) == 2 * matrices + of_length, (
    'a mixer is not asked for what depends on the length'
  )


def test_a_third_architecture_trains_alike_on_a_mesh(run, source, home):
  on_mesh = config(source, home / 'cache', mesh__fsdp=4, mesh__tokens=2)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, 'find_devices', lambda: jax.devices()[:8])
    loop.train(on_mesh, home / 'mesh')
  one, eight = losses(run.directory), losses(home / 'mesh')
  assert one.keys() == eight.keys() and one, 'lines of figures are missing'
  np.testing.assert_allclose(
    list(eight.values()), list(one.values()), rtol=1e-4, err_msg='the mesh changes the run'
  )
