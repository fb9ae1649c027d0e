"""What one call of a compiled program costs, by the compiler's own estimates.

Every operation of a TPU program carries an estimate of its cycles, but for kernels, collectives and
a few others. Loops are multiplied by how often they run: XLA's own `cost_analysis` counts
a body once.
"""

import dataclasses
import json
import re
from collections.abc import Iterator

from jax.sharding import Mesh

from tokenformer_jax import splash
from tokenformer_jax.plan import collectives
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.elementwise import vector_operations
from tokenformer_jax.plan.hlo import Computation, Instruction, Program, arrays, parse, shape_bytes
from tokenformer_jax.plan.matmuls import matmul_flops
from tokenformer_jax.plan.walk import Visit, trip_count, visit

_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_KERNEL = '"tpu_custom_call"'
_COST_ESTIMATE = re.compile(r'"cost_estimate":(\{[^}]*\})')
_SCOPE = re.compile(r'\bop_name="([^"]*)"')
_ASYNC_START = '"AsyncCollectiveStart"'
_CHANNEL = re.compile(r'channel_id=(\d+)')


@dataclasses.dataclass(frozen=True)
class Traffic:
  """All collectives of one kind along one axis of the mesh, in one step.

  Attributes:
    axis: of the mesh; several are joined by +.
    kind: such as `all-gather`.
    network: `ICI`, or `DCN` between slices.
    count: how many run.
    gigabytes: that a device receives (10⁹ bytes).
    seconds: at the network's published bandwidth.
  """

  axis: str
  kind: str
  network: str
  count: int
  gigabytes: float
  seconds: float


@dataclasses.dataclass(frozen=True)
class Costs:
  """One step of one device.

  Attributes:
    cycles: of everything that has an estimate.
    kernel_seconds: of kernels: of splash attention by formula, of others by what they say.
    flops: of matrix products and kernels, recomputation included.
    rough_seconds: of matrix products and of what is computed element by element, each at the peak
      of its units and one after the other, and of kernels: an estimate without cycles.
    traffic: the collectives.
    notes: what could not be counted, in sentences.
  """

  cycles: int
  kernel_seconds: float
  flops: float
  rough_seconds: float
  traffic: tuple[Traffic, ...]
  notes: tuple[str, ...]


def read(text: str, mesh: Mesh, chip: Chip) -> Costs:
  """Read the costs of a program from its text (`Compiled.as_text()`).

  Args:
    text: of the optimised program.
    mesh: over whose devices it was compiled.
    chip: what they are.
  """
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
  """FLOPs and seconds of one call of a Pallas kernel: known to us, or as it says, or None."""
  shapes = [v.computation.instructions[name].shape for name in v.instruction.operands]
  operands = [array for shape in shapes for array in arrays(shape)]
  scope = _SCOPE.search(v.instruction.attributes)
  of_splash = splash.cost(
    v.instruction.name, operands, side=chip.matrix_side, scope=scope.group(1) if scope else ''
  )
  if of_splash:
    flops, filled, operations = of_splash
    return flops, filled / chip.peak + operations / chip.vector_peak
  found = _COST_ESTIMATE.search(v.instruction.attributes)
  if not found:
    return None
  said = {key: float(value) for key, value in json.loads(found.group(1)).items()}
  return said['flops'], max(said['flops'] / chip.peak, said['bytes_accessed'] / chip.hbm_rate)


def _traffic(visits: list[Visit], mesh: Mesh, chip: Chip) -> tuple[Traffic, ...]:
  totals: dict[tuple[str, str, str], list[float]] = {}

  def add(v: Visit, kind: str, cost: collectives.Cost) -> None:
    total = totals.setdefault((cost.axis, kind, cost.network), [0, 0.0, 0.0])
    total[0] += v.times
    total[1] += v.times * cost.moved / 1e9
    total[2] += v.times * cost.seconds

  for v in _that_start(visits):
    kind = 'reduce-scatter' if _scatters(v) else collectives.kind_of(v.instruction.opcode)
    groups = collectives.groups_of(v.instruction, mesh.size)
    if groups.shape[1] > 1:
      operand_bytes = v.computation.bytes_of_operands(v.instruction)
      add(v, kind, collectives.cost(kind, operand_bytes, groups, mesh, chip))
  for v in visits:
    if kind := collectives.transfer_kind(v.instruction):
      sent = shape_bytes(v.computation.instructions[v.instruction.operands[0]].shape)
      add(v, kind, collectives.between_slices(kind, sent, mesh, chip))
  rows = [Traffic(*key, *total) for key, total in totals.items()]
  return tuple(sorted(rows, key=lambda row: -row.seconds))


def _scatters(v: Visit) -> bool:
  """Whether an all-reduce is a reduce-scatter.

  A TPU's may be written as a fusion of an all-reduce and of the slice that a device keeps of it.
  """
  if v.instruction.opcode != 'all-reduce' or v.inside is None:
    return False
  kept = list(_users(v.computation, v.instruction.name))
  return bool(kept) and all(user.opcode == 'dynamic-slice' for user in kept)


def _users(computation: Computation, name: str) -> Iterator[Instruction]:
  """What reads a result, or an array of it."""
  for user in computation.instructions.values():
    if name not in user.operands:
      continue
    if user.opcode == 'get-tuple-element':
      yield from _users(computation, user.name)
    else:
      yield user


def _that_start(visits: list[Visit]) -> Iterator[Visit]:
  """Collectives, each once.

  A TPU spreads an asynchronous one over several fusions, each with a copy of it under the same
  channel; the first of them has the custom call that starts it.
  """
  found = [v for v in visits if collectives.kind_of(v.instruction.opcode)]
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
    collectives.kind_of(instruction.opcode) is not None
    for computation in program.computations.values()
    if id(computation) not in reached
    for instruction in computation.instructions.values()
  )
  if hidden:
    yield f'{hidden} collectives are in parts of the program that nothing is known to call'
  if silent_kernels:
    yield f'{silent_kernels} kernels say nothing of their cost and are not in the time'
