"""The task of classifying images: its loss and figures, and what it says of bad images."""

import dataclasses
import errno
import functools
import os
from pathlib import Path

import image_files
import jax
import numpy as np
import pytest
from mixtures import unbalanced
from outcomes import assert_close
from tiny import normal_params, tiny_vit

from tokenformer_jax import config as config_lib
from tokenformer_jax import tasks
from tokenformer_jax.config import (
  CapacityConfig,
  Config,
  ImagesConfig,
  RouterConfig,
)
from tokenformer_jax.data.order import Position
from tokenformer_jax.errors import TransientError, UserError
from tokenformer_jax.resolve.facts import complete
from tokenformer_jax.steps import step as step_lib
from tokenformer_jax.storage import retry
from tokenformer_jax.tasks import images as image_task
from tokenformer_jax.tasks.task import reported

RNG = np.random.default_rng(0)
BATCH = {
  'images': RNG.integers(0, 256, (6, 8, 8, 1), np.uint8),
  'labels': np.array([3, 1, 4, 1, 5, -1], np.int32),
}
KEYS = [jax.random.key(seed) for seed in range(3)]


@functools.cache
def _task(*, layers: int = 1, drop_path: float = 0.0, **data) -> image_task.ImageTask:
  model = tiny_vit(layers=layers, drop_path=drop_path, dense=True, ffn_width=48)
  return tasks.make(Config(model=model, data=ImagesConfig(image_size=8, **data)))


@functools.cache
def _params():
  return normal_params(_task().definition, 0.3, seed=1)


@functools.cache
def _gradient(parts: int):
  return jax.jit(step_lib._gradient(_task().loss, parts, _task().counts))


def _loss(labels) -> float:
  return _gradient(1)(_params(), {**BATCH, 'labels': labels}, KEYS[0])[1]['loss']


@functools.cache
def _sums():
  return jax.jit(_task().sums)


@functools.cache
def _log_probabilities() -> np.ndarray:
  logits = np.asarray(jax.jit(_task().logits)(_params(), BATCH)[0], np.float64)
  return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_the_loss_is_the_mean_over_images_that_count():
  chosen = _log_probabilities()[np.arange(5), BATCH['labels'][:5]]
  np.testing.assert_allclose(_loss(BATCH['labels']), -chosen.mean(), rtol=1e-5)
  assert _loss(np.full(6, -1, np.int32)) == 0, 'a batch without any usable image has a loss'


def test_smoothed_labels_weigh_every_class():
  log_p = _log_probabilities()[:5]
  chosen = log_p[np.arange(5), BATCH['labels'][:5]]
  want = -(0.8 * chosen + 0.2 * log_p.mean(axis=1)).mean()
  found, _ = jax.jit(_task(label_smoothing=0.2).loss)(_params(), BATCH, KEYS[0])
  np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize(
  'changes', [{'mixup': 0.8}, {'cutmix': 1.0}, {'drop_path': 0.5, 'layers': 2}]
)
def test_draws_of_a_step_follow_from_its_key(changes, monkeypatch):
  # Drawing from a beta distribution takes longer to compile than all the rest.
  monkeypatch.setattr(jax.random, 'beta', lambda key, a, b: jax.random.uniform(key))
  task = _task(**changes)
  loss, params = jax.jit(task.loss), normal_params(task.definition, 0.3, seed=1)
  drawn = [float(loss(params, BATCH, KEYS[seed])[0]) for seed in (0, 0, 1, 2)]
  assert drawn[0] == drawn[1] and len(set(drawn)) > 1
  assert np.all(np.isfinite(drawn))


def test_experts_of_a_vit_have_the_capacity_and_the_jitter_of_training():
  few = CapacityConfig(factor=0.25, eval_factor=4.0, least=1)  # 1 place for 4 patches, or 4
  ffn = unbalanced(dispatch=few, router=RouterConfig(jitter=0.3))
  model = tiny_vit(layers=1, dense=True)
  model = dataclasses.replace(model, layer=dataclasses.replace(model.layer, ffn=ffn))
  task = tasks.make(Config(model=model, data=ImagesConfig(image_size=8)))
  params = normal_params(task.definition, 0.3)

  @jax.jit
  def figures(key):
    return reported(task.loss(params, BATCH, key)[1]), task.sums(params, BATCH).layer_figures()

  (one, evaluated), (again, _), (other, _) = (figures(KEYS[seed]) for seed in (0, 0, 1))
  assert one['loss'] == again['loss'] != other['loss'], 'the router has no key of its own'
  assert one['router/dropped'] > 0.2 and evaluated['router/dropped'] == 0


def test_parts_of_a_batch_count_by_their_images():
  labels = np.array([-1, 0, -1, 1, 2, 3], np.int32)  # parts of one image and of three
  whole, parts = (_gradient(n)(_params(), {**BATCH, 'labels': labels}, KEYS[0]) for n in (1, 2))
  assert_close(parts, whole, 'the gradient or the loss depends on the parts')


def test_an_image_that_is_mixed_with_a_bad_one_does_not_count():
  counts = [task.counts(BATCH).targets for task in (_task(), _task(mixup=0.8))]
  assert counts == [5, 4]


def test_an_evaluation_gives_loss_accuracies_and_calibration_error():
  sums = jax.device_get(_sums()(_params(), BATCH))
  twice = jax.tree.map(lambda x: 2.0 * x, sums)
  log_p, labels = _log_probabilities()[:5], BATCH['labels'][:5]
  order = np.argsort(-log_p, axis=1)
  hit, confidence = order[:, 0] == labels, np.exp(log_p.max(axis=1))
  bins = np.minimum(14, (confidence * 15).astype(int))
  gaps = [abs(np.sum(hit[bins == b]) - np.sum(confidence[bins == b])) for b in range(15)]
  want = {
    'loss': -log_p[np.arange(5), labels].mean(),
    'accuracy': hit.mean(),
    'top5_accuracy': np.any(order[:, :5] == labels[:, None], axis=1).mean(),
    'calibration_error': sum(gaps) / 5,
  }
  for figures in (_task().eval_figures(sums), _task().eval_figures(twice)):
    for name, value in want.items():
      np.testing.assert_allclose(figures[name], value, rtol=1e-5, err_msg=name)


def test_a_model_that_says_the_same_of_all_classes_is_right_by_chance():
  zeros = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), _params())
  sums = _sums()(zeros, {**BATCH, 'labels': np.arange(6, dtype=np.int32)})
  assert (sums.task.correct, sums.task.correct_top5) == (1, 5)


@pytest.fixture
def folder(tmp_path):
  """A task on a folder of which two images, one a truncated one, cannot be used."""
  source = image_files.write_sets(tmp_path / 'sets')
  (tmp_path / 'sets/train/ant/0.png').write_bytes(b'no image')
  broken = tmp_path / 'sets/val/bee/1.JPG'
  broken.write_bytes(broken.read_bytes()[:-400])

  def task(**data):
    values = config_lib.defaults(model='vit', data='images')
    values.model.update(position_embedding='sincos', patch=4)
    values.model.pattern, values.model.layer.mixer.positions.kind = 'layer', 'none'
    values.data.update(source=source, image_size=8, batch_size=12, prefetch=1, **data)
    made = tasks.make(complete(config_lib.resolve(values)))
    made.prepare()
    return made

  return task


def test_bad_images_are_named_once_and_counted(folder, capsys):
  task = folder()
  for _ in range(2):
    assert sum(np.sum(batch['labels'] >= 0) for batch in task.validation_parts(range(12))['']) == 20
  assert len(list(task.train_batches(range(12), 0, 6))) == 6  # two epochs
  said = capsys.readouterr().err
  assert said.count('bee/1.JPG is left out') == 1 and said.count('ant/0.png is left out') == 1
  want = {'data/bad_train_images': 1, 'data/bad_validation_images': 1}
  assert task.train_figures(1.0) == want


def test_stages_of_other_sizes_go_on_with_the_images_and_name_bad_ones_once(folder, capsys):
  task = folder()
  stage = task.at_stage(dataclasses.replace(task.config.data, batch_size=3))
  few = list(stage.train_batches(range(3), 4, 24, Position(4, 2)))
  many = list(task.train_batches(range(12), 0, 6))
  np.testing.assert_array_equal(few[0]['images'], many[0]['images'][2:5])
  assert capsys.readouterr().err.count('ant/0.png is left out') == 1


def test_a_batch_of_nothing_but_bad_images_is_fatal(folder, tmp_path):
  for path in (tmp_path / 'sets/val').rglob('*.*'):
    path.write_bytes(b'no image')
  with pytest.raises(
    UserError, match=r'none of the 12 images of a batch can be used.*UnidentifiedI'
  ):
    list(folder().validation_parts(range(12))[''])


class Failing:
  """`Path.read_bytes` on a disk that fails, for every image, as often as told."""

  def __init__(self, error: int, times: int):
    self.error, self.times, self.failed = error, times, {}

  def __call__(self, path: Path) -> bytes:
    if self.failed.setdefault(path, 0) < self.times:
      self.failed[path] += 1
      raise OSError(self.error, os.strerror(self.error), str(path))
    return path.open('rb').read()


# EMFILE (files that are open) is not the storage's, but no more the image's fault.
@pytest.mark.parametrize(('error', 'on_bad_image'), [(errno.EIO, 'skip'), (errno.EMFILE, 'fail')])
def test_images_that_cannot_be_read_for_a_while_are_read_later(
  folder, monkeypatch, capsys, tmp_path, error, on_bad_image
):
  (tmp_path / 'sets/val/bee/1.JPG').unlink()
  monkeypatch.setattr(retry, 'PAUSES', (0.0,) * 3)
  task = folder(on_bad_image=on_bad_image)
  want = list(task.validation_parts(range(12))[''])
  failing = Failing(error, times=2)
  monkeypatch.setattr(Path, 'read_bytes', lambda path: failing(path))
  got = list(task.validation_parts(range(12))[''])
  assert sum(failing.failed.values()) == 40, 'the test made nothing fail'
  for a, b in zip(want, got, strict=True):
    np.testing.assert_array_equal(a['images'], b['images'], err_msg='images were left out')
    np.testing.assert_array_equal(a['labels'], b['labels'], err_msg='images were left out')
  assert not task.train_figures(1.0), 'intact images are counted as bad'
  assert 'is left out' not in capsys.readouterr().err, 'intact images are called bad'


def test_a_disk_that_stays_away_ends_the_run_so_that_it_can_be_started_again(
  folder, monkeypatch, tmp_path
):
  monkeypatch.setattr(retry, 'PAUSES', (0.0,) * 3)
  task = folder()
  (tmp_path / 'sets').rename(tmp_path / 'away')  # as when a mount is gone
  with pytest.raises(TransientError, match=r'reading .* failed 4 times'):
    list(task.train_batches(range(12), 0, 2))
  (tmp_path / 'away').rename(tmp_path / 'sets')  # Threads that read ahead are still trying.


def test_bad_images_are_fatal_if_they_are_to_be(folder):
  task = folder(on_bad_image='fail')
  with pytest.raises(UserError, match=r'bee/1\.JPG cannot be used .*on_bad_image=skip'):
    list(task.validation_parts(range(12))[''])


def test_sizes_are_those_of_the_data(folder):
  task = folder()
  model = task.config.model
  assert (model.classes, model.channels, task.examples) == (3, 3, 36)
  assert task.vocabulary() == {'classes': ['ant', 'bee', 'cat']}
  assert task.describe_data() == '36 images of 3 classes'


def test_too_few_classes_are_refused(folder):
  config = folder().config
  few = dataclasses.replace(config, model=dataclasses.replace(config.model, classes=2))
  with pytest.raises(UserError, match=r'classes is 2, but folder:.* has 3'):
    complete(few)


def test_models_are_compared_on_held_out_images_or_on_noise(folder, tmp_path):
  task = folder()
  batch, name = task.held_out({}, 4)
  later, _ = task.held_out({}, 2, 2)
  assert name == '4 held-out images of the run' and batch['images'].shape == (4, 8, 8, 3)
  np.testing.assert_array_equal(later['images'], batch['images'][2:])
  gone = dataclasses.replace(task.config.data, source=f'folder:{tmp_path}/gone')
  elsewhere = tasks.make(dataclasses.replace(task.config, data=gone))
  batch, name = elsewhere.held_out({}, 4)
  assert name == '4 images of noise' and batch['images'].shape == (4, 8, 8, 3)
  names = [one.held_out({}, 1)[1] for one in (task, elsewhere)]
  assert names == ['1 held-out image of the run', '1 image of noise']
