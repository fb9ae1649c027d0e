"""Views of images: their shapes, what stays the same, and that each change is one."""

import io

import jax
import numpy as np
import pytest
from image_files import encoded
from PIL import Image

from tokenformer_jax.config import ImagesConfig
from tokenformer_jax.data import augment
from tokenformer_jax.data.augment import Views

PHOTO = encoded(3, 'jpeg', (90, 60))
CHANGES = {
  'crop_area': 0.2,
  'flip': True,
  'rand_augment': 9.0,
}


def _rng(seed: int = 0) -> np.random.Generator:
  return np.random.default_rng(seed)


def _gradient(mode: str) -> Image.Image:
  ramp = np.linspace(20, 200, 24 * 24).reshape(24, 24) + 20 * (np.indices((24, 24)).sum(0) % 5 == 0)
  channels = [ramp, ramp.T, 255 - ramp]
  pixels = ramp if mode == 'L' else np.stack(channels, axis=-1)
  return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('kind', ['png', 'jpeg'])
def test_views_have_the_size_of_the_model(channels, kind):
  views = Views(ImagesConfig(image_size=24, **CHANGES), channels)
  file = encoded(2, kind, (500, 300))
  for pixels in (views.train(file, _rng()), views.evaluation(file)):
    assert pixels.shape == (24, 24, channels) and pixels.dtype == np.uint8


@pytest.mark.parametrize('name', [*CHANGES, 'nothing'])
def test_each_key_changes_the_view_and_the_seed_decides_how(name):
  views = Views(ImagesConfig(image_size=24, **{k: v for k, v in CHANGES.items() if k == name}), 3)
  drawn = [views.train(PHOTO, _rng(seed)) for seed in range(12)]
  again = [views.train(PHOTO, _rng(seed)) for seed in range(12)]
  np.testing.assert_array_equal(drawn, again, 'a view does not follow from its seed')
  differ = sum(np.any(view != views.evaluation(PHOTO)) for view in drawn)
  assert (differ == 0) if name == 'nothing' else (differ >= 3)


def test_evaluation_sees_the_middle():
  pixels = np.zeros((40, 60, 3), np.uint8)
  pixels[10:30, 20:40] = 200  # half of the shorter side
  file = _png(pixels)
  half = Views(ImagesConfig(image_size=10, eval_crop=0.5), 3).evaluation(file)
  whole = Views(ImagesConfig(image_size=10), 3).evaluation(file)
  assert half.min() > 150 and whole[0].max() < 20 and whole[5, 5].min() == 200


def _png(pixels: np.ndarray) -> bytes:
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'png')
  return file.getvalue()


@pytest.mark.parametrize('channels', [1, 3])
def test_a_grey_image_of_16_bits_looks_like_the_same_of_8_bits(channels):
  levels = np.linspace(0, 255, 32 * 32).reshape(32, 32)
  views = Views(ImagesConfig(image_size=16), channels)
  got, want = (views.evaluation(_png(x)) for x in (np.uint16(levels * 257), np.uint8(levels)))
  np.testing.assert_allclose(got.astype(int), want.astype(int), atol=1)


def test_a_large_jpeg_decoded_at_a_part_of_its_size_looks_the_same():
  smooth = Image.fromarray(_rng().integers(0, 256, (6, 8, 3), np.uint8)).resize((800, 600))
  jpeg, png = io.BytesIO(), io.BytesIO()
  smooth.save(jpeg, 'jpeg', quality=95)
  smooth.save(png, 'png')
  views = Views(ImagesConfig(image_size=32, crop_area=0.5), 3)
  for seed in range(3):
    got, want = (views.train(f.getvalue(), _rng(seed)).astype(int) for f in (jpeg, png))
    assert np.abs(got - want).mean() < 3, 'the crop is of another part of the image'


def test_crops_lie_in_the_image_and_have_the_area_asked_for():
  areas = []
  for seed in range(100):
    left, top, right, bottom = augment.random_crop((90, 60), 0.2, _rng(seed))
    assert 0 <= left < right <= 90 and 0 <= top < bottom <= 60
    assert 0.74 < (right - left) / (bottom - top) < 1.34
    areas.append((right - left) * (bottom - top) / 5400)
  assert min(areas) >= 0.199 and max(areas) > 0.75


@pytest.mark.parametrize('mode', ['L', 'RGB'])
@pytest.mark.parametrize('name', sorted(augment.OPERATIONS))
def test_operations_keep_the_shape_and_change_more_the_stronger_they_are(name, mode):
  image = _gradient(mode)
  operation = augment.OPERATIONS[name]
  changed = []
  for strength in (0.1, 0.9):
    result = operation(image, strength)
    assert (result.size, result.mode) == (image.size, mode)
    changed.append(np.abs(np.asarray(result, int) - np.asarray(image, int)).mean())
  without_strength = ('autocontrast', 'equalize', 'invert')
  if name == 'color' and mode == 'L':
    assert changed == [0, 0], 'grey has no saturation'
  elif name not in without_strength:
    assert changed[1] > changed[0], 'a larger magnitude is no larger change'


def test_two_operations_each_every_other_time(monkeypatch):
  calls = []
  counted = {name: lambda image, s: calls.append(s) or image for name in augment.OPERATIONS}
  monkeypatch.setattr(augment, 'OPERATIONS', counted)
  for seed in range(200):
    augment.rand_augment(_gradient('L'), 9, _rng(seed))
  assert 160 < len(calls) < 240
  np.testing.assert_allclose(np.mean(np.abs(calls)), 0.9, atol=0.01)
  assert 0.01 < np.std(np.abs(calls)) < 0.06 and min(calls) < 0 < max(calls)


# Row i is i everywhere, so that a pixel tells the weight of its two images.
IMAGES = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None, None], (4, 16, 16, 2))


def _mixed(**alphas):
  keys = jax.random.split(jax.random.key(0), 60)
  images, own = jax.jit(jax.vmap(lambda key: augment.mix(key, IMAGES, **alphas)))(keys)
  return list(zip(np.asarray(images), np.asarray(own).tolist(), strict=True))


@pytest.fixture(scope='module')
def drawn():
  """The parameters of the beta distributions, for which uniform ones stand that compile sooner."""
  alphas = []

  def beta(key, a, b):
    alphas.append((a, b))
    return jax.random.uniform(key)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.random, 'beta', beta)
    yield alphas


@pytest.fixture(scope='module')
def both(drawn):
  """Batches of both kinds, apart: those that are mixed up, and those that are cut."""
  results = _mixed(mixup=0.8, cutmix=1.0)
  cut = [set(np.unique(images[0])) <= {0, 3} for images, _ in results]
  apart = ([one for one, is_cut in zip(results, cut, strict=True) if is_cut == k] for k in (0, 1))
  assert drawn == [(0.8, 0.8), (1.0, 1.0)], 'weights are of other distributions'
  return tuple(apart)


def test_mixup_has_the_weight_of_the_labels_everywhere(both):
  for images, own in both[0]:
    want = own * IMAGES + (1 - own) * IMAGES[::-1]
    np.testing.assert_allclose(images, want, atol=1e-5)


def test_cutmix_pastes_a_rectangle_of_the_weight_of_the_labels(both):
  weights = []
  for images, own in both[1]:
    pasted = images[0, :, :, 0] == 3
    assert np.all(pasted | (images[0, :, :, 0] == 0)), 'a pixel is of neither image'
    np.testing.assert_allclose(1 - pasted.mean(), own, atol=1e-6)
    assert pasted.sum() == pasted.any(axis=0).sum() * pasted.any(axis=1).sum(), 'no rectangle'
    np.testing.assert_array_equal(images[2, :, :, 1] == 1, pasted, 'images have other rectangles')
    weights.append(own)
  assert min(weights) < 0.6 and max(weights) > 0.9


def test_with_both_half_of_the_batches_have_each(both):
  assert 15 < len(both[1]) < 45


@pytest.mark.usefixtures('drawn')
def test_one_alone_or_none_is_what_it_says():
  for images, own in _mixed(mixup=0.8, cutmix=0.0):
    np.testing.assert_allclose(images[0], 3 * (1 - own), atol=1e-5)
  images, own = augment.mix(jax.random.key(0), IMAGES, mixup=0.0, cutmix=0.0)
  assert images is IMAGES and own == 1
