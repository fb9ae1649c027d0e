"""Read the schedule of every operation of a TPU program from files that the compiler can dump.

An operation is a sequence of bundles. A core starts one bundle a cycle; a bundle uses slots of the
core's units. The compiler writes a file for each operation with a line for each bundle: how many
slots of every unit the bundle uses. An operation runs its bundles once for each step of its windows
(`iteration_bounds` in the program) and once for each block of a kernel's grid. Bundles know no
waits, neither for memory nor for a matrix unit that is still busy.
"""

import dataclasses
import os
import re
import time
from pathlib import Path

from tokenformer_jax.plan.hlo import Instruction

_NAME = re.compile(r'\d+-(.+)-\d+-final_hlo-static-per-bundle-utilization\.txt$')
_BOUNDS = re.compile(r'"iteration_bounds":\[([^\]]*)\]')
_MATRIX, _VECTOR = 'MXU', 'VALU'
_COMPLETE_AFTER = 5.0  # seconds without a change, after which a file has all its lines


@dataclasses.dataclass(frozen=True)
class Bundles:
  """The bundles of an operation, for one step of its windows."""

  count: int
  matrix: float  # bundles that the matrix units' slots would fill, if every bundle used all of them
  vector: float  # the same for the vector units


def flags(directory: str) -> str:
  """Return the value of LIBTPU_INIT_ARGS with which libtpu dumps schedules to a directory.

  libtpu reads the variable once, when it loads.
  """
  return (
    f'{os.environ.get("LIBTPU_INIT_ARGS", "")} --xla_jf_dump_to={directory} '
    '--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_hlo-static.*'
  ).strip()


def window_bounds(instruction: Instruction) -> tuple[int, ...] | None:
  """Return how often an operation runs its bundles along each dimension; None without windows."""
  match = _BOUNDS.search(instruction.attributes)
  return tuple(map(int, re.findall(r'\d+', match.group(1)))) if match else None


def parse(text: str) -> Bundles | None:
  """Return the bundles of a file; None if it has none."""
  lines = text.splitlines()
  if len(lines) < 5:
    return None
  units = [unit.strip() for unit in lines[1].split(',')]
  slots = dict(zip(units, map(int, lines[2].split()), strict=True))
  rows = [line.split() for line in lines[4:]]
  rows = [row for row in rows if len(row) == len(units)]

  def filled(unit: str) -> float:
    column = units.index(unit)
    return sum(int(row[column]) for row in rows) / slots[unit]

  return Bundles(len(rows), filled(_MATRIX), filled(_VECTOR)) if rows else None


class Reader:
  """Reads the files of a directory and deletes them, so that a dump never grows large."""

  def __init__(self, directory: str):
    # By the operation's name; a later file of a name replaces an earlier one, because the compiler
    # schedules some operations several times.
    self.bundles: dict[str, Bundles] = {}
    self._directory = Path(directory)

  def read(self, *, complete: bool = False) -> None:
    """Read all files, or without `complete` those that have not changed for some seconds."""
    for file in sorted(self._directory.iterdir()):
      if not complete and time.time() - file.stat().st_mtime < _COMPLETE_AFTER:
        continue
      name = _NAME.match(file.name)
      if name and (bundles := parse(file.read_text())):
        self.bundles[name.group(1)] = bundles
      file.unlink()
