"""Find operations of a program that do the same: the compiler schedules them once."""

import re
from collections.abc import Hashable, Iterable, Mapping

from tokenformer_jax.plan.hlo import Computation, Instruction, Program
from tokenformer_jax.plan.schedule import Bundles, window_bounds
from tokenformer_jax.plan.trip_counts import Visit

# Attributes that name other operations or the source.
_NAMES = re.compile(
  r'(?:, )?(?:metadata=\{[^}]*\}|(?:calls|to_apply)=%?[\w.\-]+|channel_id=\d+|sharding=\{[^}]*\}'
  r'|frontend_attributes=\{.*?\}\}|backend_config=.*$)'
)


def share_bundles(
  program: Program, visits: Iterable[Visit], bundles: Mapping[str, Bundles]
) -> dict[str, Bundles]:
  """Return the bundles, and the same for each operation that equals one of those with bundles."""
  missing, known = {}, {}
  for v in visits:
    if v.inside is not None or v.instruction.opcode in ('parameter', 'constant', 'tuple'):
      continue
    key = signature(program, v.computation, v.instruction)
    if v.instruction.name in bundles:
      known[key] = bundles[v.instruction.name]
    else:
      missing[v.instruction.name] = key
  return dict(bundles) | {name: known[key] for name, key in missing.items() if key in known}


def signature(program: Program, computation: Computation, instruction: Instruction) -> Hashable:
  """Return what decides an operation's code, apart from a kernel's configuration."""
  instructions = computation.instructions
  operands = (instructions[name].shape for name in instruction.operands if name in instructions)
  bounds = window_bounds(instruction)
  return (
    instruction.opcode,
    instruction.shape,
    tuple(operands),
    bounds or _NAMES.sub('', instruction.attributes),
    _body(program, instruction.attribute('calls')),
  )


def _body(program: Program, name: str) -> Hashable:
  if name not in program.computations:
    return None
  computation = program.computations[name]
  indices = {name: index for index, name in enumerate(computation.instructions)}
  return tuple(
    (
      instruction.opcode,
      instruction.shape,
      tuple(indices.get(name, name) for name in instruction.operands),
      _NAMES.sub('', instruction.attributes),
      _body(program, instruction.attribute('calls')),
    )
    for instruction in computation.instructions.values()
  )
