"""Count how often every instruction of a compiled program runs, loops included."""

import dataclasses
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenformer_jax.plan.hlo import Computation, Instruction, Program

_BRANCHES = re.compile(
  r'(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))'
)
_ASYNC = ('async-start', 'call-start')  # `call-start` runs on a SparseCore
_INSIDE = ('fusion', *_ASYNC)
# Operations that pass a number on unchanged.
_SEE_THROUGH = ('copy', 'bitcast', 'copy-done', 'copy-start', 'convert')
_COMPARISONS = {'LT': operator.lt, 'LE': operator.le, 'NE': operator.ne}
_MOST_TRIPS = 100_000


@dataclasses.dataclass(frozen=True)
class Visit:
  """An instruction, its computation, and how often it runs in one call of the program."""

  instruction: Instruction
  computation: Computation
  times: int
  inside: Instruction | None  # the fusion or the asynchronous call that contains the instruction


def visit(program: Program) -> Iterator[Visit]:
  """Yield every instruction that runs, including those inside fusions.

  All branches of a conditional are visited, so their sum bounds its cost from above. Computations
  on single numbers (`to_apply` of a reduction) are skipped.
  """
  yield from _visit(program, program.entry, 1, None)


def _visit(
  program: Program, computation: Computation, times: int, inside: Instruction | None
) -> Iterator[Visit]:
  for instruction in computation.instructions.values():
    yield Visit(instruction, computation, times, inside)
    for name, count in callees(program, computation, instruction):
      inner = instruction if instruction.opcode in _INSIDE else inside
      yield from _visit(program, program.computations[name], times * count, inner)


def callees(
  program: Program, computation: Computation, instruction: Instruction
) -> list[tuple[str, int]]:
  """Return the computations that an instruction runs, and how often."""
  if instruction.opcode == 'while':
    count = trip_count(program, computation, instruction)
    return [(instruction.attribute('body'), 1 if count is None else count)]
  if instruction.opcode in ('fusion', 'call', *_ASYNC):
    name = instruction.attribute('calls') or instruction.attribute('to_apply')
    return [(name, 1)]
  if instruction.opcode == 'conditional':
    names = [a or b for a, b in _BRANCHES.findall(instruction.attributes)]
    return [(name.strip(' %'), 1) for several in names for name in several.split(',')]
  return []


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
  """Return how often a `while` body runs, by counting as it does; None if it cannot be told."""
  if known := re.search(r'known_trip_count[^\d}]*(\d+)', loop.attributes):
    return int(known.group(1))
  condition = program.computations[loop.attribute('condition')]
  body = program.computations[loop.attribute('body')]
  read = _Read()
  _number(program, condition, condition.root.name, [read])
  state = {}
  for index in read.indices:
    state[index] = _element(program, computation, loop.operands[0], index, [])
    if state[index] is None:
      state[index] = 0  # XLA counts its own loops from 0.
      if _element(program, body, body.root.name, index, [{index: 0}]) == 0:
        return None  # an unknown limit
  for count in range(_MOST_TRIPS if state else 0):
    goes_on = _number(program, condition, condition.root.name, [state])
    if not goes_on:
      return None if goes_on is None else count
    after = {i: _element(program, body, body.root.name, i, [state]) for i in state}
    state = {i: state[i] + 1 if number is None else number for i, number in after.items()}
  return None


class _Read:
  """A loop's state that keeps the indices of the elements that are read, and has no numbers."""

  def __init__(self) -> None:
    self.indices: set[int] = set()

  def get(self, index: int) -> None:
    self.indices.add(index)


def _number(
  program: Program, computation: Computation, name: str, arguments: Sequence[Any]
) -> int | None:
  """Return the number of an instruction; None if it is another one or not known.

  `arguments` are those of the computation: numbers, or the numbers of a loop's state by index.
  """
  one = computation.instructions[name]
  if one.opcode == 'constant':
    return int(one.operands[0]) if re.fullmatch(r'-?\d+', one.operands[0]) else None
  if one.opcode == 'parameter':
    index = int(one.operands[0])
    return arguments[index] if index < len(arguments) else None
  if one.opcode in _SEE_THROUGH:
    return _number(program, computation, one.operands[0], arguments)
  if one.opcode == 'get-tuple-element':
    index = int(one.attribute('index'))
    return _element(program, computation, one.operands[0], index, arguments)
  if one.opcode not in ('add', 'compare', 'fusion'):
    return None
  numbers = [_number(program, computation, operand, arguments) for operand in one.operands]
  if one.opcode == 'fusion':
    inner = program.computations[one.attribute('calls')]
    return _number(program, inner, inner.root.name, numbers)
  left, right = numbers
  if left is None or right is None:
    return None
  if one.opcode == 'add':
    return left + right
  compare = _COMPARISONS.get(one.attribute('direction'))
  return compare and compare(left, right)


def _element(
  program: Program, computation: Computation, name: str, index: int, arguments: Sequence[Any]
) -> int | None:
  """Return a number of a tuple; see `_number`."""
  one = computation.instructions[name]
  while one.opcode in _SEE_THROUGH:
    one = computation.instructions[one.operands[0]]
  if one.opcode == 'tuple':
    return _number(program, computation, one.operands[index], arguments)
  if one.opcode == 'parameter' and arguments:
    return arguments[int(one.operands[0])].get(index)
  return None
