"""Mixup and cutmix: what of each image is left, and that labels have the same weights."""

import jax
import jax.numpy as jnp
import numpy as np

from tokenformer_jax.data.mixing import mix

# Row i is i everywhere, so that a pixel tells the weight of its two images.
IMAGES = jnp.broadcast_to(jnp.arange(4.0)[:, None, None, None], (4, 16, 16, 2))
_mix = jax.jit(mix, static_argnames=('mixup', 'cutmix'))


def _many(**alphas):
  results = [_mix(jax.random.key(seed), IMAGES, **alphas) for seed in range(60)]
  return [(np.asarray(images), float(own)) for images, own in results]


def test_mixup_has_the_weight_of_the_labels_everywhere():
  for images, own in _many(mixup=0.8, cutmix=0.0):
    want = own * IMAGES + (1 - own) * IMAGES[::-1]
    np.testing.assert_allclose(images, want, atol=1e-5)


def test_cutmix_pastes_a_rectangle_of_the_weight_of_the_labels():
  weights = []
  for images, own in _many(mixup=0.0, cutmix=1.0):
    pasted = images[0, :, :, 0] == 3
    assert np.all(pasted | (images[0, :, :, 0] == 0)), 'a pixel is of neither image'
    np.testing.assert_allclose(1 - pasted.mean(), own, atol=1e-6)
    assert pasted.sum() == pasted.any(axis=0).sum() * pasted.any(axis=1).sum(), 'no rectangle'
    np.testing.assert_array_equal(images[2, :, :, 1] == 1, pasted, 'images have other rectangles')
    weights.append(own)
  assert min(weights) < 0.3 and max(weights) > 0.95


def test_with_both_half_of_the_batches_have_each():
  pasted = [set(np.unique(images[0])) <= {0, 3} for images, _ in _many(mixup=1.0, cutmix=1.0)]
  assert 15 < sum(pasted) < 45


def test_with_none_nothing_is_mixed():
  images, own = _mix(jax.random.key(0), IMAGES, mixup=0.0, cutmix=0.0)
  np.testing.assert_array_equal(images, IMAGES)
  assert own == 1
