"""Runs with every optimizer: they learn, resume, grow, and do so on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from outcomes import assert_same, losses, paths
from tiny import tiny_model
from tiny_run import begun, broken, train_on_one_device

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  OPTIMIZERS,
  Config,
  GrowConfig,
  MeshConfig,
  TrainConfig,
)
from tokenformer_jax.config.projections import grown_model
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow

EACH = pytest.mark.parametrize(
  'name', ['muon', pytest.param('adafactor', marks=pytest.mark.full_size)]
)
LARGER = {'model__layer__mixer__qkv__tokens': 64, 'model__layer__ffn__tokens': 128}
KEPT = {'train__keep_checkpoints': 9, 'train__log_every': 1}


def _changes(name: str, **changes) -> dict:
  return {
    'optim__kind': name,
    'optim__learning_rate': 3e-3,
    'optim__schedule': 'wsd',
    **KEPT,
    **changes,
  }


@EACH
def test_a_run_learns_resumes_and_grows(name, make, tmp_path, one_device):
  config = make(**_changes(name))
  whole = loop.train(config, tmp_path / 'run')
  curve = losses(tmp_path / 'run')
  assert curve[20] < curve[1] - 0.5, f'{name} does not learn: {curve}'
  again = broken(tmp_path / 'run', tmp_path / 'again', 10)
  assert_same(loop.train(config, again), whole, 'a resumed run')

  before = losses(tmp_path / 'run', 'eval/loss')[20]
  changes = {'train__steps': 26, 'grow__method__kind': 'duplicate', **LARGER}
  loop.train(make(**_changes(name, init_from=str(tmp_path / 'run'), **changes)), tmp_path / 'grown')
  evaluated = losses(tmp_path / 'grown', 'eval/loss')
  assert evaluated[20] == pytest.approx(before, rel=1e-5), 'the growth is not exact'
  assert evaluated[26] < before + 0.02, f'{name} unlearns after a growth: {evaluated}'


@pytest.fixture(scope='module')
def trained(source, tmp_path_factory):
  """A run by adamw."""
  root = tmp_path_factory.mktemp('trained')
  return root / 'run', train_on_one_device(tiny_run.config(source, root / 'cache'), root / 'run')


def test_another_optimizer_begins_with_empty_statistics(make, one_device, tmp_path, trained):
  changes = {'optim__kind': 'lion', 'grow__moments': 'drop', **LARGER}
  config = make(train__steps=30, init_from=str(trained[0]), **changes)
  run, state, step = begun(config, tmp_path / 'run')
  want = jax.eval_shape(run.program.tx.init, state['params'])
  assert jax.tree.structure(state['opt_state']) == jax.tree.structure(want)
  (_, lion), _, rates = state['opt_state']
  assert (step, int(rates.count), int(lion.count)) == (20, 20, 0), 'the steps are forgotten'
  assert not any(array.any() for array in paths(lion.mu).values())


def _after_steps(on: MeshConfig) -> dict:
  """Parameters and statistics after three steps on a mesh."""
  model = tiny_model(tokens={'qkv': 48, 'proj': 40, 'ffn': 64})
  # The second group begins inside the part of a device.
  model = grown_model(model, {'qkv': 64, 'proj': 48, 'ffn': 80}, GrowConfig())
  config = Config(
    model=model,
    optim=OPTIMIZERS['muon'](learning_rate=1e-3, warmup_steps=0),
    train=TrainConfig(steps=10),
    mesh=on,
  )
  count = on.replica * on.fsdp * on.tokens
  mesh, task = sharding.make_mesh(on, jax.devices()[:count]), tasks.make(config)
  program = step_lib.make_program(task, config)
  shardings = program.state_shardings(mesh)
  rows = np.random.default_rng(0).integers(0, 64, (8, 33), np.int32)
  with jax.set_mesh(mesh):
    new = jax.jit(program.initial_state, out_shardings=shardings)
    step, state = step_lib.make_train_step(program, mesh), new(0)
    for _ in range(3):
      state, _ = step(state, jax.device_put(jnp.asarray(rows), sharding.batch_sharding(mesh)))
  return paths({name: state[name] for name in ('params', 'opt_state')})


def test_muon_on_a_mesh_computes_what_it_does_on_one_device():
  want = _after_steps(MeshConfig(fsdp=1, tokens=1))
  got = _after_steps(MeshConfig(fsdp=2, tokens=2))
  for path, one in want.items():
    np.testing.assert_allclose(got[path], one, rtol=1e-3, atol=1e-5, err_msg=path)
