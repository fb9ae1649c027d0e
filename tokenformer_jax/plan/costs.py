"""Read the cost of one call of a compiled program: its operations, kernels and collectives.

Every operation of a TPU program carries an estimate of its cycles, except kernels, collectives and
a few others. The body of a loop counts as often as it runs, because XLA's own `cost_analysis`
counts it once.
"""

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from tokenformer_jax.plan import collectives, gpu_times, kernel_costs, operations, overlap
from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.hlo import Computation, Instruction, Program, parse, shape_bytes
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.overlap import Collective
from tokenformer_jax.plan.schedule import Bundles
from tokenformer_jax.plan.trip_counts import Visit, trip_count, visit

_ASYNC_START = '"AsyncCollectiveStart"'


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
  """The costs of one step on one device."""

  cycles: int  # the compiler's estimates, summed over all operations that carry one
  # Splash attention by its schedule, or without one by formula; others by their own estimate.
  kernel_seconds: float
  flops: float  # of matrix products and kernels, recomputation included
  rough_seconds: float  # an estimate without a schedule, the sum of `Operation.rough`
  traffic: tuple[Traffic, ...]
  notes: tuple[str, ...]  # sentences about operations that could not be counted
  operations: tuple[Operation, ...]  # all, in the program's order
  collectives: tuple[Collective, ...]  # the same
  ordered_seconds: float  # in that order, with waits for what is left of each collective

  @property
  def compute_seconds(self) -> float:
    """Return the time of all operations, one after the other."""
    return sum(operation.times * operation.seconds for operation in self.operations)

  @property
  def scheduled_seconds(self) -> float | None:
    """Return the same by the schedule where it is known; None if it is not known at all."""
    if all(operation.scheduled is None for operation in self.operations):
      return None
    return sum(
      one.times * (one.seconds if one.scheduled is None else one.scheduled)
      for one in self.operations
    )


def read(
  text: str | Program,
  mesh: Mesh,
  chip: Chip,
  bundles: Mapping[str, Bundles] = types.MappingProxyType({}),
  *,
  has_cycles: bool = True,
) -> Costs:
  """Read the costs of a program or its text, `Compiled.as_text()`, and from its schedule.

  Without `has_cycles` the text is from before code generation.
  """
  program = parse(text) if isinstance(text, str) else text
  visits = list(visit(program))
  cycles = sum(v.times * operations.cycles(v.instruction) for v in visits if v.inside is None)
  kernels = [v for v in visits if kernel_costs.is_kernel(v.instruction)]
  silent = sum(
    kernel_costs.cost(v.computation, v.instruction, operations.scope(v.instruction), chip) is None
    for v in kernels
  )
  if chip.platform == 'gpu':
    done = gpu_times.read(program, visits, chip)
  else:
    done = operations.read(program, visits, bundles, chip, has_cycles)
  called = {v.instruction.name for v in kernels}
  exchanged = list(_collectives(visits, mesh, chip))
  starts = {(v.inside or v.instruction).name: (kind, cost) for v, kind, cost in exchanged}
  seconds, ordered = overlap.follow(program, done, starts)
  return Costs(
    cycles=cycles,
    kernel_seconds=sum(one.times * one.seconds for one in done if one.name in called),
    flops=sum(one.times * one.flops for one in done),
    rough_seconds=sum(one.times * one.rough for one in done),
    traffic=_traffic(exchanged),
    notes=tuple(_notes(program, visits, silent)),
    operations=done,
    collectives=ordered,
    ordered_seconds=seconds,
  )


def _collectives(
  visits: list[Visit], mesh: Mesh, chip: Chip
) -> Iterator[tuple[Visit, str, collectives.Cost]]:
  """Yield every collective, its kind, and the cost of one run."""
  for v in _unique_collectives(visits):
    kind = collectives.parse_collective(v.instruction.opcode) or ''
    kind = 'reduce-scatter' if _scatters(v) else kind
    members = collectives.parse_replica_groups(v.instruction, mesh.size)
    if members.shape[1] > 1:
      shapes = (v.computation.instructions[name].shape for name in v.instruction.operands)
      operand_bytes = sum(map(shape_bytes, shapes))
      yield v, kind, collectives.cost(kind, operand_bytes, members, mesh, chip)
  for v in visits:
    if kind := collectives.parse_transfer(v.instruction):
      sent = shape_bytes(v.computation.instructions[v.instruction.operands[0]].shape)
      yield v, kind, collectives.between_slices(kind, sent, mesh, chip)


def _traffic(exchanged: list[tuple[Visit, str, collectives.Cost]]) -> tuple[Traffic, ...]:
  totals: dict[tuple[str, str, str], list[Any]] = {}
  for v, kind, cost in exchanged:
    total = totals.setdefault((cost.axis, kind, cost.network), [0, 0.0, 0.0])
    total[0] += v.times
    total[1] += v.times * cost.moved / 1e9
    total[2] += v.times * cost.seconds
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
  copies = [v for v in visits if collectives.parse_collective(v.instruction.opcode)]
  starts = {id(v.computation) for v in visits if _ASYNC_START in v.instruction.attributes}
  started = {v.instruction.attribute('channel_id') for v in copies if id(v.computation) in starts}
  for v in copies:
    is_copy = v.instruction.attribute('channel_id') in started and id(v.computation) not in starts
    if v.inside is None or not is_copy:
      yield v


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
