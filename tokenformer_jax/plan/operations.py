"""Compute the time of every operation of a compiled program, and the bounds of that time."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from tokenformer_jax.plan import kernel_costs
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.collectives import parse_collective
from tokenformer_jax.plan.elementwise import vector_operations
from tokenformer_jax.plan.equal_operations import share_bundles
from tokenformer_jax.plan.hlo import Computation, Instruction, Program
from tokenformer_jax.plan.matmuls import filling, matmul_flops
from tokenformer_jax.plan.memory_traffic import hbm_bytes
from tokenformer_jax.plan.schedule import Bundles, window_bounds
from tokenformer_jax.plan.trip_counts import Visit

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_SCOPE = re.compile(r'\bop_name="([^"]*)"')
_COLLECTIVE_STEP = re.compile(r'async-collective-(start|done)')
# Operations that take no time of their own: names, elements of others, and the ends of transfers.
FREE = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
  *('while', 'conditional', 'call'),  # What they run is counted.
)
# The slots of the matrix units that a schedule uses, over those that the products need at the peak,
# above with narrow matrices filled up to the side of a unit (rotary positions: 4 times the need on
# v6e). A schedule outside of these limits is not that of the operation. For single products the
# ratio is 0.95 to 1.09 on v4 and v6e, 0.75 to 0.83 on v5e and v5p, and 0.45 to 0.8 on TPU7x: there
# bundles wait for the units.
_PLAUSIBLE = (0.4, 2.5)
# Without a schedule, the share of the shorter of matrix and vector work that does not overlap the
# longer one, where cycles do not hold. By the schedules of single fusions on v6e.
_NOT_BESIDE = 0.3


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation that runs on a device's core, and the seconds of one run of it."""

  name: str
  opcode: str
  times: int
  seconds: float  # the time that the plan counts
  # By the schedule: the longest of its bundles, its products at the peak of the matrix units, and
  # its bytes at HBM's bandwidth; None if the schedule is not known.
  scheduled: float | None
  flops: float  # of its products, and of a kernel
  # Bounds by the products at the peak, by the slots of the vector units that the schedule uses
  # (else by counted operations), and by the bytes in HBM.
  matrix: float
  vector: float
  memory: float
  scopes: tuple[str, ...]  # JAX's names of the operation and of those in it, its own first
  products: tuple[str, ...]  # JAX's names of the products in it
  holds: frozenset[str] = frozenset()  # the opcodes in it
  slots: float | None = None  # for which it fills the matrix units, to compare with `matrix`
  rough: float = 0.0  # an estimate by the bounds, which needs no schedule


def cycles(instruction: Instruction) -> int:
  """Return the compiler's estimate of an operation's cycles, or 0."""
  match = _CYCLES.search(instruction.attributes)
  return int(match.group(1)) if match else 0


def scope(instruction: Instruction) -> str:
  """Return JAX's name of an operation, or an empty text."""
  match = _SCOPE.search(instruction.attributes)
  return match.group(1) if match else ''


def read(
  program: Program,
  visits: list[Visit],
  bundles: Mapping[str, Bundles],
  chip: Chip,
  has_cycles: bool = True,
) -> tuple[Operation, ...]:
  """Return the operations of a program, in its order.

  Before code generation, operations have no cycles, and their seconds are the rough ones.
  """
  bundles = share_bundles(program, visits, bundles) if bundles else bundles
  inside = functools.cache(lambda name: list(instructions_inside(program, name)))
  return tuple(
    _operation(program, v, bundles.get(v.instruction.name), chip, inside, has_cycles)
    for v in visits
    if v.inside is None and _takes_time(v.instruction)
  )


def _takes_time(instruction: Instruction) -> bool:
  opcode = instruction.opcode
  if opcode in FREE or opcode.endswith(('-start', '-done')) or parse_collective(opcode):
    return False
  if opcode == 'custom-call' and not kernel_costs.is_kernel(instruction):
    return cycles(instruction) > 0  # Others name memory.
  return not _COLLECTIVE_STEP.match(instruction.name) and opcode not in ('send', 'recv')


def instructions_inside(program: Program, fusion: str) -> Iterator[tuple[Computation, Instruction]]:
  """Yield the instructions of a fusion's computation, nested fusions included."""
  computation = program.computations[fusion]
  for instruction in computation.instructions.values():
    yield computation, instruction
    if instruction.opcode == 'fusion':
      yield from instructions_inside(program, instruction.attribute('calls'))


class _Products(NamedTuple):
  """The matrix products of an operation."""

  instructions: list[Instruction]
  flops: float
  least: float  # the seconds that they need at the peak of the matrix units
  most: float  # the same with narrow matrices filled up to the side of a unit


def _products(members: list[tuple[Computation, Instruction]], chip: Chip) -> _Products:
  flops = [matmul_flops(where, one) for where, one in members]
  filled = sum(
    count * filling(where, one, chip.matrix_side)
    for count, (where, one) in zip(flops, members, strict=True)
  )
  products = [one for count, (_, one) in zip(flops, members, strict=True) if count]
  return _Products(products, sum(flops), sum(flops) / chip.peak, filled / chip.peak)


def _operation(
  program: Program,
  v: Visit,
  bundles: Bundles | None,
  chip: Chip,
  inside: Callable[[str], list[tuple[Computation, Instruction]]],
  has_cycles: bool,
) -> Operation:
  instruction = v.instruction
  members = [(v.computation, instruction)]
  if instruction.opcode == 'fusion':
    members = inside(instruction.attribute('calls'))
  memory = hbm_bytes(program, v.computation, instruction) / chip.hbm_rate
  kernel = kernel_costs.cost(v.computation, instruction, scope(instruction), chip)
  products = _products(members, chip)
  vector = sum(vector_operations(where, one, chip) for where, one in members) / chip.vector_peak
  runs = math.prod(window_bounds(instruction) or ())
  if kernel:
    least = kernel.filled / chip.peak
    products = products._replace(flops=kernel.flops, least=least, most=max(least, products.most))
    runs, bundles = kernel.blocks or 1, bundles if kernel.blocks else None
    if kernel.blocks:
      vector = kernel.seconds - least
  matrix = products.flops / chip.peak
  step = runs / chip.cores / chip.clock  # The cores share the runs of the bundles.
  if bundles and not _is_plausible(bundles.matrix * step, products):
    bundles = None
  scheduled = max(bundles.count * step, products.least, memory) if bundles else None
  rough = kernel.seconds if kernel else _rough(matrix, vector, memory, chip)
  seconds = cycles(instruction) / chip.clock if has_cycles and not kernel else rough
  if scheduled is not None and (kernel or not chip.cycles_hold):
    seconds = scheduled
  scopes = [scope(one) for one in (instruction, *(member for _, member in members))]
  return Operation(
    name=instruction.name,
    opcode=instruction.opcode,
    times=v.times,
    seconds=seconds,
    scheduled=scheduled,
    flops=products.flops,
    matrix=matrix,
    vector=bundles.vector * step if bundles else vector,
    memory=memory,
    scopes=tuple(dict.fromkeys(filter(None, scopes))),
    products=tuple(dict.fromkeys(map(scope, products.instructions))),
    holds=frozenset(member.opcode for _, member in members),
    slots=bundles.matrix * step if bundles else None,
    rough=rough,
  )


def _rough(matrix: float, vector: float, memory: float, chip: Chip) -> float:
  """Estimate the seconds of an operation from the bounds by its units and by memory."""
  beside = min(matrix, vector) * (1.0 if chip.cycles_hold else _NOT_BESIDE)
  return max(max(matrix, vector) + beside, memory)


def _is_plausible(slots: float, products: _Products) -> bool:
  """Return whether a schedule that fills slots of the matrix units so long is of the products."""
  low, high = _PLAUSIBLE
  most = max(products.least, products.most)
  return not products.least or low * products.least <= slots <= high * most
