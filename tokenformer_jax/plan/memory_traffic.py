"""Count the bytes that an operation of a compiled program moves between HBM and a device's core."""

import re

from tokenformer_jax.plan.hlo import Computation, Instruction, Program, shape_bytes

_ARRAY = re.compile(r'\w+\[[\d,]*\](?:\{[^}]*\})?')
_ELSEWHERE = re.compile(r'S\(\d+\)')  # a layout in another memory, such as VMEM
_SLICES = ('dynamic-slice', 'slice', 'gather')
_UPDATE = 'dynamic-update-slice'
_COPIES = ('bitcast', 'reshape', 'copy')
_SAME = (*_COPIES, 'convert')


def hbm_bytes(
  program: Program, computation: Computation, instruction: Instruction, *, converts: bool = False
) -> int:
  """Return the bytes that one run of an operation reads from HBM and writes to it, at least.

  A slice of an array counts as the slice, and so does the update of a slice. With `converts` this
  holds for slices of an array that a fusion converts first, as for GPUs.
  """
  inner = program.computations.get(instruction.attribute('calls'))
  total = _written(program, inner, instruction)
  for i, name in enumerate(instruction.operands):
    operand = computation.instructions.get(name)
    if operand is None or not (whole := _in_hbm(operand.shape)):
      continue
    if inner is None:
      total += _read(instruction, i, whole)
    else:
      total += min(whole, _read_inside(program, inner, i, whole, converts))
  return total


def _in_hbm(shape: str) -> int:
  return sum(shape_bytes(array) for array in _ARRAY.findall(shape) if not _ELSEWHERE.search(array))


def _written(program: Program, inner: Computation | None, instruction: Instruction) -> int:
  if inner is None:
    return 0 if instruction.opcode == _UPDATE else _in_hbm(instruction.shape)
  outputs = _ARRAY.findall(instruction.shape)
  roots = [inner.root]
  if inner.root.opcode == 'tuple':
    roots = [inner.instructions[name] for name in inner.root.operands]
  total = 0
  for array, root in zip(outputs, roots, strict=False):
    if not _ELSEWHERE.search(array):
      update = _updated(program, inner, root)
      total += shape_bytes(array) if update is None else update
  return total


def _updated(program: Program, inner: Computation, root: Instruction) -> int | None:
  """Return the bytes of the slice that a result updates in place; None for a whole result."""
  root = _before(inner, root, _SAME)
  if root.opcode == 'fusion':
    nested = program.computations[root.attribute('calls')]
    return _updated(program, nested, nested.root)
  return shape_bytes(inner.instructions[root.operands[1]].shape) if root.opcode == _UPDATE else None


def _read(instruction: Instruction, operand: int, whole: int) -> int:
  if instruction.opcode in _SLICES and operand == 0:
    return min(whole, shape_bytes(instruction.shape))
  if instruction.opcode == _UPDATE and operand == 0:
    return 0
  return whole


def _read_inside(
  program: Program, inner: Computation, operand: int, whole: int, converts: bool
) -> int:
  """Return the bytes that a fusion reads of its operand of this number."""
  for instruction in inner.instructions.values():
    if instruction.opcode == 'parameter' and instruction.operands == (str(operand),):
      return _read_of(program, inner, instruction.name, whole, converts)
  return 0


def _read_of(program: Program, inner: Computation, name: str, whole: int, converts: bool) -> int:
  total = 0
  for user in inner.instructions.values():
    for i, operand in enumerate(user.operands):
      if operand != name or user.opcode == 'parameter':
        continue
      if user.opcode == 'bitcast' or (user.name != inner.root.name and _copies(program, user)):
        total += _read_of(program, inner, user.name, whole, converts)
      elif converts and user.opcode == 'convert' and user.name != inner.root.name:
        converted = shape_bytes(user.shape)
        total += _read_of(program, inner, user.name, converted, converts) * whole // converted
      elif user.opcode == 'fusion':
        nested = program.computations[user.attribute('calls')]
        total += _read_inside(program, nested, i, whole, converts)
      else:
        total += _read(user, i, whole)
  return total


def _copies(program: Program, instruction: Instruction) -> bool:
  """Return whether an operation passes its one operand on, perhaps in another layout.

  Within a fusion it makes no array: the fusion reads what users of the result need.
  """
  if instruction.opcode != 'fusion':
    return instruction.opcode in _COPIES
  nested = program.computations[instruction.attribute('calls')]
  source = _before(nested, nested.root, _COPIES)
  return source.opcode == 'parameter' and len(instruction.operands) == 1


def _before(computation: Computation, last: Instruction, opcodes: tuple[str, ...]) -> Instruction:
  """Return the operation whose result a chain of operations passes on to the last one."""
  while last.opcode in opcodes:
    last = computation.instructions[last.operands[0]]
  return last
