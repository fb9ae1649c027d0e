"""Compute the cost of a Pallas kernel, which a compiled program does not contain."""

import dataclasses
import json
import re

from tokenformer_jax.model import splash
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.hlo import Computation, Instruction, arrays

_KERNEL = '"tpu_custom_call"'
_COST_ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
_METADATA = 'ragged-dot-metadata'  # finds the rows of each expert; takes no time beside a product


@dataclasses.dataclass(frozen=True)
class KernelCost:
  """The cost of one call.

  Attributes:
    flops: the FLOPs of its products.
    filled: the same with the zeros that fill heads up to the side of the matrix unit.
    seconds: the time by formula, or by the kernel's own estimate.
    blocks: the blocks of its grid that it computes, each of which runs its bundles once; None if
      they are not known.
  """

  flops: float
  filled: float
  seconds: float
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
  found = splash.cost(instruction.name, operands, side=chip.matrix_side, scope=scope)
  if found:
    flops, filled, operations, blocks = found
    seconds = filled / chip.peak + operations / chip.vector_peak
    return KernelCost(flops, filled, seconds, blocks)
  found = _COST_ESTIMATE.search(instruction.attributes)
  if not found:
    return None
  estimate = {key: float(value) for key, value in json.loads(found.group(1)).items()}
  flops = estimate['flops']
  seconds = max(flops / chip.peak, estimate['bytes_accessed'] / chip.hbm_rate)
  return KernelCost(flops, flops, seconds, None)
