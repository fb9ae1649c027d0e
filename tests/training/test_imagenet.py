"""configs/vit_imagenet.py end to end on a small set in the real format."""

import dataclasses
import runpy
from pathlib import Path

import jax
import pytest
import tensorflow_datasets as tfds
from tiny_imagenet import tiny_imagenet

from tokenformer_jax import config as config_lib
from tokenformer_jax.parallel import sharding
from tokenformer_jax.runs import metrics
from tokenformer_jax.training import loop

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """The set as `tfds build` leaves it, in a folder that TFDS knows."""
  folder = tmp_path_factory.mktemp('tfds')
  tfds.core.add_data_dir(folder)  # TFDS_DATA_DIR is read where TFDS is loaded.
  tfds.disable_progress_bar()
  builder = tiny_imagenet.TinyImagenet(data_dir=folder, file_format='array_record')
  builder.download_and_prepare()
  return 'tfds:tiny_imagenet:5.1.0'


@pytest.mark.slow
def test_b16_runs_its_pipeline_and_its_step(prepared, tmp_path, monkeypatch):
  monkeypatch.setattr(sharding, 'find_devices', lambda: jax.devices()[:1])
  values = runpy.run_path(str(ROOT / 'configs/vit_imagenet.py'))['get_config']('b16')
  full = config_lib.resolve(values.copy_and_resolve_references())
  # Smaller blocks and batches; images, views, patches, mixing, schedule and average are the real
  # ones.
  values.model.update(pattern='layer*2', width=32)
  layer = values.model.layer
  layer.mixer.heads, layer.ffn.tokens = 2, 128
  layer.mixer.qkv.tokens = layer.mixer.proj.tokens = 32
  values.data.update(source=prepared, batch_size=8, workers=2, prefetch=4)
  values.train.update(epochs=1.0, log_every=1, trackers=())
  values.optim.warmup_epochs = 0.4
  config = config_lib.resolve(values.copy_and_resolve_references())
  same = ('crop_area', 'flip', 'rand_augment', 'eval_crop', 'image_size')
  assert all(getattr(config.data, name) == getattr(full.data, name) for name in same)
  assert (
    dataclasses.replace(config.optim, learning_rate=full.optim.learning_rate, warmup_epochs=20.0)
    == full.optim
  )

  state = loop.train(config, tmp_path / 'run')
  assert int(state['step']) == 5, 'one epoch of 40 images is not five batches'
  assert state['params']['head']['kernel'].shape == (32, 1000)
  lines = metrics.read(tmp_path / 'run')
  rates = [line['train/learning_rate'] for line in lines if 'train/loss' in line]
  assert rates[:2] == pytest.approx([8 * 1e-4 / 256 / 2, 8 * 1e-4 / 256])
  last = lines[-1]
  assert last['eval/images'] == tiny_imagenet.VALIDATION == last['eval/ema_images']
  assert 0 <= last['eval/top5_accuracy'] <= 1 and 'eval/ema_accuracy' in last
  assert 'data/bad_train_images' not in lines[-2], 'a PNG or a CMYK image could not be read'
