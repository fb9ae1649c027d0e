"""Keep what the compiler finds for each operation in the user's cache, for later plans.

Generating code takes minutes and adds the cycles, the windows and the bundles of every operation
to a program that is laid out. They depend on the operation alone, so a program whose operations
were all in earlier ones needs the layout only. A file holds those of a version of the compiler, a
chip and a set of compiler options: the last `_MOST`, a few megabytes.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenformer_jax.plan.equal_operations import share_bundles, signature
from tokenformer_jax.plan.hlo import Computation, Program
from tokenformer_jax.plan.operations import FREE
from tokenformer_jax.plan.schedule import Bundles
from tokenformer_jax.plan.trip_counts import Visit, visit

# Where an operation comes from in the source, and the tables of files that go with it.
_SOURCE = re.compile(
  r'metadata=\{[^}]*\}|^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*',
  re.MULTILINE,
)
_MEMORY = {'peak', 'code', 'allocated', 'host'}  # arguments of `program.memory`
_MOST = 20_000  # operations and programs of a file
_GENERATED = re.compile(r'"estimated_cycles":"?\d+"?|"iteration_bounds":\[[^\]]*\]')


def user_cache() -> Path:
  """Return the package's folder in the user's cache."""
  return Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache', 'tokenformer_jax').expanduser()


class Schedules:
  """The operations of earlier programs for a chip, by what they are when they are laid out."""

  def __init__(self, chip: str, options: Mapping[str, Any]):
    """Read the file; one that is missing or broken has no operations."""
    # Where the compiler dumps its files changes no operation.
    flags = os.environ.get('LIBTPU_INIT_ARGS', '').partition('--xla_jf_dump_to')[0].strip()
    named = f'{sorted(options.items())} {flags} {os.environ.get("XLA_FLAGS", "")}'
    name = f'{metadata.version("libtpu")}-{chip}-{_digest(named)[:12]}.json'
    self._file = user_cache() / 'schedules' / name
    self._kept: dict[str, Any] = self._read()

  def _read(self) -> dict[str, Any]:
    try:
      kept = json.loads(self._file.read_text())
      return kept if all(map(_is_whole, kept.values())) else {}
    except (OSError, ValueError, TypeError, AttributeError):
      return {}

  def restore(self, program: Program) -> tuple[Program, dict[str, Bundles]] | None:
    """Return a program that is laid out as it is after code generation, and its bundles.

    None if an operation was in no earlier program.
    """
    bundles, attributes = {}, {}
    for v, key in _operations(program):
      if key not in self._kept:
        return None
      attributes[v.instruction.name], found = self._kept[key]
      if found:
        bundles[v.instruction.name] = Bundles(*found)
    return _with_attributes(program, attributes), bundles

  def memory(self, text: str) -> dict[str, float] | None:
    """Return the figures of memory of this very program, if they were kept."""
    return self._kept.get(_digest(_SOURCE.sub('', text)))

  def keep(
    self,
    text: str,
    laid_out: Program,
    generated: Program,
    bundles: Mapping[str, Bundles],
    memory: Mapping[str, float],
  ) -> None:
    """Keep the operations of a program, and its memory by its text when it is laid out.

    The oldest leave a file that is full. A cache that cannot be written is left as it is.
    """
    visits = list(visit(generated))
    after = {v.instruction.name: v.instruction.attributes for v in visits}
    bundles = share_bundles(generated, visits, bundles)
    new: dict[str, Any] = {_digest(_SOURCE.sub('', text)): dict(memory)}
    for v, key in _operations(laid_out):
      name = v.instruction.name
      if name not in after:
        return  # Code generation changed the program: this is another compiler.
      known = bundles.get(name)
      generated_text = ', '.join(_GENERATED.findall(after[name]))
      new[key] = generated_text, dataclasses.astuple(known) if known else None
    older = {key: value for key, value in self._read().items() if key not in new}
    last = list((older | new).items())[-_MOST:]
    written = self._file.with_suffix(f'.{os.getpid()}')
    with contextlib.suppress(OSError):
      try:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(dict(last)))
        written.replace(self._file)
      finally:
        written.unlink(missing_ok=True)


def _is_whole(value: Any) -> bool:
  """Return whether a value of the file is the memory of a program or the schedule of an operation.

  Raises:
    ValueError, TypeError: it has another structure.
  """
  if isinstance(value, dict):
    return value.keys() <= _MEMORY and all(isinstance(one, int | float) for one in value.values())
  text, bundles = value
  numbers = (0, 0, 0) if bundles is None else bundles
  return isinstance(text, str) and len([float(one) for one in numbers]) == 3


def _operations(program: Program) -> Iterator[tuple[Visit, str]]:
  """Yield the operations that run, fusions whole, with a digest of all that decides their code."""
  for v in visit(program):
    if v.inside is None and v.instruction.opcode not in FREE:
      # A kernel's code is in its configuration.
      kernel = v.instruction.attributes if v.instruction.opcode == 'custom-call' else ''
      kernel = re.sub(r'metadata=\{[^}]*\}', '', kernel)
      yield v, _digest(repr((signature(program, v.computation, v.instruction), kernel)))


def _with_attributes(program: Program, attributes: Mapping[str, str]) -> Program:
  """Return the program with more text in the attributes of some instructions."""

  def extended(computation: Computation) -> Computation:
    instructions = {
      name: dataclasses.replace(one, attributes=f'{one.attributes}, {attributes.get(name, "")}')
      for name, one in computation.instructions.items()
    }
    return Computation(computation.name, instructions, instructions[computation.root.name])

  computations = {name: extended(one) for name, one in program.computations.items()}
  return Program(computations, computations[program.entry.name])


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
