"""Training runs on images: the same on every mesh and after a resume, grown, adapted, averaged."""

import contextlib
import math

import jax
import numpy as np
import pytest
import tiny_run
from growing import mesh_of
from outcomes import assert_same, losses, paths
from tiny_run import begun, broken, train_on_one_device, trainer

from tokenformer_jax.errors import UserError
from tokenformer_jax.grow import grow_run
from tokenformer_jax.resolve.lengths import in_steps
from tokenformer_jax.runs import checkpoint, metrics
from tokenformer_jax.training import loop

# What a step draws at random is drawn in every test here.
RANDOM = {
  'data__crop_area': 0.5,
  'data__mixup': 0.8,
  'data__cutmix': 1.0,
  'model__drop_path': 0.2,
  'data__label_smoothing': 0.1,
}
SLOW = pytest.mark.slow


STEPS = 10
KEPT = {'train__ema': 0.9, 'train__keep_checkpoints': 9, 'train__log_every': 1}


def _make(**changes):
  return tiny_run.vit_config(**{**RANDOM, 'train__steps': STEPS, **changes})


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run on one device with an average, and its last state."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  state = train_on_one_device(_make(**KEPT), workdir)
  return workdir, jax.tree.map(np.asarray, state)


def test_a_run_leaves_the_figures_of_images(whole):
  names = set().union(*metrics.read(whole[0]))
  assert names >= {
    'train/loss',
    'perf/images_per_second',
    'perf/model_tflops_per_second',
    'eval/loss',
    'eval/accuracy',
    'eval/top5_accuracy',
    'eval/calibration_error',
    'eval/ema_loss',
    'eval/ema_accuracy',
  }
  assert not {name for name in names if 'token' in name or 'perplexity' in name}
  assert metrics.read(whole[0])[-1]['eval/images'] == 32


@SLOW
def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(whole, tmp_path, one_device):
  again = broken(whole[0], tmp_path / 'run', STEPS - 1)
  assert_same(loop.train(_make(**KEPT), again), whole[1], 'after a resume')


@pytest.mark.slow
def test_losses_are_the_same_on_4_x_2_devices(whole, tmp_path):
  config = _make(mesh__fsdp=4, mesh__tokens=2, train__log_every=1, train__eval_batches=0)
  loop.train(config, tmp_path / 'many')
  one, many = losses(whole[0]), losses(tmp_path / 'many')
  assert len(many) == STEPS
  np.testing.assert_allclose(
    list(many.values()), list(one.values()), rtol=1e-4, err_msg='the mesh changes the losses'
  )
  assert metrics.read(tmp_path / 'many')[-1]['eval/images'] == 359, 'not every image counts once'


def test_the_average_follows_the_parameters(whole):
  params, ema = (whole[1][name]['head']['kernel'] for name in ('params', 'ema'))
  first = _read(whole[0], 5)['params']['head']['kernel']
  assert 0 < np.abs(ema - params).mean() < np.abs(ema - first).mean(), 'the average lags behind'


def test_a_step_that_is_skipped_leaves_the_average(whole, tmp_path, one_device):
  run = trainer(_make(**KEPT), tmp_path / 'run')
  with jax.set_mesh(run.mesh), contextlib.closing(run.batches(0, print)) as batches:
    first, _ = run.first_state()
    state = jax.tree.map(lambda a, like: jax.device_put(a.copy(), like.sharding), whole[1], first)
    state['params']['head']['kernel'] *= np.inf
    state, figures = run.train_step(state, next(batches)[2])
  assert int(figures['skipped_steps']) == 1, 'the step is made'
  assert_same(state['ema']['blocks'], whole[1]['ema']['blocks'], 'the average')


def _read(workdir, step):
  """The state of a checkpoint."""
  source = checkpoint.open_directory(workdir, step)
  with contextlib.closing(source.checkpoints):
    return jax.tree.map(np.asarray, grow_run.read(source, mesh_of()))


def test_a_trained_vit_grows_exactly_with_its_average(whole, tmp_path, one_device):
  counts = {'model__layer__mixer__qkv__tokens': 48, 'model__layer__ffn__tokens': 128}
  config = _make(**counts, train__ema=0.9, train__steps=STEPS + 4, init_from=str(whole[0]))
  _, state, step = begun(config, tmp_path / 'grown')
  assert step == STEPS
  for name in ('params', 'ema'):
    old, new = paths(whole[1][name]), paths(state[name])
    for path, array in old.items():
      grown = new[path]
      if grown.shape != array.shape:  # keys and values of more tokens
        assert path.endswith('keys') or not grown[:, array.shape[1] :].any(), f'{name}: {path}'
        grown = grown[:, : array.shape[1]]
      np.testing.assert_array_equal(grown, array, err_msg=f'{name}: {path} was not kept')


@SLOW
def test_fine_tuning_takes_another_head_and_another_resolution(tmp_path, one_device):
  first = _make(model__position_embedding='learned', train__steps=5)
  old = loop.train(first, tmp_path / 'first')
  config = _make(
    model__position_embedding='learned',
    model__classes=17,
    data__image_size=16,
    init_from=str(tmp_path / 'first'),
    grow__step='restart',
    grow__moments='drop',
    optim__layer_decay=0.5,
    train__steps=2,
  )
  run = trainer(config, tmp_path / 'second')
  with jax.set_mesh(run.mesh), contextlib.closing(run.checkpoints):
    state, step = run.first_state()
    params = state['params']
    assert step == 0 and params['head']['kernel'].shape == (32, 17)
    assert params['positions'].shape == (16, 32)
    np.testing.assert_allclose(
      np.mean(params['positions'], axis=0), np.mean(old['params']['positions'], axis=0), atol=2e-3
    )
    assert_same(params['blocks'], old['params']['blocks'], 'the blocks')
    moments = jax.tree.leaves(state['opt_state'])
    assert not any(np.any(leaf) for leaf in moments), 'moments of another task'
    assert math.isfinite(run.train(state, step)['params']['head']['bias'].sum())


def test_lengths_in_epochs():
  lengths = {'train__epochs': 2.0, 'optim__warmup_epochs': 0.5}
  epochs = _make(train__steps=1000, optim__warmup_steps=100, **lengths)
  config = in_steps(epochs, 1438)
  want = (math.ceil(2 * 1438 / 16), math.ceil(0.5 * 1438 / 16))
  assert (config.train.steps, config.optim.warmup_steps) == want
  assert in_steps(config, 99) == config, 'what was in steps changes'
  with pytest.raises(UserError, match=r'steps is 7, which has no effect with train\.epochs=2'):
    _make(train__steps=7, train__epochs=2.0)
