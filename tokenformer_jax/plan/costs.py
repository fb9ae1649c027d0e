"""Read the cost of one call of a compiled program from the compiler's own estimates.

Every operation of a TPU program carries an estimate of its cycles, except kernels, collectives and
a few others. The body of a loop counts as often as it runs, because XLA's own `cost_analysis`
counts it once.
"""

import dataclasses
import json
import re
from collections.abc import Iterator

from jax.sharding import Mesh

from tokenformer_jax.model import splash
from tokenformer_jax.plan import collectives
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.elementwise import vector_operations
from tokenformer_jax.plan.hlo import Computation, Instruction, Program, arrays, parse, shape_bytes
from tokenformer_jax.plan.matmuls import matmul_flops
from tokenformer_jax.plan.walk import Visit, trip_count, visit

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_KERNEL = '"tpu_custom_call"'
_COST_ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
_METADATA = 'ragged-dot-metadata'  # finds the rows of each expert; takes no time beside a product
_SCOPE = re.compile(r'\bop_name="([^"]*)"')
_ASYNC_START = '"AsyncCollectiveStart"'
_CHANNEL = re.compile(r'channel_id=(\d+)')


@dataclasses.dataclass(frozen=True)
class Traffic:
  """All equal collectives along one axis of the mesh, in one step."""

  axis: str  # of the mesh; several are joined by +
  kind: str  # the collective, such as `all-gather`
  network: str  # `ICI`, or `DCN` between slices
  count: int  # how many of them run
  gigabytes: float  # data that a device receives (10⁹ bytes)
  seconds: float  # at the network's published bandwidth


@dataclasses.dataclass(frozen=True)
class Costs:
  """The costs of one step on one device.

  Attributes:
    cycles: the sum over all operations that carry an estimate.
    kernel_seconds: time of kernels: splash attention by formula, others by their own estimate.
    flops: FLOPs of matrix products and kernels, recomputation included.
    rough_seconds: an estimate without cycles: matrix products, then elementwise operations, each at
      the peak of its units, then kernels.
    notes: sentences about operations that could not be counted.
  """

  cycles: int
  kernel_seconds: float
  flops: float
  rough_seconds: float
  traffic: tuple[Traffic, ...]
  notes: tuple[str, ...]


def read(text: str, mesh: Mesh, chip: Chip) -> Costs:
  """Read the costs of a program from its text, `Compiled.as_text()`."""
  program = parse(text)
  visits = list(visit(program))
  cycles = sum(v.times * _cycles(v.instruction) for v in visits if v.inside is None)
  kernels = [v for v in visits if _KERNEL in v.instruction.attributes]
  estimates = [_kernel_cost(v, chip) for v in kernels]
  known = [(v, e) for v, e in zip(kernels, estimates, strict=True) if e]
  matrix = sum(v.times * matmul_flops(v.computation, v.instruction) for v in visits)
  vector = sum(v.times * vector_operations(v.computation, v.instruction) for v in visits)
  kernel_seconds = sum(v.times * seconds for v, (_, seconds) in known)
  return Costs(
    cycles=cycles,
    kernel_seconds=kernel_seconds,
    flops=matrix + sum(v.times * flops for v, (flops, _) in known),
    rough_seconds=matrix / chip.peak + vector / chip.vector_peak + kernel_seconds,
    traffic=_traffic(visits, mesh, chip),
    notes=tuple(_notes(program, visits, len(kernels) - len(known))),
  )


def _cycles(instruction: Instruction) -> int:
  found = _CYCLES.search(instruction.attributes)
  return int(found.group(1)) if found else 0


def _kernel_cost(v: Visit, chip: Chip) -> tuple[float, float] | None:
  """Return FLOPs and seconds of one call of a Pallas kernel.

  Splash attention has a formula. Other kernels carry a cost estimate; without one, return None.
  """
  if v.instruction.name.startswith(_METADATA):
    return 0.0, 0.0
  shapes = [v.computation.instructions[name].shape for name in v.instruction.operands]
  operands = [array for shape in shapes for array in arrays(shape)]
  scope = _SCOPE.search(v.instruction.attributes)
  splash_cost = splash.cost(
    v.instruction.name, operands, side=chip.matrix_side, scope=scope.group(1) if scope else ''
  )
  if splash_cost:
    flops, filled, operations = splash_cost
    return flops, filled / chip.peak + operations / chip.vector_peak
  found = _COST_ESTIMATE.search(v.instruction.attributes)
  if not found:
    return None
  estimate = {key: float(value) for key, value in json.loads(found.group(1)).items()}
  flops = estimate['flops']
  return flops, max(flops / chip.peak, estimate['bytes_accessed'] / chip.hbm_rate)


def _traffic(visits: list[Visit], mesh: Mesh, chip: Chip) -> tuple[Traffic, ...]:
  totals: dict[tuple[str, str, str], list[float]] = {}

  def add(v: Visit, collective: str, cost: collectives.Cost) -> None:
    total = totals.setdefault((cost.axis, collective, cost.network), [0, 0.0, 0.0])
    total[0] += v.times
    total[1] += v.times * cost.moved / 1e9
    total[2] += v.times * cost.seconds

  for v in _unique_collectives(visits):
    collective = (
      'reduce-scatter' if _scatters(v) else collectives.parse_collective(v.instruction.opcode)
    )
    members = collectives.parse_replica_groups(v.instruction, mesh.size)
    if members.shape[1] > 1:
      operand_bytes = v.computation.bytes_of_operands(v.instruction)
      add(v, collective, collectives.cost(collective, operand_bytes, members, mesh, chip))
  for v in visits:
    if collective := collectives.parse_transfer(v.instruction):
      sent = shape_bytes(v.computation.instructions[v.instruction.operands[0]].shape)
      add(v, collective, collectives.between_slices(collective, sent, mesh, chip))
  rows = [Traffic(*key, *total) for key, total in totals.items()]
  return tuple(sorted(rows, key=lambda row: -row.seconds))


def _scatters(v: Visit) -> bool:
  """Return whether an all-reduce is a reduce-scatter.

  XLA may write a reduce-scatter for TPUs as a fusion of an all-reduce and the slice that the device
  keeps.
  """
  if v.instruction.opcode != 'all-reduce' or v.inside is None:
    return False
  kept = list(_users(v.computation, v.instruction.name))
  return bool(kept) and all(user.opcode == 'dynamic-slice' for user in kept)


def _users(computation: Computation, name: str) -> Iterator[Instruction]:
  """Yield the instructions that read a result, or one array of a result that is a tuple."""
  for user in computation.instructions.values():
    if name not in user.operands:
      continue
    if user.opcode == 'get-tuple-element':
      yield from _users(computation, user.name)
    else:
      yield user


def _unique_collectives(visits: list[Visit]) -> Iterator[Visit]:
  """Yield each collective once.

  XLA spreads an asynchronous collective for TPUs over several fusions. Each has a copy of the
  collective with the same channel; the first has the custom call that starts it.
  """
  found = [v for v in visits if collectives.parse_collective(v.instruction.opcode)]
  starts = {id(v.computation) for v in visits if _ASYNC_START in v.instruction.attributes}
  started = {_channel(v.instruction) for v in found if id(v.computation) in starts}
  for v in found:
    if v.inside is None or id(v.computation) in starts or _channel(v.instruction) not in started:
      yield v


def _channel(instruction: Instruction) -> str | None:
  found = _CHANNEL.search(instruction.attributes)
  return found.group(1) if found else None


def _notes(program: Program, visits: list[Visit], silent_kernels: int) -> Iterator[str]:
  endless = [
    v.instruction.name
    for v in visits
    if v.instruction.opcode == 'while' and trip_count(program, v.computation, v.instruction) is None
  ]
  if endless:
    yield f'{len(endless)} loops of unknown length are counted once: {", ".join(endless[:5])}'
  reached = {id(v.computation) for v in visits}
  hidden = sum(
    collectives.parse_collective(instruction.opcode) is not None
    for computation in program.computations.values()
    if id(computation) not in reached
    for instruction in computation.instructions.values()
  )
  if hidden:
    yield f'{hidden} collectives are in computations without a known caller and are not counted'
  if silent_kernels:
    yield f'{silent_kernels} kernels carry no cost estimate and are not in the time'
