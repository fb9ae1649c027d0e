"""Count the changes of the code that the tests notice: mutants of the core, and guards taken out.

    pip install cosmic-ray pytest-cov
    python tests/support/mutants.py cover --data=/tmp/cover        # tests by line, once
    python tests/support/mutants.py run --data=/tmp/cover --out=/tmp/mutants.tsv
    python tests/support/mutants.py guards --data=/tmp/cover --out=/tmp/guards.tsv

Run it in a checkout of its own: a change is written into its file while its tests run.

`run`: the mutants are cosmic-ray's: operators, comparisons, numbers, conditions and loops. A
position is drawn first and one of its mutants then, so that a comparison with ten mutants does not
weigh ten times as much. `guards`: each of `GUARDS`, and a sample of all `raise …Error(…)`.

The tests of a change are those that execute its line (in each test file the fastest ones), or its
module where the line runs at import. If none of them fails, their files run whole: a fixture that
several tests share runs a line for the first of them alone.
"""

import argparse
import ast
import collections
import dataclasses
import json
import pathlib
import random
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from typing import Any

from coverage import CoverageData

PACKAGE = pathlib.Path('tokenformer_jax')
MUTATED = (
  'steps/*.py',
  'grow/**/*.py',
  'model/pattention.py',
  'data/order.py',
  'runs/checkpoint.py',
)
# Guards that raise nothing where they decide: file, what is taken out, and what takes its place.
GUARDS = (
  ('steps/step.py', r'jnp\.isfinite\(loss\) & jnp\.isfinite\(norm\)', 'jnp.bool_(True)'),
  ('steps/step.py', r"'skipped_in_a_row': jnp\.where\(good, 0, .*\)", "'skipped_in_a_row': 0"),
  ('runs/checkpoint.py', r'int\(value\):', 'meta.checksums[path]:'),
  ('runs/claim.py', r'alive is False or \(.*?\)', 'True'),
  ('runs/claim.py', r'return newest is not None and .*', 'return True'),
  ('runs/claim.py', r'if self\._is_overdue\(\):\n      retry', 'if False:\n      retry'),
  ('data/shards.py', r'if file_digest\(.*\) != digest:', 'if False:'),
  ('grow/plan.py', r'return next\(filter\(None, \(step\.inexact\(\).*', "return ''"),
)
# Mutants that cannot be judged, or fail by their type alone: `int ^ None`, a float `<< 2`.
LEFT_OUT = ('Bit', 'Shift', 'Invert', 'RemoveDecorator', 'ExceptionReplacer', 'Variable')
TESTS_OF_A_FILE = 6
TESTS_OF_A_CHANGE = 40
SECONDS = 400


def cover(data: pathlib.Path) -> None:
  """Run the quick tests once and write which of them execute a line, and how long each takes."""
  data.mkdir(parents=True, exist_ok=True)
  config = data / 'coveragerc'
  config.write_text(f'[run]\ndata_file = {data}/coverage\n')
  command = [sys.executable, '-m', 'pytest', '-q', f'--junitxml={data}/times.xml']
  command += [f'--cov={PACKAGE}', f'--cov-config={config}', '--cov-context=test', '--cov-report=']
  subprocess.run(command, check=False)


class Tests:
  """The tests that execute a line."""

  def __init__(self, data: pathlib.Path):
    self._coverage = CoverageData(str(data / 'coverage'))
    self._coverage.read()
    cases = xml.etree.ElementTree.parse(data / 'times.xml').iter('testcase')
    self._seconds = {
      (case.get('classname'), case.get('name')): float(case.get('time') or 0) for case in cases
    }

  def of_lines(self, module: pathlib.Path, first: int, last: int) -> list[str]:
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
    return list(dict.fromkeys(names))[:TESTS_OF_A_CHANGE]

  def _time(self, test: str) -> float:
    file, _, name = test.rpartition('|')[0].partition('::')
    module = file.removesuffix('.py').replace('/', '.')
    return self._seconds.get((module, name), 1.0)


def _commands(tests: list[str]) -> list[list[str]]:
  """Return the commands that try a change in turn: the tests, and their files whole."""
  files = list(dict.fromkeys(test.partition('::')[0] for test in tests))
  return [_command(tests), _command(files)]


def _command(tests: list[str]) -> list[str]:
  return [sys.executable, '-m', 'pytest', '-q', '-x', '-n', '0', '-p', 'no:cacheprovider', *tests]


def mutants(seed: int, number: int) -> Iterator[Any]:
  """Draw mutants: a position of the code first, and one of its mutants then."""
  from cosmic_ray.commands.init import _all_work_items  # noqa: PLC0415 (guards need none of it)

  modules = sorted(path for pattern in MUTATED for path in PACKAGE.glob(pattern))
  at = collections.defaultdict(list)
  for item in _all_work_items(modules, {}):
    mutation = item.mutations[0]
    if not any(kind in mutation.operator_name for kind in LEFT_OUT):
      at[str(mutation.module_path), mutation.start_pos, mutation.end_pos].append(mutation)
  draw = random.Random(seed)
  yield from (draw.choice(at[position]) for position in draw.sample(sorted(at), number))


def try_mutants(tests: Tests, seed: int, number: int) -> Iterator[tuple]:
  """Run a sample; yield outcome, module, line, operator, number of tests, change."""
  from cosmic_ray.mutating import mutate_and_test  # noqa: PLC0415

  for mutation in mutants(seed, number):
    module = pathlib.Path(mutation.module_path)
    names = tests.of_lines(module, mutation.start_pos[0], mutation.end_pos[0])
    outcome, change = 'no test', ''
    if names:
      for command in _commands(names):
        result = mutate_and_test([mutation], shlex.join(command), SECONDS)
        outcome = result.test_outcome.value if result.test_outcome else 'no mutant'
        if outcome != 'survived':
          break
      lines = [line for line in (result.diff or '').splitlines() if line[:1] in '+-']
      change = json.dumps([line for line in lines if line[:3] not in ('+++', '---')])
    yield outcome, module, mutation.start_pos[0], mutation.operator_name, len(names), change


@dataclasses.dataclass(frozen=True)
class Guard:
  """A refusal or check: its lines, and the text of its file without it."""

  module: pathlib.Path
  first: int
  last: int
  without: str

  def __str__(self) -> str:
    return ' '.join(self.module.read_text().splitlines()[self.first - 1].split())


def guards(seed: int, number: int) -> Iterator[Guard]:
  """Yield those of `GUARDS`, and a sample of the statements that raise a new error."""
  for file, pattern, other in GUARDS:
    text = (PACKAGE / file).read_text()
    match = re.search(pattern, text)
    assert match, f'{file} has no {pattern}; mend GUARDS'
    line = text.count('\n', 0, match.start()) + 1
    yield Guard(PACKAGE / file, line, line, re.sub(pattern, other, text))
  raised = []
  for module in sorted(PACKAGE.rglob('*.py')):
    lines = module.read_text().splitlines(keepends=True)
    for node in ast.walk(ast.parse(''.join(lines))):
      if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        first, last = node.lineno, node.end_lineno or node.lineno
        nothing = f'{" " * node.col_offset}pass\n'
        rest = ''.join([*lines[: first - 1], nothing, *lines[last:]])
        raised.append(Guard(module, first, last, rest))
  yield from random.Random(seed).sample(raised, number)


def try_guards(tests: Tests, seed: int, number: int) -> Iterator[tuple]:
  """Take each guard out; yield outcome, module, line, guard, number of tests, one that failed."""
  for guard in guards(seed, number):
    names = tests.of_lines(guard.module, guard.first, guard.last)
    what, text = str(guard), guard.module.read_text()
    outcome, failed = 'no test', ''
    if names:
      guard.module.write_text(guard.without)
      try:
        for command in _commands(names):
          done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
          outcome = {0: 'survived', 5: 'no test'}.get(done.returncode, 'killed')  # 5: none ran
          failed = ''.join(re.findall(r'^(?:FAILED|ERROR) (\S+)', done.stdout, re.MULTILINE)[:1])
          if outcome != 'survived':
            break
      except subprocess.TimeoutExpired:
        outcome = 'killed (time)'
      finally:
        guard.module.write_text(text)
    yield outcome, guard.module, guard.first, what, len(names), failed


def main() -> None:
  """Run one of the commands."""
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('command', choices=('cover', 'run', 'guards'))
  parser.add_argument('--data', type=pathlib.Path, required=True)
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('mutants.tsv'))
  parser.add_argument('--seed', type=int, default=1)
  parser.add_argument('--number', type=int, default=60)
  given = parser.parse_args()
  if given.command == 'cover':
    cover(given.data)
    return
  attempt = try_mutants if given.command == 'run' else try_guards
  counts: collections.Counter[str] = collections.Counter()
  with given.out.open('w') as file:
    for row in attempt(Tests(given.data), given.seed, given.number):
      counts[row[0]] += 1
      print(*row, sep='\t', file=file, flush=True)
  print(dict(counts))


if __name__ == '__main__':
  main()
