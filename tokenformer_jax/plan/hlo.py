"""Parse the text of a compiled program into computations and instructions.

The parser covers what `costs.py` needs. The text comes from XLA's
`HloModule::ToString` after optimisation and scheduling, so a loop is a `while` and a collective is
an instruction.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_DTYPE_BITS = {'pred': 8, 'token': 0, 'opaque': 0}  # The names of other dtypes contain their bits.
_COMPUTATION = re.compile(r'(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$')
_INSTRUCTION = re.compile(r'\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$')
_CONTINUED = re.compile(r'\n(?="|\}\})')
_ARRAY = re.compile(r'(\w+)\[([\d,]*)\]')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line: `name = shape opcode(operands), attributes`."""

  name: str  # of the result
  shape: str  # A tuple is in parentheses.
  opcode: str
  operands: tuple[str, ...]  # names; for a constant or a parameter, the text in parentheses
  attributes: str

  def attribute(self, name: str) -> str:
    """Return the computation's name in an attribute such as `body=%name`, or ''."""
    match = re.search(rf'\b{name}=%?([\w.\-]+)', self.attributes)
    return match.group(1) if match else ''


@dataclasses.dataclass(frozen=True)
class Computation:
  """A function of the program."""

  name: str
  instructions: dict[str, Instruction]
  root: Instruction


@dataclasses.dataclass(frozen=True)
class Program:
  """All functions of a compiled program."""

  computations: dict[str, Computation]
  entry: Computation


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
  """Return data type and sizes of every array of a shape."""
  return [
    (dtype, tuple(int(size) for size in sizes.split(',') if size))
    for dtype, sizes in _ARRAY.findall(re.sub(r'\{[^}]*\}', '', shape))
  ]


def shape_bytes(shape: str) -> int:
  """Return the bytes of all arrays of a shape, without padding of layouts."""
  return sum(-(-math.prod(sizes) * _bits(dtype) // 8) for dtype, sizes in arrays(shape))


def _bits(dtype: str) -> int:
  if dtype in _DTYPE_BITS:
    return _DTYPE_BITS[dtype]
  return int(re.findall(r'\d+', dtype)[0])


def parse(text: str) -> Program:
  """Parse the text of a program.

  Raises:
    ValueError: the text has no entry computation.
  """
  computations, entry = {}, None
  # The attributes of a kernel continue over several lines.
  lines = iter(_CONTINUED.sub(' ', text).splitlines())
  for line in lines:
    if not (match := _COMPUTATION.match(line)):
      continue
    computation = _read_computation(match['name'], lines)
    computations[computation.name] = computation
    if match['entry']:
      entry = computation
  if entry is None:
    raise ValueError('the text has no entry computation, so it is not a compiled program')
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
  if root is None:
    raise ValueError(f'the computation {name} has no instructions')
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
    operands = tuple(one.split()[-1].lstrip('%') for one in _split(inside) if one.strip())
  return Instruction(name, shape, opcode, operands, rest[close + 1 :].lstrip(', '))


def _closing(text: str, start: int) -> int:
  """Return the index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == '(') - (text[i] == ')')
    if depth == 0:
      return i
  raise ValueError(f'a parenthesis is not closed in {text[:200]!r}')


def _split(text: str) -> list[str]:
  """Split a text at the commas outside of brackets."""
  entries, depth, first = [], 0, 0
  for i, letter in enumerate(text):
    depth += (letter in '([{') - (letter in ')]}')
    if letter == ',' and depth == 0:
      entries.append(text[first:i])
      first = i + 1
  return [*entries, text[first:]]
