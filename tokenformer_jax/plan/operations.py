"""Compute the time of every operation of a compiled program, and the bounds of that time."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tokenformer_jax.plan import kernel_costs
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.collectives import parse_collective
from tokenformer_jax.plan.elementwise import vector_operations
from tokenformer_jax.plan.hlo import Computation, Instruction, Program
from tokenformer_jax.plan.matmuls import filling, matmul_flops
from tokenformer_jax.plan.memory_traffic import hbm_bytes
from tokenformer_jax.plan.schedule import Bundles, window_bounds
from tokenformer_jax.plan.twins import with_twins
from tokenformer_jax.plan.walk import Visit

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_SCOPE = re.compile(r'\bop_name="([^"]*)"')
_COLLECTIVE_STEP = re.compile(r'async-collective-(start|done)')
# Operations that take no time of their own: names, parts of others, and the ends of transfers.
_FREE = (
  *('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast'),
  *('while', 'conditional', 'call'),  # What they run is counted.
)
# The slots of the matrix units that a schedule uses, over those that the products need at the peak,
# above with narrow matrices filled up to the side of a unit (rotary positions: 4 times the need on
# v6e). A schedule outside of these limits is not that of the operation. For single products the
# ratio is 0.95 to 1.09 on v4 and v6e, 0.75 to 0.83 on v5e and v5p, and 0.45 to 0.8 on TPU7x: there
# bundles wait for the units.
_PLAUSIBLE = (0.4, 2.5)
# Without a schedule, the part of the shorter of matrix and vector work that does not run beside the
# longer one, where cycles do not hold. By the schedules of single fusions on v6e.
_NOT_BESIDE = 0.3


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation that runs on a device's core, and the seconds of one run of it.

  Attributes:
    seconds: the time that the plan counts.
    scheduled: the time by the schedule: the longest of its bundles, its products at the peak of the
      matrix units, and its bytes at HBM's bandwidth; None if the schedule is not known.
    flops: FLOPs of its products, and of a kernel.
    matrix, vector, memory: bounds by the products at the peak, by the slots of the vector units
      that the schedule uses (else by counted operations), and by the bytes in HBM.
    slots: the seconds for which the schedule fills the matrix units, to compare with `matrix`; None
      if the schedule is not known.
    rough: an estimate by the bounds, which needs no schedule.
    scopes: JAX's names of the operation and of those in it, its own first.
    products: JAX's names of the products in it.
    holds: the opcodes in it.
  """

  name: str
  opcode: str
  times: int
  seconds: float
  scheduled: float | None
  flops: float
  matrix: float
  vector: float
  memory: float
  scopes: tuple[str, ...]
  products: tuple[str, ...]
  holds: frozenset[str] = frozenset()
  slots: float | None = None
  rough: float = 0.0


def cycles(instruction: Instruction) -> int:
  """Return the compiler's estimate of an operation's cycles, or 0."""
  found = _CYCLES.search(instruction.attributes)
  return int(found.group(1)) if found else 0


def scope(instruction: Instruction) -> str:
  """Return JAX's name of an operation, or an empty text."""
  found = _SCOPE.search(instruction.attributes)
  return found.group(1) if found else ''


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
  bundles = with_twins(program, visits, bundles) if bundles else bundles
  inside = functools.cache(lambda name: list(_instructions(program, program.computations[name])))
  return tuple(
    _operation(program, v, bundles.get(v.instruction.name), chip, inside, has_cycles)
    for v in visits
    if v.inside is None and _takes_time(v.instruction)
  )


def _takes_time(instruction: Instruction) -> bool:
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith(('-start', '-done')) or parse_collective(opcode):
    return False
  if opcode == 'custom-call' and not kernel_costs.is_kernel(instruction):
    return cycles(instruction) > 0  # Others name memory.
  return not _COLLECTIVE_STEP.match(instruction.name) and opcode not in ('send', 'recv')


def _instructions(
  program: Program, computation: Computation
) -> Iterator[tuple[Computation, Instruction]]:
  """Yield the instructions of a fusion's computation, nested fusions included."""
  for instruction in computation.instructions.values():
    yield computation, instruction
    if instruction.opcode == 'fusion':
      yield from _instructions(program, program.computations[instruction.attribute('calls')])


def _operation(
  program: Program,
  v: Visit,
  found: Bundles | None,
  chip: Chip,
  inside: functools.cache,
  has_cycles: bool,
) -> Operation:
  instruction, calls = v.instruction, v.instruction.attribute('calls')
  parts = [(v.computation, instruction)]
  if instruction.opcode == 'fusion':
    parts = [*inside(calls)]
  flops = {part.name: matmul_flops(where, part) for where, part in parts}
  products = [part for _, part in parts if flops[part.name]]
  counted = sum(flops.values())
  memory = hbm_bytes(program, v.computation, instruction) / chip.hbm_rate
  runs, least = math.prod(window_bounds(instruction) or ()), counted / chip.peak
  kernel = kernel_costs.cost(v.computation, instruction, scope(instruction), chip)
  if kernel:
    counted, least, runs = kernel.flops, kernel.filled / chip.peak, kernel.blocks or 1
    found = found if kernel.blocks else None
  matrix = counted / chip.peak
  filled = sum(flops[part.name] * filling(where, part, chip.matrix_side) for where, part in parts)
  most = max(least, filled / chip.peak)
  timed = _scheduled(found, runs, (least, most), chip)
  vector = sum(vector_operations(where, part, chip) for where, part in parts) / chip.vector_peak
  if kernel and kernel.blocks:
    vector = kernel.seconds - kernel.filled / chip.peak
  scheduled = max(timed.seconds, least, memory) if timed else None
  rough = kernel.seconds if kernel else _rough(matrix, vector, memory, chip)
  estimate = cycles(instruction) / chip.clock if has_cycles and not kernel else rough
  by_schedule = scheduled is not None and (kernel or not chip.cycles_hold)
  return Operation(
    instruction.name,
    instruction.opcode,
    v.times,
    scheduled if by_schedule else estimate,
    scheduled,
    counted,
    matrix,
    timed.vector if timed else vector,
    memory,
    tuple(dict.fromkeys(filter(None, map(scope, [instruction, *(part for _, part in parts)])))),
    tuple(dict.fromkeys(scope(product) for product in products)),
    frozenset(part.opcode for _, part in parts),
    timed.matrix if timed else None,
    rough,
  )


def _rough(matrix: float, vector: float, memory: float, chip: Chip) -> float:
  """Estimate the seconds of an operation from the bounds by its units and by memory."""
  beside = min(matrix, vector) * (1.0 if chip.cycles_hold else _NOT_BESIDE)
  return max(max(matrix, vector) + beside, memory)


class _Scheduled(NamedTuple):
  """Seconds of one run: of the bundles, and of the slots of units that they fill."""

  seconds: float
  matrix: float
  vector: float


def _scheduled(
  found: Bundles | None, runs: int, needs: tuple[float, float], chip: Chip
) -> _Scheduled | None:
  """Return the times of a schedule of `runs` steps, which the cores of a device share.

  None without bundles, and for bundles that are not those of the operation's products, which need
  the matrix units for these seconds, without and with filled matrices.
  """
  if found is None:
    return None
  step = runs / chip.cores / chip.clock
  timed = _Scheduled(found.count * step, found.matrix * step, found.vector * step)
  low, high = _PLAUSIBLE
  least, most = needs
  return timed if low * least <= timed.matrix <= high * most or not least else None
