"""Compute the cost of a Pallas kernel, which a compiled program does not contain."""

import dataclasses
import json
import math
import re
from collections.abc import Sequence

from tokenformer_jax.model import splash
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.hlo import Computation, Instruction, arrays

_KERNEL = '"tpu_custom_call"'
_COST_ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
# For each kernel of splash attention: the matrix products per block of scores, and the vector
# operations per score (mask, maximum, exponential, sum, cast; in the backward pass also products
# with the gradient).
_SPLASH_WORK = {'fwd': (2, 12), 'dkv': (4, 14), 'dq': (3, 14), 'fused': (5, 16)}
_SPLASH = re.compile(r'splash_mha_(fwd|dkv|dq)')
_SPLASH_WINDOW = re.compile(splash.SCOPE.format(r'(\d+)'))
_METADATA = 'ragged-dot-metadata'  # finds the rows of each expert; takes no time beside a product


@dataclasses.dataclass(frozen=True)
class KernelCost:
  """The cost of one call."""

  flops: float  # of its products
  filled: float  # the same with the zeros that fill heads up to the side of the matrix unit
  seconds: float  # by formula, or by the kernel's own estimate
  # The blocks of its grid that it computes, each of which runs its bundles once, if they are known.
  blocks: int | None


def is_kernel(instruction: Instruction) -> bool:
  """Return whether an instruction calls a kernel."""
  return _KERNEL in instruction.attributes


def cost(
  computation: Computation, instruction: Instruction, scope: str, chip: Chip
) -> KernelCost | None:
  """Return the cost of a kernel; None for a kernel without an estimate and for other operations.

  Splash attention has a formula. Other kernels carry an estimate of their own.
  """
  if not is_kernel(instruction):
    return None
  if instruction.name.startswith(_METADATA):
    return KernelCost(0.0, 0.0, 0.0, None)
  shapes = [computation.instructions[name].shape for name in instruction.operands]
  operands = [array for shape in shapes for array in arrays(shape)]
  results = arrays(instruction.shape)
  work = splash_cost(instruction.name, operands, results, side=chip.matrix_side, scope=scope)
  if work:
    flops, filled, operations, blocks = work
    seconds = filled / chip.peak + operations / chip.vector_peak
    return KernelCost(flops, filled, seconds, blocks)
  match = _COST_ESTIMATE.search(instruction.attributes)
  if not match:
    return None
  estimate = {key: float(value) for key, value in json.loads(match.group(1)).items()}
  flops = estimate['flops']
  seconds = max(flops / chip.peak, estimate['bytes_accessed'] / chip.hbm_rate)
  return KernelCost(flops, flops, seconds, None)


def splash_cost(
  name: str,
  operands: Sequence[tuple[str, tuple[int, ...]]],
  results: Sequence[tuple[str, tuple[int, ...]]] = (),
  *,
  side: int,
  scope: str,
) -> tuple[float, float, float, int] | None:
  """Return the cost of a call of splash attention.

  The kernel skips blocks that are masked entirely, and computes partly masked blocks whole.

  Operands and results are data types and shapes: tables of blocks (`s8`) if there is a mask, and
  the queries on a device, [B, H, T, K], or [H, T, K] for one row. A kernel of all three gradients
  returns partial ones of the queries, with one more axis. Zeros fill narrow heads up to `side`,
  that of the matrix unit. The `scope` of the operation names the window: no operand shows it,
  because the tables of the backward pass are not reduced to it.

  Returns:
    The FLOPs of the products, the same with the zeros that fill heads, the operations of the vector
    units, and the number of blocks, which run the kernel's bundles once each; None for another
    kernel, and for a mask whose window the scope does not name.
  """
  match = _SPLASH.search(name)
  if not match:
    return None
  *rows, length, width = next(shape for dtype, shape in operands if 'f' in dtype)
  window = 0
  if is_masked := any(dtype == 's8' for dtype, _ in operands):
    named = _SPLASH_WINDOW.search(scope)
    if not named:
      return None
    window = int(named.group(1))
  block = splash.block_size(length, window)
  computed = splash.computed_blocks(length, window, block)
  blocks = math.prod(rows) * (computed if is_masked else (length // block) ** 2)
  scores = blocks * block**2
  is_fused = any(len(shape) == len(rows) + 3 for _, shape in results)
  products, operations = _SPLASH_WORK['fused' if is_fused else match.group(1)]
  filled = -(-width // side) * side
  flops = products * 2 * scores
  return flops * width, flops * filled, operations * scores, blocks
