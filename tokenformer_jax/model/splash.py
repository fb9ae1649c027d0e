"""Token-token attention by the splash kernel on TPUs; each device computes its rows and heads.

The kernel is part of JAX. This module chooses its block size and runs it on the mesh.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tokenformer_jax.model.sequence import SHORT_BLOCK
from tokenformer_jax.model.stack import ATTENDED
from tokenformer_jax.parallel.rules import shard_count, spec
from tokenformer_jax.parallel.sharding import lookup_kind, on_one_shard

LANES = 128  # lanes of a vector unit; the number of positions must be a multiple
_LARGE, _SMALL = 1024, SHORT_BLOCK  # queries and keys of a block
# Bytes that the partial gradients of queries may take on a device, by the start of `device_kind`: a
# fifth of its memory, or less.
_PARTIAL = {'TPU': 2**30, 'TPU v5': 18 * 2**30, 'TPU v5 lite': 2**30, 'TPU v6': 3 * 2**30}
_AXES = ('batch', 'row_heads', None, None)
# The scope of a kernel call. A compiled program keeps the scope in the names of operations, also in
# the backward pass, and has no other information about the mask: the planner reads the window here.
SCOPE = 'splash_window_{}'


def fits(batch: int, heads: int, length: int) -> bool:
  """Return whether the kernel can compute [B, T, H, K] of these sizes on the current mesh."""
  divides = batch % shard_count('batch') == 0 and heads % shard_count('row_heads') == 0
  return length % LANES == 0 and (divides or on_one_shard())


def filled(head_width: int) -> int:
  """Return the head width that projections should produce: K, or K filled up to whole lanes.

  The kernel fills heads with zeros. If the projection fills them, their values need not move
  between lanes before and after the kernel. If more than a quarter would be zeros, the extra
  products cost about as much as the moves, so the result is K.
  """
  lanes = -(-head_width // LANES) * LANES
  return lanes if 4 * head_width >= 3 * lanes else head_width


def block_size(length: int, window: int = 0) -> int:
  """Return the queries and keys per block, a power of two that divides T: at most 1024, or 512.

  By the compiler's schedule a score in the larger blocks takes two thirds of the time, so they are
  used unless a window lets the smaller blocks leave out that many more. Blocks of 2048 would take a
  tenth less for long rows, but need more vector memory than the compiler gives by default.
  """
  large, small = (math.gcd(length, block) for block in (_LARGE, _SMALL))
  scores = {block: computed_blocks(length, window, block) * block**2 for block in (large, small)}
  return small if 4 * scores[small] < 3 * scores[large] else large


def computed_blocks(length: int, window: int, block: int) -> int:
  """Return the number of blocks of scores that the causal kernel computes: with a visible key."""
  blocks = length // block
  # The last key of a block and the first query of the n-th block after it are (n − 1) · block + 1
  # positions apart.
  diagonals = min(blocks, (window + block - 2) // block + 1) if window else blocks
  return diagonals * blocks - diagonals * (diagonals - 1) // 2


def is_fused(length: int, block: int, window: int = 0, size: int = 0, kind: str = '') -> bool:
  """Return whether one kernel computes all three gradients, and each score once.

  It returns a partial gradient of the queries, of `size` bytes on a device, for every block of
  keys. Writing and summing these costs more than a second kernel if blocks are small, or many and
  mostly out of a window. `kind` is the `device_kind`, whose memory bounds them.
  """
  blocks = length // block
  fits_memory = blocks * size <= (lookup_kind(_PARTIAL, kind) or _PARTIAL['TPU'])
  is_cheap = block >= _LARGE and not window and fits_memory
  return blocks <= max(1, block // 256) or is_cheap


def attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  head_width: int | None = None,
  causal: bool,
  window: int = 0,
  starts_BxT: jax.Array | None = None,
  cap: float = 0.0,
  interpret: bool = False,
) -> jax.Array:
  """Return the softmax attention of queries, keys and values [B, T, H, K].

  Keys and values may have fewer heads, which divide H and which the mesh can split as well.
  T is a multiple of `LANES`. Scores are divided by the square root of `head_width`, which is less
  than K if zeros fill the heads; None: K. With `causal` a query sees the keys up to its own, or
  the last `window` of them; 0: all. With `starts_BxT` a query sees only keys with the same value,
  those of its document (`Context`); no block of scores is skipped for it. `cap` is that of
  `kernels.Softmax`. `interpret` runs the kernel without a TPU, slowly, for tests.
  """
  query = query * (head_width or query.shape[-1]) ** -0.5
  query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
  device = jax.sharding.get_abstract_mesh().abstract_device
  kind = device.device_kind if device else jax.devices()[0].device_kind

  def on_device(
    query_BxHxTxK: jax.Array, key: jax.Array, value: jax.Array, *starts_BxT: jax.Array
  ) -> jax.Array:
    _, heads, length, _ = query_BxHxTxK.shape
    block = block_size(length, window)
    fused = is_fused(length, block, window, query_BxHxTxK.nbytes, kind)
    attend = _kernel(heads, length, block, fused, causal, window, cap, interpret)
    with jax.named_scope(SCOPE.format(window)):
      return jax.vmap(attend)(query_BxHxTxK, key, value, *starts_BxT)

  starts = () if starts_BxT is None else (starts_BxT,)
  if not (jax.sharding.get_abstract_mesh().empty or on_one_shard()):
    heads = spec(_AXES)
    in_specs = (heads, heads, heads, *(spec(('batch', None)) for _ in starts))
    # A kernel does not declare over which axes its result varies, so JAX cannot check that.
    on_device = jax.shard_map(on_device, in_specs=in_specs, out_specs=heads, check_vma=False)
  return on_device(query, key, value, *starts).swapaxes(1, 2)


def _kernel(
  heads: int,
  length: int,
  block: int,
  fused: bool,
  causal: bool,
  window: int,
  cap: float,
  interpret: bool,
) -> Callable:
  """Return the library's function of [H, T, K] and, for documents, of their ids [T] as well."""
  # Pallas is large, and only runs on TPUs need it.
  from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
    splash_attention_kernel as library,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
    splash_attention_mask as masks,
  )

  shape = (length, length)
  if causal and window:
    # The library counts the positions left and right of a query without the query's own.
    mask = masks.LocalMask(shape, (window - 1, 0), offset=0)
  else:
    mask = _causal_mask()(shape) if causal else masks.FullMask(shape)
  names = ['block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv']
  if not fused:
    names += ['block_q_dq', 'block_kv_dq']
  # Larger blocks are computed piece by piece, because scores of a piece stay in registers and VMEM.
  computed = dict.fromkeys(('block_kv_compute', 'block_kv_dkv_compute'), math.gcd(block, _SMALL))
  attend = library.make_splash_mha(
    masks.MultiHeadMask((mask,) * heads),
    block_sizes=library.BlockSizes(
      **dict.fromkeys(names, block), **computed, use_fused_bwd_kernel=fused
    ),
    head_shards=1,
    q_seq_shards=1,
    residual_checkpoint_name=ATTENDED,
    attn_logits_soft_cap=cap or None,
    interpret=interpret,
  )

  def attend_row(query: jax.Array, key: jax.Array, value: jax.Array, *starts_T: jax.Array) -> Any:
    # Queries and keys see only each other's equal ids.
    return attend(query, key, value, *(library.SegmentIds(q=ids, kv=ids) for ids in starts_T))

  return attend_row


@functools.cache
def _causal_mask() -> type:
  """Return the library's causal mask, which gives a block of equal entries as a single one.

  The library only asks whether all or any entries of a block are visible. For 131,072 positions the
  comparisons of each query with each key would take minutes whenever a step is traced.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
    splash_attention_mask as masks,
  )

  class CausalMask(masks.CausalMask):
    """The causal mask of [T, T]."""

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
      (first, last, _), (key, end, _) = (
        one.indices(size) for one, size in zip(index, self.shape, strict=True)
      )
      if end <= first + 1 or key >= last:
        return np.full((1, 1), end <= first + 1)
      return super().__getitem__(index)

  return CausalMask
