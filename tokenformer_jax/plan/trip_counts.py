"""Count how often every instruction of a compiled program runs, loops included."""

import dataclasses
import re
from collections.abc import Iterator

from tokenformer_jax.plan.hlo import Computation, Instruction, Program

_BRANCHES = re.compile(
  r'(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))'
)
_ASYNC = ('async-start', 'call-start')  # `call-start` runs on a SparseCore
_INSIDE = ('fusion', *_ASYNC)
# Operations that pass a number on unchanged.
_SEE_THROUGH = ('copy', 'bitcast', 'copy-done', 'copy-start', 'convert')


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
    return [(name.strip(' %'), 1) for part in names for name in part.split(',')]
  return []


def trip_count(program: Program, computation: Computation, loop: Instruction) -> int | None:
  """Return how often a `while` body runs; None unless it counts to a constant."""
  if known := re.search(r'known_trip_count[^\d}]*(\d+)', loop.attributes):
    return int(known.group(1))
  condition = program.computations[loop.attribute('condition')]
  comparison = condition.root
  direction = re.search(r'direction=(\w+)', comparison.attributes)
  if comparison.opcode == 'fusion':
    return _fused_trip_count(program, computation, loop, condition)
  if comparison.opcode != 'compare' or direction is None or len(comparison.operands) != 2:
    return None
  left, right = comparison.operands
  limit, index = _constant(condition, right), _tuple_index(condition, left)
  return _count(program, computation, loop, limit, index, direction.group(1))


def _fused_trip_count(
  program: Program, computation: Computation, loop: Instruction, condition: Computation
) -> int | None:
  """Return the trip count of a loop whose comparison is in a fusion over counter and limit."""
  fusion = condition.root
  inner = program.computations[fusion.attribute('calls')]
  direction = re.search(r'direction=(\w+)', inner.root.attributes)
  if inner.root.opcode != 'compare' or direction is None:
    return None

  def outside(name: str) -> str:
    parameter = inner.instructions[name]
    if parameter.opcode != 'parameter':
      return ''
    return fusion.operands[int(parameter.operands[0])]

  left, right = inner.root.operands
  limit = _constant(inner, right)
  if limit is None and outside(right):
    limit = _constant(condition, outside(right))
  index = _tuple_index(condition, outside(left)) if outside(left) else None
  return _count(program, computation, loop, limit, index, direction.group(1))


def _count(
  program: Program,
  computation: Computation,
  loop: Instruction,
  limit: int | None,
  index: int | None,
  direction: str,
) -> int | None:
  if limit is None or index is None or direction not in ('LT', 'LE'):
    return None
  first = _constant(computation, loop.operands[0], index)
  body = program.computations[loop.attribute('body')]
  step = _step(body, index)
  # XLA counts its own loops from 0 by 1: use these values for a start or step that is not found.
  first, step = 0 if first is None else first, 1 if step is None else step
  return max(0, -(-(limit + (direction == 'LE') - first) // step))


def _constant(computation: Computation, name: str, index: int | None = None) -> int | None:
  """Return the constant of an instruction, or of element `index` of its tuple; else None."""
  instruction = computation.instructions.get(name)
  while instruction is not None:
    if instruction.opcode == 'constant' and index is None:
      number = instruction.operands[0]
      return int(number) if re.fullmatch(r'-?\d+', number) else None
    if instruction.opcode == 'tuple' and index is not None:
      name, index = instruction.operands[index], None
    elif instruction.opcode in _SEE_THROUGH and index is None:
      name = instruction.operands[0]
    elif instruction.opcode == 'get-tuple-element' and index is None:
      name, index = instruction.operands[0], int(instruction.attribute('index'))
    else:
      return None
    instruction = computation.instructions.get(name)
  return None


def _tuple_index(computation: Computation, name: str) -> int | None:
  """Return the index of the parameter's element that an instruction reads, or None."""
  instruction = computation.instructions[name]
  while instruction.opcode in _SEE_THROUGH:
    instruction = computation.instructions[instruction.operands[0]]
  if instruction.opcode != 'get-tuple-element':
    return None
  source = computation.instructions[instruction.operands[0]]
  return int(instruction.attribute('index')) if source.opcode == 'parameter' else None


def _step(body: Computation, index: int) -> int | None:
  """Return the number that a loop's body adds to an element of its state, or None."""
  if body.root.opcode != 'tuple':
    return None
  step, name = 0, body.root.operands[index]
  while _tuple_index(body, name) != index:  # An unrolled body adds several times.
    instruction = body.instructions[name]
    if instruction.opcode in _SEE_THROUGH:
      name = instruction.operands[0]
      continue
    if instruction.opcode != 'add':
      return None
    left, right = instruction.operands
    added = _constant(body, right)
    if added is None:
      left, added = right, _constant(body, left)
    if added is None:
      return None
    step, name = step + added, left
  return step or None
