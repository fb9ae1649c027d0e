"""Follow a compiled program in its order to find which collectives run behind computation.

An asynchronous collective has a start and a done in the program. The device waits at the done for
what is left of the transfer; it waits for a whole synchronous collective. Transfers over one
network run one after the other, at the speeds in `collectives.py`.
"""

import dataclasses
from collections.abc import Mapping

from tokenformer_jax.plan.collectives import Cost
from tokenformer_jax.plan.hlo import Computation, Instruction, Program
from tokenformer_jax.plan.operations import Operation
from tokenformer_jax.plan.trip_counts import callees


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective in the program's order."""

  name: str  # of the instruction that starts it
  kind: str  # such as `all-gather`
  cost: Cost
  times: int  # how often it runs in a step
  seconds: float  # of one run on the network
  between: float  # seconds of computation from its start to its done; 0 if it is synchronous
  exposed: float  # seconds for which the device waits, in one run
  beside: tuple[str, ...]  # the operations that run between start and done, the longest first
  synchronous: bool


@dataclasses.dataclass
class _Running:
  """A collective between its start and its done."""

  ready: float
  between: float = 0.0
  beside: dict[str, float] = dataclasses.field(default_factory=dict)


def follow(
  program: Program, operations: tuple[Operation, ...], costs: Mapping[str, tuple[str, Cost]]
) -> tuple[float, tuple[Collective, ...]]:
  """Return the seconds of a step in the program's order, and its collectives.

  `costs` has the kind and the cost of a collective by the name of the instruction that starts it.
  """
  by_name = {operation.name: operation for operation in operations}
  collectives: list[Collective] = []

  def record(name: str, start: _Running, now: float, times: int, *, synchronous: bool) -> None:
    kind, cost = costs[name]
    beside = tuple(sorted(start.beside, key=lambda other: -start.beside[other]))
    exposed = max(0.0, start.ready - now)
    collectives.append(
      Collective(
        *(name, kind, cost, times, cost.seconds, start.between, exposed, beside),
        synchronous=synchronous,
      )
    )

  def seconds_of(computation: Computation, instruction: Instruction, times: int) -> float:
    if operation := by_name.get(instruction.name):
      return operation.seconds
    if instruction.opcode not in ('while', 'conditional', 'call'):
      return 0.0
    return sum(
      count * run(program.computations[name], times * count)
      for name, count in callees(program, computation, instruction)
    )

  def run(computation: Computation, times: int) -> float:
    """Return the seconds of one run of a computation, which runs `times` in a step."""
    now, free, running = 0.0, {}, {}
    dones = _dones(computation, costs)
    for name, instruction in computation.instructions.items():
      if name in costs:
        _, cost = costs[name]
        ready = free[cost.network] = max(now, free.get(cost.network, 0.0)) + cost.seconds
        if name in dones.values():
          running[name] = _Running(ready)
        else:
          record(name, _Running(ready), now, times, synchronous=True)
          now = ready
      elif name in dones:
        if start := running.pop(dones[name], None):
          record(dones[name], start, now, times, synchronous=False)
          now = max(now, start.ready)
      else:
        seconds = seconds_of(computation, instruction, times)
        now += seconds
        for other in running.values():
          other.between += seconds
          other.beside[name] = seconds
    return now

  return run(program.entry, 1), tuple(collectives)


def _dones(computation: Computation, costs: Mapping[str, tuple[str, Cost]]) -> dict[str, str]:
  """Return the start of each asynchronous collective by the name of its done."""
  dones = {}
  for name, instruction in computation.instructions.items():
    start = name.replace('async-collective-done', 'async-collective-start')
    if instruction.opcode.endswith('-done') and instruction.operands:
      start = instruction.operands[0]
    if start != name and start in costs and '-done' in name + instruction.opcode:
      dones[name] = start
  return dones
