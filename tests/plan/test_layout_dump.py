"""Test the report of a compilation before its end, with a compiler that only writes its files."""

import signal
import sys
import threading
import types
from pathlib import Path

import pytest

from tokenformer_jax.errors import UserError
from tokenformer_jax.plan import layout_dump
from tokenformer_jax.steps.fit import DoesNotFitError

REPORT = """Memory Space: default (color=0)
Total bytes: 7024420736 (6.54GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list

Memory Space: vmem (color=1)
Total bytes: 12 (12B)

Memory Space: cmem (color=5)
Total bytes: 4026531840 (3.75GiB)
"""


MODULE = 'module_0000.jit_step.after_optimizations'


class Compiler:
  """A compiler that writes its files, waits until `heard` is set, and returns."""

  def __init__(self, *, settles=True, refuses=False, last=True):
    self.settles, self.refuses, self.last = settles, refuses, last
    self.heard = threading.Event()

  def __call__(self, options):
    directory = Path(options['xla_dump_to'])
    if self.settles:
      (directory / f'{MODULE}.txt').write_text('HloModule jit_step')
      (directory / f'{MODULE}-memory-usage-report.txt').write_text(REPORT)
      if self.last:
        (directory / f'{MODULE}_after_buffer_assignment.txt').write_text('')
    if self.refuses:
      raise MemoryError('RESOURCE_EXHAUSTED')
    if self.settles:
      self.heard.wait()
    return 'compiled'


def test_settled_figures_are_printed_once():
  compiler, told = Compiler(), []

  def tell(*settled):
    told.append(settled)
    compiler.heard.set()
    return True

  assert layout_dump.run(compiler, tell) == 'compiled'
  assert told == [('HloModule jit_step', 7024420736, 4026531840)]


@pytest.mark.slow
def test_compilation_ends_when_the_layout_suffices(monkeypatch):
  monkeypatch.setattr(layout_dump, '_STILL', 0.2)
  compiler = Compiler(last=False)  # The compiler for TPU7x writes no last file.
  assert layout_dump.run(compiler, lambda *_: False) is None
  compiler.heard.set()


def test_a_compiler_that_ends_at_once_says_nothing_first():
  compiler = Compiler(settles=False)
  assert layout_dump.run(compiler, lambda *_: pytest.fail('nothing is settled')) == 'compiled'


def test_a_program_that_is_too_large_is_never_settled():
  with pytest.raises(MemoryError, match='RESOURCE_EXHAUSTED'):
    layout_dump.run(Compiler(refuses=True), lambda *_: pytest.fail('it does not fit'))


def _last_words():
  """End the other process while one of its threads runs for ever."""
  threading.Thread(target=threading.Event().wait).start()
  raise DoesNotFitError('Used 24.33G of 15.75G hbm')


@pytest.mark.slow
def test_errors_come_from_the_process():
  with pytest.raises(DoesNotFitError) as raised:
    layout_dump.run_alone(_last_words)
  assert (raised.value.needed, raised.value.capacity) == (24.33, 15.75)


@pytest.mark.slow
def test_a_process_that_is_killed_has_not_run_the_script_of_the_user(tmp_path, monkeypatch):
  script = types.ModuleType('__main__')
  script.__file__ = str(tmp_path / 'script.py')
  (tmp_path / 'script.py').write_text(f'open({str(tmp_path / "ran")!r}, "x")')
  monkeypatch.setitem(sys.modules, '__main__', script)
  with pytest.raises(UserError, match='runs out of memory'):
    layout_dump.run_alone(signal.raise_signal, signal.SIGKILL)
  assert not (tmp_path / 'ran').exists()
  assert sys.modules['__main__'] is script
