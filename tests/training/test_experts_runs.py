"""Runs of mixtures: the same on every mesh, after a resume, and with every optimizer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import KINDS, mixture
from outcomes import assert_same, losses, paths
from seeds import take
from tiny_run import broken, vit_config

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  OPTIMIZERS,
  BiasBalanceConfig,
  Config,
  MeshConfig,
  TextConfig,
  TrainConfig,
)
from tokenformer_jax.parallel import sharding
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.training import loop

pytestmark = pytest.mark.slow
_FULL_SIZE = pytest.mark.full_size

BIASED = dataclasses.replace(KINDS['sparse'], balance=BiasBalanceConfig(0.01))
CASES = {'switch': KINDS['switch'], 'fine-grained': KINDS['fine-grained'], 'sparse': BIASED}
# Flags of a run with experts; `tokens` has its default, because others have no meaning for experts.
FLAGS = {
  'model__layer__ffn__kind': 'experts',
  'model__layer__ffn__tokens': 512,
  'model__layer__ffn__count': 8,
  'model__layer__ffn__expert__width': 16,
  'model__layer__ffn__router__top_k': 2,
  'model__layer__ffn__balance__kind': 'bias',
  'model__layer__ffn__balance__rate': 0.01,
}


@functools.cache
def _program(name: str, mesh: MeshConfig, optimizer: str, parts: int):
  """Return devices, the function of a new state, and the step."""
  config = Config(
    model=mixture(CASES[name], tokens={'qkv': 32, 'proj': 32}),
    data=TextConfig(batch_size=16, sequence_length=16),
    optim=OPTIMIZERS[optimizer](learning_rate=3e-3, warmup_steps=0, accumulation_steps=parts),
    train=TrainConfig(steps=100),
    mesh=mesh,
  )
  count = mesh.replica * mesh.fsdp * mesh.experts * mesh.tokens
  devices, task = sharding.make_mesh(mesh, jax.devices()[:count]), tasks.make(config)
  program = step_lib.make_program(task, config)
  new = step_lib.make_first_state(program, devices)
  return devices, new, step_lib.make_train_step(program, devices)


def _steps(name: str, mesh: MeshConfig, steps: int, optimizer: str = 'adamw', parts: int = 1):
  """Return the losses and the last state of a run on a mesh, with other rows in each step."""
  devices, new, step = _program(name, mesh, optimizer, parts)
  rng, found = np.random.default_rng(0), []
  words = rng.integers(0, 64, (64, 17), np.int32) // rng.integers(1, 9, (64, 1))
  with jax.set_mesh(devices):
    state = new(0)
    for number in range(steps):
      rows = jnp.asarray(words[16 * (number % 4) :][:16])
      state, figures = step(state, jax.device_put(rows, sharding.batch_sharding(devices)))
      found.append(float(figures['loss']))
  return np.array(found), jax.device_get(state)


ONE = MeshConfig(fsdp=1)
_on_one = functools.cache(lambda name: _steps(name, ONE, 12))


@pytest.mark.parametrize('name', take(CASES, ('switch', 'sparse')))
@pytest.mark.parametrize(
  'mesh',
  [
    pytest.param(MeshConfig(fsdp=2, experts=2, tokens=2), id='tokens 2'),
    pytest.param(MeshConfig(fsdp=1, experts=8), id='experts 8', marks=_FULL_SIZE),
  ],
)
def test_twelve_steps_agree_on_every_mesh(name, mesh):
  want, got = _on_one(name)[0], _steps(name, mesh, 12)[0]
  assert want[-1] < want[0] - 0.1, 'it does not learn'
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_muon_trains_a_mixture():
  losses_of_steps, state = _steps('sparse', ONE, 20, 'muon')
  assert losses_of_steps[-4:].mean() < losses_of_steps[:4].mean() - 0.1, 'it does not learn'
  for path, array in paths(state['params']).items():
    assert np.all(np.isfinite(array)), path
    if path.endswith('bias'):  # moved by its own update: at most 20 steps of 0.01
      assert 0 < np.abs(array).max() <= 0.2 + 1e-6


def test_accumulated_gradients_move_the_bias_by_the_mean_load():
  _, whole = _steps('sparse', ONE, 1)
  _, parts = _steps('sparse', ONE, 1, parts=4)
  one, two = (state['params']['blocks']['ffn']['router']['bias'] for state in (whole, parts))
  assert np.abs(one).max() == pytest.approx(0.01)
  np.testing.assert_array_equal(one, two)


def test_a_resumed_run_has_the_bias_of_an_unbroken_one(make, tmp_path, one_device):
  config = make(**FLAGS, train__keep_checkpoints=9, train__log_every=1)
  whole = loop.train(config, tmp_path / 'run')
  curve = losses(tmp_path / 'run')
  assert curve[20] < curve[1] - 0.5, f'it does not learn: {curve}'
  assert np.any(whole['params']['blocks']['ffn']['router']['bias'])
  for name in ('router/max_violation', 'router/entropy', 'router/dropped', 'router/load/7'):
    assert len(losses(tmp_path / 'run', f'train/{name}')) == 20
    assert len(losses(tmp_path / 'run', f'eval/{name}')) == 1
  again = broken(tmp_path / 'run', tmp_path / 'again', 10)
  assert_same(loop.train(config, again), whole, 'a resumed run')


def test_a_vit_with_experts_trains(tmp_path, one_device):
  config = vit_config(**FLAGS, train__log_every=1, train__checkpoint_every=20)
  loop.train(config, tmp_path / 'run')
  curve = losses(tmp_path / 'run')
  assert curve[20] < curve[1] - 0.1, f'it does not learn: {curve}'
  assert len(losses(tmp_path / 'run', 'eval/router/max_violation')) == 1
