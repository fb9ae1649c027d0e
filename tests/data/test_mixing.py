"""Mixup and cutmix: what of each image is left, and that labels have the same weights."""

import jax
import numpy as np
import pytest

from tokenformer_jax.data.mixing import mix

# Row i is i everywhere, so that a pixel tells the weight of its two images.
IMAGES = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None, None], (4, 16, 16, 2))


def _many(**alphas):
  keys = jax.random.split(jax.random.key(0), 60)
  images, own = jax.jit(jax.vmap(lambda key: mix(key, IMAGES, **alphas)))(keys)
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
  results = _many(mixup=0.8, cutmix=1.0)
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
  for images, own in _many(mixup=0.8, cutmix=0.0):
    np.testing.assert_allclose(images[0], 3 * (1 - own), atol=1e-5)
  images, own = mix(jax.random.key(0), IMAGES, mixup=0.0, cutmix=0.0)
  assert images is IMAGES and own == 1
