"""Rows split over devices: losses, gradients and evaluations are those of one device."""

import dataclasses

import architectures
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import mixture
from outcomes import paths
from tiny import gated_model, large_params, linear, tiny_model, tiny_vit, with_mixer

from tokenformer_jax import tasks
from tokenformer_jax.config import (
  AdamWConfig,
  Config,
  MeshConfig,
  TextConfig,
  TrainConfig,
)
from tokenformer_jax.errors import UserError
from tokenformer_jax.parallel import sharding

LENGTH = 80  # 20 slots on each of 4 devices
ONE = MeshConfig(fsdp=1)
FOUR = MeshConfig(fsdp=1, sequence=4)
MIXED = MeshConfig(fsdp=2, sequence=2, tokens=2)
EIGHT = MeshConfig(fsdp=1, sequence=8)
EXPERTS = MeshConfig(fsdp=1, experts=2, sequence=4)

_NARROW = tiny_model(window=4)  # see `sequence.halo`
# A model, the documents of its rows, and a mesh.
CASES = {
  'documents': (tiny_model(heads=8), 'separate', EIGHT),
  'halo, documents': (with_mixer(_NARROW, kv_heads=2), 'masked', MIXED),
  'few key heads': (with_mixer(tiny_model(heads=8), kv_heads=2), 'joined', EIGHT),
  'fewer heads than parts': (tiny_model(), 'separate', EIGHT),
  'uneven heads, shaped': (
    with_mixer(architectures.MODELS['skips and norms'], heads=2),
    'joined',
    FOUR,
  ),
  'linear, documents': (linear(tiny_model()), 'separate', MIXED),
  'clipped': (architectures.MODELS['clipped'], 'joined', MIXED),
  'gated units, documents': (gated_model(scores='squared_relu'), 'separate', FOUR),
  'experts': (architectures.MODELS['experts'], 'joined', EXPERTS),
}


def _config(model, documents: str = 'joined', on: MeshConfig = ONE) -> Config:
  return Config(
    model=model,
    data=TextConfig(sequence_length=LENGTH, batch_size=4, documents=documents),
    optim=AdamWConfig(z_loss=1e-2),
    train=TrainConfig(loss_chunk=8),
    mesh=on,
    dtype='float32',
  )


def _run(name: str, on: MeshConfig):
  """Return the loss, its gradient, and the sums of an evaluation on a mesh."""
  model, documents, _ = CASES[name]
  model = dataclasses.replace(model, pattern='layer')
  config = _config(model, documents, on)
  count = on.replica * on.fsdp * on.experts * on.sequence * on.tokens
  mesh, task = sharding.make_mesh(on, jax.devices()[:count]), tasks.make(config)
  sharding.check_devices(config, mesh)
  ids = np.random.default_rng(0).integers(1, 64, (4, LENGTH + 1), np.int32)
  ids[[0, 0, 1, 2], [5, 31, 24, 47]] = task._boundary

  def loss(params, batch):
    return task.loss(params, batch, jax.random.key(0))[0]

  def run(params, batch):
    return jax.value_and_grad(loss)(params, batch), task.sums(params, batch).task

  with jax.set_mesh(mesh):
    params = jax.device_put(
      large_params(model), sharding.tree_shardings(mesh, task.definition.axes)
    )
    batch = jax.device_put(ids, sharding.batch_sharding(mesh))
    return jax.device_get(jax.jit(run)(params, batch))


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_rows_on_several_devices_are_those_on_one(name):
  (want, gradient), sums = _run(name, ONE)
  (loss, got), got_sums = _run(name, CASES[name][-1])
  np.testing.assert_allclose(loss, want, rtol=1e-5, err_msg='the mesh changes the loss')
  largest = max(np.abs(array).max() for array in paths(gradient).values())
  for path, array in paths(gradient).items():
    # The gradient of a layer's gain is one sum, which nearly cancels: a norm follows.
    least = 0.1 if path.endswith('_gain') else 1e-3
    limit = 1e-5 * max(np.abs(array).max(), least * largest)
    np.testing.assert_allclose(paths(got)[path], array, rtol=0, atol=limit, err_msg=path)
  np.testing.assert_allclose(got_sums, sums, rtol=1e-5, err_msg='the mesh changes evaluations')


@pytest.mark.parametrize(
  ('model', 'changes', 'sentence'),
  [
    (
      tiny_model(),
      {'sequence_length': 82},
      "the axis 'slots' of a row of config.data.sequence_length tokens has the size 82, which is "
      'not a multiple of sequence = 4 of the mesh; change that size or config.mesh',
    ),
    (
      mixture('switch'),
      {},
      'model.layer.ffn.dispatch.kind=capacity counts the tokens of whole rows, and '
      'config.mesh.sequence=4 splits rows; set it to 1, or take dispatch.kind=grouped',
    ),
    (
      tiny_vit(),
      {},
      'a ViT of config.model sees the positions of an image in one piece, and '
      'config.mesh.sequence=4 splits rows; set it to 1, or take a language model',
    ),
  ],
  ids=['length', 'capacity', 'vit'],
)
def test_settings_that_do_not_combine_are_refused_in_one_sentence(model, changes, sentence):
  config = _config(model, on=FOUR)
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))
  with pytest.raises(UserError) as error:
    sharding.check_splits(config, sharding.abstract_mesh(FOUR, 4))
  assert str(error.value) == sentence


def test_slots_that_do_not_divide_are_whole():
  """A decoder has one new slot at a time."""
  with jax.set_mesh(sharding.make_mesh(FOUR, jax.devices()[:4])):
    x = jax.jit(lambda x: sharding.constrain(x, 'batch', 'slots', None))(jnp.ones((4, 1, 8)))
  assert x.sharding.is_fully_replicated
