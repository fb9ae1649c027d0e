"""Count the elementwise operations of a compiled program, which a TPU's vector units execute."""

import math

from tokenformer_jax.plan.chips import Chip
from tokenformer_jax.plan.hlo import Computation, Instruction, arrays

# Vector operations for one element. The numbers for functions are guesses: the length of a
# polynomial that approximates the function.
_SIMPLE = ('abs', 'add', 'and', 'compare', 'convert', 'maximum', 'minimum', 'multiply', 'negate')
_FUNCTIONS = ('divide', 'exponential', 'log', 'logistic', 'power', 'rsqrt', 'sqrt', 'tanh')
_OPERATIONS = {
  **dict.fromkeys((*_SIMPLE, 'or', 'reduce', 'select', 'subtract', 'xor'), 1),
  **dict.fromkeys(_FUNCTIONS, 10),
  'erf': 25,
}
_IN_HARDWARE = 3  # of a function that a unit of its own computes, by schedules of v6e


def vector_operations(computation: Computation, instruction: Instruction, chip: Chip) -> int:
  """Return the vector operations of one call of an instruction; 0 if it is not elementwise."""
  if not (operations := _OPERATIONS.get(instruction.opcode)):
    return 0
  if chip.has_functions:
    operations = min(operations, _IN_HARDWARE)
  shape = instruction.shape
  if instruction.opcode == 'reduce':
    shape = computation.instructions[instruction.operands[0]].shape
  return operations * math.prod(arrays(shape)[0][1])
