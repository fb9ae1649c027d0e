"""Estimate the time of every kernel of a program for a GPU, by its shape and by its bytes.

A product fills the matrix units of all cores in waves of tiles; attention runs at the rates that
its authors published; every other kernel moves its bytes. `docs/plan.md` says what was fitted.
"""

import dataclasses
import itertools
import math
import re

from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.collectives import parse_collective
from tokenformer_jax.plan.gpu import kernel_kind
from tokenformer_jax.plan.hlo import Computation, Instruction, Program, arrays
from tokenformer_jax.plan.matmuls import matmul_flops
from tokenformer_jax.plan.memory_traffic import hbm_bytes
from tokenformer_jax.plan.operations import Operation, instructions_inside, scope
from tokenformer_jax.plan.trip_counts import Visit

# Fitted to the measured steps of 150m and 1_5b on an H200; benchmarks/gpu_plans.py tests them on
# others.
_PRODUCTS = 0.82  # of the peak, in a full wave of tiles with a long sum
_LOST = 256  # by which a tile's sum counts as longer, for its start and its end
_BYTES = 0.9  # of the published bandwidth
_LAUNCH = 2e-6  # seconds of a kernel before it computes
# Rows and columns of a tile, and the pieces of its sum that different cores add up, through a
# workspace of so many bytes in float32. The fastest of all counts, as in cuBLASLt's choice.
_TILES, _PIECES, _WORKSPACE = ((128, 256), (256, 128), (128, 128)), (1, 2, 4, 8, 16), 32 * 2**20
# cuDNN's attention on an H100, forward and backward, without a mask (Shah et al. 2024, Figures 5
# and 6, arXiv 2407.08608): the share of the peak for long rows and heads 64 and 128 wide, and the
# length of rows at which half of it is reached.
_ATTENTION = {False: (0.42, 0.61, 100), True: (0.44, 0.525, 300)}
_MASKED = 4  # A causal mask costs as much of the rate as rows that are shorter by this factor.
_DIMENSIONS = re.compile(r'"(\w+_dimensions)":\s*\[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Product:
  """A batch of products of [M, K] with [K, N]."""

  M: int
  N: int
  K: int
  batch: int

  @property
  def flops(self) -> float:
    return 2.0 * self.M * self.N * self.K * self.batch

  def seconds(self, chip: Chip) -> float:
    """Return the time of the waves of tiles that fill the cores, with the fastest tiles."""
    of_a_core, sums = _PRODUCTS * chip.peak / chip.cores, self.M * self.N * self.batch * 4
    fastest = math.inf
    for (rows, columns), pieces in itertools.product(_TILES, _PIECES):
      if pieces == 1 or pieces * sums <= _WORKSPACE:
        tiles = -(-self.M // rows) * -(-self.N // columns) * self.batch
        waves, length = -(-tiles * pieces // chip.cores), self.K / pieces + _LOST
        added = (pieces + 1) * sums / chip.hbm_rate + _LAUNCH if pieces > 1 else 0.0
        fastest = min(fastest, waves * 2 * rows * columns * length / of_a_core + added)
    return fastest


def read(program: Program, visits: list[Visit], chip: Chip) -> tuple[Operation, ...]:
  """Return the kernels of a program, in its order; exchanges between devices are none of them."""
  return tuple(
    _kernel(program, v, chip)
    for v in visits
    if v.inside is None
    and kernel_kind(v.instruction)
    and not parse_collective(v.instruction.opcode)
    and not v.instruction.opcode.startswith('async-')
  )


def _kernel(program: Program, v: Visit, chip: Chip) -> Operation:
  instruction, kind = v.instruction, kernel_kind(v.instruction)
  members = [(v.computation, instruction)]
  if instruction.opcode == 'fusion':
    members = list(instructions_inside(program, instruction.attribute('calls')))
  flops, units = 0.0, 0.0
  products = []
  for where, one in members:
    if kernel_kind(one) == 'product':
      product = _product(where, one)
      flops, units = flops + product.flops, units + product.seconds(chip)
      products.append(scope(one))
    elif kernel_kind(one) == 'attention':
      more, seconds = _attention(where, one, chip)
      flops, units = flops + more, units + seconds
    else:
      flops += matmul_flops(where, one)
  memory = hbm_bytes(program, v.computation, instruction, converts=True) / chip.hbm_rate
  seconds = _LAUNCH + max(units, memory / _BYTES)
  scopes = [scope(one) for one in (instruction, *(member for _, member in members))]
  return Operation(
    name=instruction.name,
    opcode=kind,
    times=v.times,
    seconds=seconds,
    scheduled=None,
    flops=flops,
    matrix=flops / chip.peak,
    vector=0.0,
    memory=memory,
    scopes=tuple(dict.fromkeys(filter(None, scopes))),
    products=tuple(products),
    holds=frozenset(member.opcode for _, member in members),
    rough=seconds,
  )


def _product(computation: Computation, instruction: Instruction) -> Product:
  """Return the sizes of a product that cuBLAS computes."""
  found = _DIMENSIONS.findall(instruction.attributes)
  dimensions = {name: [int(i) for i in re.findall(r'\d+', text)] for name, text in found}
  left, right = (
    arrays(computation.instructions[name].shape)[0][1] for name in instruction.operands[:2]
  )
  summed = math.prod(left[i] for i in dimensions['lhs_contracting_dimensions'])
  batch = math.prod(left[i] for i in dimensions['lhs_batch_dimensions'])
  return Product(
    math.prod(left) // summed // batch, math.prod(right) // summed // batch, summed, batch
  )


def _attention(
  computation: Computation, instruction: Instruction, chip: Chip
) -> tuple[float, float]:
  """Return the FLOPs and the seconds of a call of cuDNN's attention, whose mask leaves half."""
  backward, causal = 'Backward' in instruction.attributes, '"CAUSAL"' in instruction.attributes
  (rows, length, heads, width), keys = (
    arrays(computation.instructions[name].shape)[0][1] for name in instruction.operands[:2]
  )
  flops = (10.0 if backward else 4.0) * rows * heads * length * keys[1] * width
  narrow, wide, half = _ATTENTION[backward]
  share = narrow + (wide - narrow) * min(max(width - 64, 0), 64) / 64
  if causal:
    flops, length = flops / 2, length / _MASKED
  return flops, flops / (share * length / (length + half)) / chip.peak
