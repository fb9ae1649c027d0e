"""The work of a TPU's vector units: what a compiled program computes element by element."""

import math

from tokenformer_jax.plan.hlo import Computation, Instruction, arrays

# Vector operations for an element. Of functions a guess: what polynomials of their kind take.
_SIMPLE = ('abs', 'add', 'and', 'compare', 'convert', 'maximum', 'minimum', 'multiply', 'negate')
_FUNCTIONS = ('divide', 'exponential', 'log', 'logistic', 'power', 'rsqrt', 'sqrt', 'tanh')
_OPERATIONS = {
  **dict.fromkeys((*_SIMPLE, 'or', 'reduce', 'select', 'subtract', 'xor'), 1),
  **dict.fromkeys(_FUNCTIONS, 10),
  'erf': 25,
}


def vector_operations(computation: Computation, instruction: Instruction) -> int:
  """How many one call of an instruction takes; 0 if it computes nothing element by element."""
  if not (operations := _OPERATIONS.get(instruction.opcode)):
    return 0
  shape = instruction.shape
  if instruction.opcode == 'reduce':
    shape = computation.instructions[instruction.operands[0]].shape
  return operations * math.prod(arrays(shape)[0][1])
