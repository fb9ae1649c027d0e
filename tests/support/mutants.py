"""Count the changes of the code that the tests notice, in a seeded sample of mutants.

    pip install cosmic-ray pytest-cov
    python tests/support/mutants.py cover --data=/tmp/cover        # tests by line, once
    python tests/support/mutants.py run --data=/tmp/cover --out=/tmp/mutants.tsv

Run it in a checkout of its own: a mutant is written into its file while its tests run. The mutants
are cosmic-ray's: operators, comparisons, numbers, conditions and loops. A position is drawn first
and one of its mutants then, so that a comparison with ten mutants does not weigh ten times as much.
The tests of a mutant are those that execute its line (in each test file the fastest ones), or its
module where the line runs at import.
"""

import argparse
import collections
import json
import pathlib
import random
import shlex
import subprocess
import sys
import xml.etree.ElementTree

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from coverage import CoverageData

PACKAGE = pathlib.Path('tokenformer_jax')
MUTATED = (
  'steps/*.py',
  'grow/**/*.py',
  'model/pattention.py',
  'data/order.py',
  'runs/checkpoint.py',
)
FOLDERS = ('steps', 'grow', 'model', 'data', 'runs', 'training', 'tasks', 'parallel', 'faults')
# Mutants that cannot be judged, or fail by their type alone: `int ^ None`, a float `<< 2`.
LEFT_OUT = ('Bit', 'Shift', 'Invert', 'RemoveDecorator', 'ExceptionReplacer', 'Variable')
TESTS_OF_A_FILE = 6
TESTS_OF_A_MUTANT = 40
SECONDS = 400


def modules() -> list[pathlib.Path]:
  """Return the files that are mutated."""
  return sorted(path for pattern in MUTATED for path in PACKAGE.glob(pattern))


def cover(data: pathlib.Path) -> None:
  """Run the quick tests once and write which of them execute a line, and how long each takes."""
  data.mkdir(parents=True, exist_ok=True)
  config = data / 'coveragerc'
  config.write_text(f'[run]\ndata_file = {data}/coverage\n')
  command = [sys.executable, '-m', 'pytest', '-q', f'--junitxml={data}/times.xml']
  command += [f'--cov={PACKAGE}', f'--cov-config={config}', '--cov-context=test', '--cov-report=']
  subprocess.run([*command, *(f'tests/{folder}' for folder in FOLDERS)], check=False)


def durations(data: pathlib.Path) -> dict[tuple[str, str], float]:
  """Return the seconds of each test, by (class or module, name)."""
  cases = xml.etree.ElementTree.parse(data / 'times.xml').iter('testcase')
  return {(case.get('classname'), case.get('name')): float(case.get('time')) for case in cases}


class Tests:
  """The tests that execute a line."""

  def __init__(self, data: pathlib.Path):
    self._coverage = CoverageData(str(data / 'coverage'))
    self._coverage.read()
    self._seconds = durations(data)

  def of_line(self, module: pathlib.Path, first: int, last: int) -> list[str]:
    """Return tests that execute one of the lines, else tests of the module; fastest first."""
    contexts = self._coverage.contexts_by_lineno(str(module.resolve()))
    of_lines = {test for line in range(first, last + 1) for test in contexts.get(line, ())}
    of_module = {test for tests in contexts.values() for test in tests}
    chosen = sorted(of_lines - {''} or of_module - {''}, key=self._time)
    of_file = collections.defaultdict(list)
    for test in chosen:
      of_file[test.partition('::')[0]].append(test)
    kept = [test for tests in of_file.values() for test in tests[:TESTS_OF_A_FILE]]
    names = (test.rpartition('|')[0] or test for test in sorted(kept, key=self._time))
    return list(dict.fromkeys(names))[:TESTS_OF_A_MUTANT]

  def _time(self, test: str) -> float:
    file, _, name = test.rpartition('|')[0].partition('::')
    module = file.removesuffix('.py').replace('/', '.')
    return self._seconds.get((module, name), 1.0)


def sample(seed: int, number: int) -> list:
  """Draw mutants: a position of the code first, and one of its mutants then."""
  at = collections.defaultdict(list)
  for item in _all_work_items(modules(), {}):
    mutation = item.mutations[0]
    if not any(kind in mutation.operator_name for kind in LEFT_OUT):
      at[str(mutation.module_path), mutation.start_pos, mutation.end_pos].append(mutation)
  draw = random.Random(seed)
  return [draw.choice(at[position]) for position in draw.sample(sorted(at), number)]


def run(data: pathlib.Path, out: pathlib.Path, seed: int, number: int) -> None:
  """Run a sample; one line a mutant: outcome, module, line, operator, tests, its change."""
  tests, counts = Tests(data), collections.Counter()
  with out.open('w') as file:
    for mutation in sample(seed, number):
      module = pathlib.Path(mutation.module_path)
      names = tests.of_line(module, mutation.start_pos[0], mutation.end_pos[0])
      outcome, change = 'no test', ''
      if names:
        command = [sys.executable, '-m', 'pytest', '-q', '-x', '-n', '0', '-p', 'no:cacheprovider']
        result = mutate_and_test([mutation], shlex.join([*command, *names]), SECONDS)
        outcome = result.test_outcome.value if result.test_outcome else 'no mutant'
        lines = [line for line in (result.diff or '').splitlines() if line[:1] in '+-']
        change = [line for line in lines if line[:3] not in ('+++', '---')]
      counts[outcome] += 1
      row = (outcome, module, mutation.start_pos[0], mutation.operator_name, len(names))
      print(*row, json.dumps(change), sep='\t', file=file, flush=True)
  print(dict(counts))


def main() -> None:
  """Run one of the two commands."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('command', choices=('cover', 'run'))
  parser.add_argument('--data', type=pathlib.Path, required=True)
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('mutants.tsv'))
  parser.add_argument('--seed', type=int, default=1)
  parser.add_argument('--number', type=int, default=60)
  given = parser.parse_args()
  if given.command == 'cover':
    cover(given.data)
  else:
    run(given.data, given.out, given.seed, given.number)


if __name__ == '__main__':
  main()
