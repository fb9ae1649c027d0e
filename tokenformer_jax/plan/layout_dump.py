"""Read the TPU compiler's layout of a program before the compiler generates code.

The compiler first chooses the operations, their order and their addresses in memory, and can dump
them to files. It then spends minutes on code generation, which yields the cycles.
"""

import contextlib
import multiprocessing
import re
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import jax

from tokenformer_jax.errors import UserError, arg

T = TypeVar('T')

_LOOK_EVERY = 0.2  # seconds, until the layout is there
_WAIT = 2.0  # seconds, after that
_STILL = 3.0  # seconds without a change, after which the report of memory is taken for whole
_REFUSES_WITHIN = 1.0  # seconds from the last file to the error, for a program that is too large
_PROGRAM = '.after_optimizations.txt'
_MEMORY = '.after_optimizations-memory-usage-report.txt'
_LAST = '.after_optimizations_after_buffer_assignment.txt'
_BYTES = re.compile(r'^Memory Space: .* \(color=(\d+)\)\nTotal bytes: (\d+) ', re.MULTILINE)
_HBM, _HOST = '0', '5'  # XLA's numbers of these memories; their names in the report vary


def run(
  compile_with: Callable[[dict[str, str]], T],
  tell: Callable[[str, int, int], bool],
  meanwhile: Callable[[], None] = lambda: None,
) -> T | None:
  """Compile in another thread and report the layout as soon as the compiler has dumped it.

  The thread keeps Ctrl-C working during the compilation. Call `compile_with` with compiler options,
  and `tell` once, with the program's text, which has no cycles yet, and with the bytes of its
  arguments and temporaries, gaps included, in HBM and in the host's memory. `tell` returns whether
  to go on. It is not called if the compiler ends first (for example because the program does not
  fit), or if the compiler's files differ from those of libtpu 0.0.42.1. `meanwhile` is called again
  and again until the compiler ends.

  Returns:
    The result of `compile_with`, or None if `tell` returned False. In that case the compiler keeps
    running until the process ends: see `run_alone`.
  """
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
    future: futures.Future[T] = futures.Future()

    def work() -> None:
      try:
        future.set_result(compile_with({'xla_dump_to': name}))
      except Exception as error:
        future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    told = False
    while not futures.wait([future], _WAIT if told else _LOOK_EVERY).done:
      meanwhile()
      if not told and _is_laid_out(Path(name)):
        told = True
        refused = futures.wait([future], _REFUSES_WITHIN).done
        if not refused and (settled := _settled(Path(name))) and not tell(*settled):
          return None
    return future.result()


def _is_laid_out(directory: Path) -> bool:
  """Return whether the compiler has dumped its layout; for TPU7x it leaves out the last file."""
  reports = directory.glob(f'*{_MEMORY}')
  return any(directory.glob(f'*{_LAST}')) or any(
    time.time() - report.stat().st_mtime > _STILL for report in reports
  )


def _settled(directory: Path) -> tuple[str, int, int] | None:
  """Return the program's text and its bytes in HBM and on the host; None if files are missing."""
  texts = [file.read_text() for end in (_PROGRAM, _MEMORY) for file in directory.glob(f'*{end}')]
  sizes = dict(_BYTES.findall(texts[-1])) if len(texts) == 2 else {}
  return (texts[0], int(sizes[_HBM]), int(sizes.get(_HOST, 0))) if _HBM in sizes else None


def run_alone(function: Callable[..., T], *arguments: Any) -> T:
  """Call a function in a process of its own and end the process with it, threads included.

  Raises:
    UserError: the process ended without an answer.
    Exception: any exception of the function.
  """
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
  with _no_script():
    process.start()
  sender.close()
  try:
    answer, error = receiver.recv()
  except EOFError:
    process.join()
    raise UserError(_died(process.exitcode)) from None
  finally:
    process.kill()
    process.join()
  if error is not None:
    raise error
  return answer


@contextlib.contextmanager
def _no_script() -> Iterator[None]:
  """Hide the user's script from `spawn`, which would run it again in the new process."""
  script = sys.modules['__main__']
  sys.modules['__main__'] = types.ModuleType('__main__')
  try:
    yield
  finally:
    sys.modules['__main__'] = script


def _died(status: int | None) -> str:
  if status == -signal.SIGKILL:
    return (
      'the compiler was killed, as a system does that runs out of memory: compiling many layers '
      'without a loop takes over 10 GB; close other programs, or try '
      f'{arg.config}.train.layers=scan, or {arg.quick}'
    )
  return f'the compiler ended with status {status}, without an answer'


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
  jax.config.update('jax_platforms', 'cpu')  # as in the parent process
  try:
    sender.send((function(*arguments), None))
  except KeyboardInterrupt:
    pass  # The parent process receives it as well and ends this one.
  except Exception as error:
    sender.send((None, error))
