"""Products of sorted rows with the matrices of their experts, on TPUs.

XLA compiles `jax.lax.ragged_dot` into a kernel that skips tiles without rows, but for the gradient
of the matrices it multiplies all rows once for each expert. That gradient uses the kernel `tgmm` of
JAX's Megablox (after Gale et al. 2022, arXiv 2211.15841). `benchmarks/experts.py` compares their
cycles with those of dense products.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec

from tokenformer_jax.parallel.per_device import vary_together

_LANES = 128
_ROWS = 512  # the most rows of a tile
_CONTRACTED = 2048  # the most numbers that a step of a kernel sums over
# Bytes of vector memory for the blocks of a kernel, below the compiler's own limits for one kernel:
# 16 MiB, and 32 MiB on newer chips.
_VMEM, _VMEM_NEW, _NEW = 13 * 2**20, 24 * 2**20, ('TPU v6', 'TPU7x')


def row_tile(rows: int, count: int) -> int:
  """Return the rows of a tile: at most a quarter of an expert's at even load, from 128 to 512.

  A tile with rows of two experts is computed twice.
  """
  tile = _LANES
  while tile < _ROWS and 8 * tile * count <= rows:
    tile *= 2
  return tile


def product(
  rows_PxI: jax.Array,
  matrices_ExIxO: jax.Array,
  sizes_E: jax.Array,
  tile: int,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Return each row times the matrix of its expert, [P, O].

  The rows are sorted by expert, and P is a multiple of `tile`, which is from `row_tile`. Results of
  rows beyond the sum of `sizes_E` are undefined. `interpret` runs the kernel of the gradient
  without a TPU, slowly, for tests.
  """
  rows_PxI, matrices_ExIxO, sizes_E = vary_together(rows_PxI, matrices_ExIxO, sizes_E)
  return _product(rows_PxI, matrices_ExIxO, sizes_E, tile, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(
  rows_PxI: jax.Array, matrices_ExIxO: jax.Array, sizes_E: jax.Array, tile: int, interpret: bool
) -> jax.Array:
  del interpret
  return _multiply(rows_PxI, matrices_ExIxO, sizes_E, tile)


def _multiply(
  rows_PxI: jax.Array, matrices_ExIxO: jax.Array, sizes_E: jax.Array, tile: int
) -> jax.Array:
  _, inputs, outputs = matrices_ExIxO.shape
  tiles = product_tiles(tile, inputs, outputs, rows_PxI.dtype.itemsize)
  # XLA's own tiles, of 128 rows and 640 outputs, would compute 1920 outputs, not 1408.
  with set_xla_metadata(ragged_dot_tiling=','.join(map(str, tiles))):
    return jax.lax.ragged_dot(rows_PxI, matrices_ExIxO, sizes_E)


def _forward(
  rows_PxI: jax.Array, matrices_ExIxO: jax.Array, sizes_E: jax.Array, tile: int, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  del interpret
  out_PxO = _multiply(rows_PxI, matrices_ExIxO, sizes_E, tile)
  return out_PxO, (rows_PxI, matrices_ExIxO, sizes_E)


def _backward(
  tile: int, interpret: bool, saved: tuple[jax.Array, ...], gradient_PxO: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  rows_PxI, matrices_ExIxO, sizes_E = saved
  turned_ExOxI = jnp.swapaxes(matrices_ExIxO, 1, 2)
  d_rows = _multiply(gradient_PxO, turned_ExOxI, sizes_E, tile)
  _, inputs, outputs = matrices_ExIxO.shape
  tiles = gradient_tiles(tile, inputs, outputs, rows_PxI.dtype.itemsize)

  def sum_products(rows_PxI: jax.Array, gradient_PxO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    # Pallas is large, and only runs on TPUs need it.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # noqa: PLC0415

    how = {'tiling': tiles, 'interpret': interpret}
    return tgmm(rows_PxI.T, gradient_PxO, sizes_E, matrices_ExIxO.dtype, **how)

  if not jax.sharding.get_abstract_mesh().empty:
    # A kernel does not declare over which axes its result varies, so JAX cannot check that.
    here = PartitionSpec()
    sum_products = jax.shard_map(
      sum_products, in_specs=(here, here, here), out_specs=here, check_vma=False
    )
  d_matrices = sum_products(rows_PxI, gradient_PxO, sizes_E)
  d_matrices, *_ = vary_together(d_matrices, matrices_ExIxO)
  return d_rows, d_matrices, None


_product.defvjp(_forward, _backward)


def product_tiles(tile: int, inputs: int, outputs: int, size: int) -> tuple[int, int, int]:
  """Return rows, inputs and outputs of a step of the products' kernel.

  Two cores of a chip share the tiles of outputs, so there are at least two. `size` is the bytes of
  a number.
  """
  inner = _contracted(inputs)
  for pieces in range(_cores(), outputs + 1):
    out = _piece(outputs, pieces)
    # Blocks are in memory twice; the sum is in float32.
    blocks = 2 * size * (tile * inner + inner * out + tile * out) + 4 * tile * out
    if blocks <= _vmem() or out <= _LANES:
      return tile, inner, out
  return tile, inner, outputs


def gradient_tiles(tile: int, inputs: int, outputs: int, size: int) -> tuple[int, int, int]:
  """Return rows, inputs and outputs of a step of the gradient's kernel; see `product_tiles`.

  Prefer wide tiles of outputs, because each tile transposes the rows again.
  """
  for pieces in range(_cores(), outputs + 1):
    out = _piece(outputs, pieces)
    for cuts in range(1, 5):
      inner = _piece(inputs, cuts)
      blocks = 2 * size * (tile * inner + tile * out + inner * out) + 4 * inner * out
      if blocks <= _vmem() or max(inner, out) <= _LANES:
        return tile, inner, out
  return tile, min(inputs, _LANES), min(outputs, _LANES)


def _piece(length: int, pieces: int) -> int:
  """Return the length of equal pieces in whole lanes, or the length itself."""
  lanes = -(-length // (pieces * _LANES)) * _LANES
  return min(length, lanes)


def _contracted(inputs: int) -> int:
  """Return the largest number of lanes that divides the inputs, or the inputs themselves."""
  whole = [inner for inner in range(_LANES, _CONTRACTED + 1, _LANES) if inputs % inner == 0]
  return max(whole) if whole and inputs > _CONTRACTED else inputs


def _cores() -> int:
  device = jax.sharding.get_abstract_mesh().abstract_device
  return (device and device.num_cores) or 1


def _vmem() -> int:
  device = jax.sharding.get_abstract_mesh().abstract_device
  return _VMEM_NEW if device and device.device_kind.startswith(_NEW) else _VMEM
