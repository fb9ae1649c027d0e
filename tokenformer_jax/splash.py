"""Token-token attention by the splash kernel on a TPU: on every device its rows and its heads.

The kernel is JAX's own; here are the choice of its blocks, its place on the mesh, and its cost.
"""

import math
import re
from collections.abc import Sequence

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from tokenformer_jax.sharding import parts, spec

LANES = 128  # of a vector unit; positions are a multiple of this
_BLOCK = 512
_AXES = ('batch', 'heads', None, None)
# Of every block of scores: matrix products, and operations on each score by the vector units
# (mask, maximum, exponential, sum, cast; backward the products with the gradient, too).
_WORK = {'fwd': (2, 12), 'dkv': (4, 14), 'dq': (3, 14)}
_KERNEL = re.compile(r'splash_mha_(fwd|dkv|dq)')
# The scope that a kernel is called in. A compiled program keeps it in the names of operations, also
# of the backward pass, and nothing else there says what the mask is.
_SCOPE = 'splash_window_{}'
_WINDOW = re.compile(_SCOPE.format(r'(\d+)'))


def fits(batch: int, heads: int, length: int) -> bool:
  """Whether the kernel can compute [B, T, H, K] of these sizes on the mesh that is set."""
  divides = batch % parts('batch') == 0 and heads % parts('heads') == 0
  return length % LANES == 0 and divides


def filled(head_width: int) -> int:
  """The width of heads that projections should make: all lanes of the vector units, or K itself.

  Heads that their projection fills with zeros need not be moved from lane to lane before and after
  the kernel, which fills them anyway. Where more than a quarter would be zeros, their products cost
  about as much as the moves.
  """
  lanes = -(-head_width // LANES) * LANES
  return lanes if 4 * head_width >= 3 * lanes else head_width


def block_size(length: int) -> int:
  """Queries, and keys, of a block: the largest power of two up to 512 that divides the length."""
  return math.gcd(length, _BLOCK)


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  head_width: int | None = None,
  causal: bool,
  window: int = 0,
  interpret: bool = False,
) -> jax.Array:
  """Softmax attention on [B, T, H, K] each; T is a multiple of `LANES`.

  Args:
    query: of a width K.
    key: as many as queries.
    value: as many as keys.
    head_width: by whose square root scores are divided; None: K. Less where zeros fill the heads.
    causal: whether queries see only the keys up to their own position.
    window: how many of these, their own the last; 0: all. For causal attention.
    interpret: runs the kernel without a TPU, slowly, for tests.

  Returns:
    The values [B, T, H, K], weighted.
  """
  query = query * (head_width or query.shape[-1]) ** -0.5
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))

  def of_device(query_BxHxTxK: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    _, heads, length, _ = query_BxHxTxK.shape
    apply = _kernel(heads, _mask(length, causal, window), interpret)
    with jax.named_scope(_SCOPE.format(window)):
      return jax.vmap(apply)(query_BxHxTxK, key, value)

  if not jax.sharding.get_abstract_mesh().empty:
    place = spec(_AXES)
    # A kernel does not say over which axes its result varies, so nobody can check that.
    of_device = jax.shard_map(of_device, in_specs=(place,) * 3, out_specs=place, check_vma=False)
  return of_device(query, key, value).swapaxes(1, 2)


def _mask(length: int, causal: bool, window: int) -> masks.Mask:
  shape = (length, length)
  if causal and window:
    # The library counts the positions to the left and to the right of a query, without its own.
    return masks.LocalMask(shape, (window - 1, 0), offset=0)
  return masks.CausalMask(shape) if causal else masks.FullMask(shape)


def _kernel(heads: int, mask: masks.Mask, interpret: bool):
  block = block_size(mask.shape[0])
  # Two kernels backward: one for all three gradients leaves a part of the queries' for every block
  # of keys, and their sum costs more than computing the scores once more.
  blocks = library.BlockSizes(
    **dict.fromkeys(
      (
        *('block_q', 'block_kv', 'block_kv_compute'),
        *('block_q_dkv', 'block_kv_dkv', 'block_kv_dkv_compute'),
        *('block_q_dq', 'block_kv_dq'),
      ),
      block,
    ),
  )
  return library.make_splash_mha(
    masks.MultiHeadMask((mask,) * heads),
    block_sizes=blocks,
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )


def computed_blocks(length: int, window: int = 0) -> int:
  """How many blocks of scores the causal kernel computes: those in which any key is seen."""
  block = block_size(length)
  blocks = length // block
  # The last key of a block and the first query of one that is n blocks later are (n − 1) block + 1
  # positions apart.
  diagonals = min(blocks, (window + block - 2) // block + 1) if window else blocks
  return diagonals * blocks - diagonals * (diagonals - 1) // 2


def cost(
  name: str, operands: Sequence[tuple[str, tuple[int, ...]]], *, side: int, scope: str
) -> tuple[float, float, float] | None:
  """Return what a call of the kernel costs, which a compiled program does not say.

  Blocks that are all masked are left out; those that are masked in part are computed whole.

  Args:
    name: of the operation in the program.
    operands: their data types and shapes: tables of blocks (`s8`) if there is a mask, and the
      queries on a device, [B, H, T, K], or [H, T, K] of one row.
    side: of the matrix unit; narrower heads are filled with zeros.
    scope: of the operation, as the program's metadata has it. The window is there, and in no
      operand: the tables of the backward pass are not cut to it.

  Returns:
    FLOPs of the products, the same with the zeros that fill heads, and operations of the vector
    units; None for the name of another kernel, and for a mask of which the scope says nothing.
  """
  found = _KERNEL.search(name)
  if not found:
    return None
  *rows, length, width = next(shape for dtype, shape in operands if 'f' in dtype)
  computed = (length // block_size(length)) ** 2
  if any(dtype == 's8' for dtype, _ in operands):
    window = _WINDOW.search(scope)
    if not window:
      return None
    computed = computed_blocks(length, int(window.group(1)))
  scores = math.prod(rows) * computed * block_size(length) ** 2
  products, operations = _WORK[found.group(1)]
  filled = -(-width // side) * side
  return products * 2 * scores * width, products * 2 * scores * filled, operations * scores
