"""The text of a compiled program, taken apart into computations of instructions.

Only what `costs.py` asks for is understood. The text is that of XLA's `HloModule::ToString`, after
optimisation and scheduling, so a loop is a `while` and a collective is an instruction.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_DTYPE_BITS = {'pred': 8, 'token': 0, 'opaque': 0}  # others have their number of bits in the name
_COMPUTATION = re.compile(r'(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$')
_INSTRUCTION = re.compile(r'\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$')
_CONTINUED = re.compile(r'\n(?="|\}\})')
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\]')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: `name = shape opcode(operands), attributes`.

  Attributes:
    name: of the result.
    shape: as it is written, a tuple in parentheses.
    opcode: such as `fusion`.
    operands: names of them; of a constant and a parameter what is in the parentheses.
    attributes: the rest of the line.
  """

  name: str
  shape: str
  opcode: str
  operands: tuple[str, ...]
  attributes: str

  def attribute(self, name: str) -> str | None:
    """The computation that an attribute such as `body=%name` names."""
    found = re.search(rf'\b{name}=%?([\w.\-]+)', self.attributes)
    return found.group(1) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
  """A function of the program."""

  name: str
  instructions: dict[str, Instruction]
  root: Instruction

  def bytes_of_operands(self, instruction: Instruction) -> int:
    """What an instruction reads."""
    return sum(shape_bytes(self.instructions[name].shape) for name in instruction.operands)


@dataclasses.dataclass(frozen=True)
class Program:
  """All functions of a compiled program."""

  computations: dict[str, Computation]
  entry: Computation


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
  """Data type and sizes of every array of a shape."""
  return [
    (dtype, tuple(int(size) for size in sizes.split(',') if size))
    for dtype, sizes in _ARRAY.findall(re.sub(r'\{[^}]*\}', '', shape))
  ]


def shape_bytes(shape: str) -> int:
  """Bytes of all arrays of a shape, layouts and padding left aside."""
  return sum(-(-math.prod(sizes) * _bits(dtype) // 8) for dtype, sizes in arrays(shape))


def _bits(dtype: str) -> int:
  if dtype in _DTYPE_BITS:
    return _DTYPE_BITS[dtype]
  return int(re.search(r'\d+', dtype).group())


def parse(text: str) -> Program:
  """Takes the text of a program apart.

  Raises:
    ValueError: it has no entry computation.
  """
  computations, entry = {}, None
  # What a kernel says of itself goes on over several lines.
  lines = iter(_CONTINUED.sub(' ', text).splitlines())
  for line in lines:
    if not (match := _COMPUTATION.match(line)):
      continue
    computation = _read_computation(match['name'], lines)
    computations[computation.name] = computation
    if match['entry']:
      entry = computation
  if entry is None:
    raise ValueError('the text has no entry computation; it is not that of a compiled program')
  return Program(computations, entry)


def _read_computation(name: str, lines: Iterator[str]) -> Computation:
  instructions, root = {}, None
  for line in lines:
    if line.startswith('}'):
      break
    if match := _INSTRUCTION.match(line):
      instruction = _read_instruction(match['name'], match['rest'])
      instructions[instruction.name] = instruction
      root = instruction if match['root'] or root is None else root
  return Computation(name, instructions, root)


def _read_instruction(name: str, rest: str) -> Instruction:
  rest = re.sub(r'/\*.*?\*/', '', rest)
  end = _closing(rest, 0) + 1 if rest.startswith('(') else rest.index(' ')
  shape, rest = rest[:end], rest[end:].lstrip()
  opcode, _, _ = rest.partition('(')
  close = _closing(rest, len(opcode))
  inside = rest[len(opcode) + 1 : close]
  if opcode in ('constant', 'parameter'):
    operands = (inside,)
  else:
    operands = tuple(part.split()[-1].lstrip('%') for part in _split(inside) if part.strip())
  return Instruction(name, shape, opcode, operands, rest[close + 1 :].lstrip(', '))


def _closing(text: str, start: int) -> int:
  """The index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == '(') - (text[i] == ')')
    if depth == 0:
      return i
  raise ValueError(f'a parenthesis is not closed in {text[:200]!r}')


def _split(text: str) -> list[str]:
  """Splits at the commas outside of brackets."""
  parts, depth, first = [], 0, 0
  for i, letter in enumerate(text):
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and depth == 0:
      parts.append(text[first:i])
      first = i + 1
  return [*parts, text[first:]]
