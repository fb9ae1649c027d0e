"""Products of sorted rows as on a TPU, interpreted on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenformer_jax.model import grouped, grouped_tpu

SIZES = [100, 0, 156, 60]  # of 384 rows; the last 68 have no expert


def _dense(rows, matrices):
  """Return each row times the matrix of its expert, and zeros for the rest."""
  expert = np.repeat(np.arange(len(SIZES)), SIZES)
  out = jnp.einsum('PI,PIO->PO', rows[: len(expert)], matrices[expert])
  return jnp.pad(out, ((0, len(rows) - len(expert)), (0, 0)))


@pytest.mark.slow
@pytest.mark.parametrize(('inputs', 'outputs'), [(64, 192), (192, 64)])
def test_gradients_are_those_of_dense_products(inputs, outputs):
  keys = jax.random.split(jax.random.key(0), 3)
  rows = jax.random.normal(keys[0], (384, inputs))
  matrices = jax.random.normal(keys[1], (len(SIZES), inputs, outputs))
  towards = jax.random.normal(keys[2], (384, outputs)).at[sum(SIZES) :].set(0)
  sizes, known = jnp.array(SIZES, jnp.int32), sum(SIZES)

  def loss(product, rows, matrices):
    return jnp.sum(product(rows, matrices)[:known] * towards[:known])

  of_kernel = functools.partial(
    loss, lambda r, m: grouped_tpu.product(r, m, sizes, 128, interpret=True)
  )
  got, wanted = (
    jax.value_and_grad(one, (0, 1))(rows, matrices)
    for one in (of_kernel, functools.partial(loss, _dense))
  )
  assert float(got[0]) == pytest.approx(float(wanted[0]), rel=1e-5)
  for ours, theirs, name in zip(got[1], wanted[1], ('rows', 'matrices'), strict=True):
    np.testing.assert_allclose(ours[:known], theirs[:known], atol=1e-4, err_msg=name)


def test_rows_fill_whole_tiles_on_a_tpu(monkeypatch):
  monkeypatch.setattr(grouped, 'platform', lambda: 'tpu')
  experts = jnp.array([2, 0, 3, 1, 0, 3], jnp.int32)  # 3 is no expert
  order = grouped.sort(experts, 3)
  rows = order.rows(jnp.arange(1.0, 7)[:, None])
  assert order.tile == len(rows) == 128
  assert order.sizes_E.tolist() == [2, 1, 1]
  assert rows[:4, 0].tolist() == [2, 5, 4, 1], 'rows are not in the order of their experts'
  assert not rows[4:].any()
  assert order.back(rows)[:, 0].tolist() == [1, 2, 0, 4, 5, 0]


@pytest.mark.parametrize(
  ('rows', 'count', 'tile'), [(6, 8, 128), (32768, 8, 512), (1024 * 64, 64, 256), (10**6, 1, 512)]
)
def test_a_tile_is_small_beside_the_rows_of_an_expert(rows, count, tile):
  assert grouped_tpu.row_tile(rows, count) == tile


def test_blocks_fit_in_vector_memory():
  for inputs, outputs in ((2048, 1408), (1408, 2048), (8192, 28672), (96, 40)):
    rows, part, out = grouped_tpu.product_tiles(512, inputs, outputs, 2)
    assert 2 * 2 * (rows * part + part * out + rows * out) + 4 * rows * out <= 16 * 2**20
    assert inputs % part == 0
    rows, part, out = grouped_tpu.gradient_tiles(512, inputs, outputs, 2)
    assert 2 * 2 * (rows * part + rows * out + part * out) + 4 * part * out <= 16 * 2**20
