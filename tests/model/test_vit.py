"""The vision transformer: its parts against other ways to compute them, and its randomness."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import normal_params, tiny_vit

from tokenformer_jax.config import ModelConfig
from tokenformer_jax.model import vit
from tokenformer_jax.model.execution import Execution
from tokenformer_jax.model.layer import LayerInputs
from tokenformer_jax.model.models import define

IMAGES = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)


@functools.cache
def _params(model: ModelConfig):
  return normal_params(define(model), 0.3, seed=1)


@functools.cache
def _run(model: ModelConfig, execution: Execution):
  definition = define(model, execution)
  return jax.jit(lambda p, x, s: definition.bind(p)(x, inputs=LayerInputs(branch_scales_Bx2=s))[0])


def _logits(model, images=IMAGES, scales=None, execution=Execution()):  # noqa: B008
  return np.asarray(_run(model, execution)(_params(model), images, scales))


def test_patches_and_their_embedding_are_a_convolution():
  images = np.random.default_rng(0).normal(size=(2, 6, 9, 3)).astype(np.float32)
  kernel = np.random.default_rng(1).normal(size=(3, 3, 3, 5)).astype(np.float32)
  want = jax.lax.conv_general_dilated(
    images, kernel, (3, 3), 'VALID', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )
  got = vit.patches(jnp.asarray(images), 3) @ kernel.reshape(27, 5)[None]
  np.testing.assert_allclose(got, want.reshape(2, 6, 5), rtol=1e-4, atol=1e-5)


def test_sincos_positions_tell_rows_from_columns():
  table = vit.sincos_positions(2, 3, 8).reshape(2, 3, 8)
  np.testing.assert_allclose(table[1, 2, :2], np.sin([2, 2 / 100]), rtol=1e-6)
  np.testing.assert_allclose(table[1, 2, 6:], np.cos([1, 1 / 100]), rtol=1e-6)
  np.testing.assert_array_equal(
    table[0, :, 4:], table[0, :1, 4:].repeat(3, 0), 'a row has two rows'
  )
  np.testing.assert_array_equal(table[:, 0, :4], table[:1, 0, :4].repeat(2, 0))


def test_resampled_positions_keep_constants_and_slopes():
  rows, columns = np.meshgrid(np.arange(4.0), np.arange(4.0), indexing='ij')
  table = np.stack([np.full(16, 3.0), rows.ravel(), columns.ravel()], axis=1)
  grid = np.asarray(vit.resample_positions(jnp.asarray(table, jnp.float32), 64)).reshape(8, 8, 3)
  np.testing.assert_allclose(grid[..., 0], 3, rtol=1e-5)
  assert np.all(np.diff(grid[..., 1], axis=0) > 0) and np.all(np.diff(grid[..., 2], axis=1) > 0)
  np.testing.assert_allclose(grid[..., 1], grid[:, :1, 1].repeat(8, 1), atol=1e-5)


@pytest.mark.parametrize(
  ('pool', 'positions'),
  [('mean', 'sincos'), ('token', 'learned'), ('mean', 'none')],
)
def test_logits_depend_on_where_patches_are_just_if_there_are_positions(pool, positions):
  model = tiny_vit(pool=pool, position_embedding=positions)
  logits = _logits(model)
  assert logits.shape == (3, 10) and logits.dtype == np.float32 and np.all(np.isfinite(logits))
  moved = _logits(model, images=IMAGES[:, ::-1].reshape(3, 8, 8, 1))  # rows of pixels, too
  assert np.abs(moved - logits).max() > 1e-3
  swapped = IMAGES.reshape(3, 2, 4, 8, 1)[:, ::-1].reshape(3, 8, 8, 1)  # rows of patches alone
  same = np.abs(_logits(model, images=swapped) - logits).max() < 1e-4
  assert same == (positions == 'none')


def test_the_last_patch_reaches_the_class_token():
  model = tiny_vit(pool='token', position_embedding='learned')
  changed = IMAGES.copy()
  changed[:, -1, -1] += 1
  assert np.abs(_logits(model, images=changed) - _logits(model)).max() > 1e-4, 'attention is causal'


def test_bfloat16_activations_give_float32_logits():
  model = tiny_vit()
  half = _logits(model, execution=Execution(jnp.dtype('bfloat16')))
  assert half.dtype == np.float32
  np.testing.assert_allclose(half, _logits(model), atol=0.15 * np.abs(half).max())


def test_branches_are_left_out_as_often_as_asked_and_none_in_the_first_block():
  scales = np.asarray(vit.branch_scales(jax.random.key(0), 3, 20_000, 0.4))
  assert scales.shape == (3, 20_000, 2)
  np.testing.assert_allclose((scales == 0).mean(axis=(1, 2)), [0, 0.2, 0.4], atol=0.01)
  np.testing.assert_allclose(scales.mean(axis=(1, 2)), 1, atol=0.01)


def test_an_image_whose_branches_are_all_left_out_is_its_patches():
  model, scales = tiny_vit(final_norm='none'), np.ones((2, 3, 2), np.float32)
  scales[:, 1] = 0
  params = jax.device_get(_params(model))
  got, whole = _logits(model, scales=scales), _logits(model, scales=np.ones_like(scales))
  np.testing.assert_allclose(got[[0, 2]], whole[[0, 2]], rtol=1e-5, atol=1e-5)
  patches = IMAGES[1].reshape(2, 4, 2, 4).swapaxes(1, 2).reshape(4, 16)
  embedding, head = params['patch_embedding'], params['head']
  embedded = patches @ embedding['kernel'] + embedding['bias'] + vit.sincos_positions(2, 2, 32)
  want = embedded.mean(axis=0) @ head['kernel'] + head['bias']
  np.testing.assert_allclose(got[1], want, rtol=1e-4, atol=1e-4)


def test_axes_name_every_dimension():
  model = tiny_vit(pool='token', position_embedding='learned')
  definition = define(model)
  sizes = {'width': 32, 'classes': 10, 'patch': 16, 'position': 4, 'layers': 2, 'norm': 32}
  leaves = jax.tree_util.tree_leaves_with_path(definition.abstract)
  named = jax.tree.leaves(definition.axes, is_leaf=lambda node: isinstance(node, tuple))
  for (path, leaf), names in zip(leaves, named, strict=True):
    for size, name in zip(leaf.shape, names, strict=True):
      assert name == 'param_tokens' or sizes[name] == size, jax.tree_util.keystr(path)
