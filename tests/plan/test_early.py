"""What is said of a compilation before its end, of a compiler that only writes its files."""

import threading
from pathlib import Path

import pytest

from tokenformer_jax.plan import early

REPORT = """Memory Space: default (color=0)
Total bytes: 7024420736 (6.54GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list

Memory Space: host (color=5)
Total bytes: 12 (12B)
"""


class Compiler:
  """Writes what it is given, waits until it is heard, or for ever, and returns `compiled`."""

  def __init__(self, *reports):
    self.reports, self.heard = reports, threading.Event()

  def __call__(self, options):
    directory = Path(options['xla_dump_to'])
    (directory / 'module_0000.jit_step.after_optimizations.txt').write_text('HloModule jit_step')
    report = directory / 'module_0000.jit_step.after_optimizations-memory-usage-report.txt'
    for text in self.reports:
      report.write_text(text)
      self.heard.wait(1.0)
    return 'compiled'


@pytest.mark.parametrize(
  'reports', [[REPORT], ['', REPORT[:40], REPORT]], ids=['whole', 'half written at first']
)
def test_it_says_what_is_settled_once_and_goes_on(reports):
  compiler, told = Compiler(*reports, REPORT), []

  def tell(program, size):
    told.append((program, size))
    compiler.heard.set()
    return True

  assert early.run(compiler, tell) == 'compiled'
  assert told == [('HloModule jit_step', 7024420736)]


def test_it_ends_when_it_need_not_go_on():
  compiler = Compiler(REPORT)
  assert early.run(compiler, lambda *_: False) is None
  assert not compiler.heard.is_set()


def test_a_compiler_that_is_quick_says_nothing_first():
  assert early.run(Compiler(), lambda *_: pytest.fail('there is no report')) == 'compiled'


def test_what_the_compiler_raises_is_raised():
  def fail(options):
    raise MemoryError('RESOURCE_EXHAUSTED')

  with pytest.raises(MemoryError, match='RESOURCE_EXHAUSTED'):
    early.run(fail, lambda *_: True)
