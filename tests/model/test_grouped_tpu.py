"""Products of sorted rows as on a TPU, interpreted on a CPU."""

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
  rng, known = np.random.default_rng(0), sum(SIZES)
  shapes = (384, inputs), (len(SIZES), inputs, outputs), (known, outputs)
  rows, matrices, towards = (np.float32(rng.normal(size=shape)) for shape in shapes)

  def of_kernel(rows, matrices):
    return grouped_tpu.product(rows, matrices, jnp.array(SIZES, jnp.int32), 128, interpret=True)

  def run(product):
    def loss(rows, matrices):
      return jnp.sum(product(rows, matrices)[:known] * towards)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(rows, matrices))

  got, wanted = run(of_kernel), run(_dense)
  assert float(got[0]) == pytest.approx(float(wanted[0]), rel=1e-5)
  for ours, theirs, name in zip(got[1], wanted[1], ('rows', 'matrices'), strict=True):
    np.testing.assert_allclose(ours[:known], theirs[:known], atol=1e-4, err_msg=name)


def test_rows_fill_whole_tiles_on_a_tpu(monkeypatch):
  monkeypatch.setattr(grouped, 'platform', lambda: 'tpu')
  experts = np.array([2, 0, 3, 1, 0, 3], np.int32)  # 3 is no expert

  @jax.jit
  def run():
    order = grouped.sort(jnp.asarray(experts), 3)
    rows = order.rows(jnp.arange(1.0, 7)[:, None])
    assert order.tile == len(rows) == 128
    return order.sizes_E, rows, order.back(rows)

  sizes, rows, back = map(np.asarray, run())
  assert sizes.tolist() == [2, 1, 1]
  assert rows[:4, 0].tolist() == [2, 5, 4, 1], 'rows are not in the order of their experts'
  assert not rows[4:].any()
  assert back[:, 0].tolist() == [1, 2, 0, 4, 5, 0]


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
