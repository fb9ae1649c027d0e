"""What the TPU's compiler has settled before it writes code, which takes nearly all of its time.

In seconds it has chosen the operations, their order and their places in memory. It writes them to a
file, if it is asked to, before it spends minutes on their code, from which it takes their cycles.
"""

import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import TypeVar

T = TypeVar('T')

_LOOK_EVERY = 0.2  # seconds
_PROGRAM = '*.after_optimizations.txt'
_MEMORY = '*.after_optimizations-memory-usage-report.txt'  # written after the program
_HBM = re.compile(r'^Memory Space: default .*\nTotal bytes: (\d+) ', re.MULTILINE)


def run(
  compile_with: Callable[[Mapping[str, str]], T], tell: Callable[[str, int], bool]
) -> T | None:
  """Compiles in another thread, so that Ctrl-C is heard, and says on the way what is settled.

  Args:
    compile_with: compiles with such options.
    tell: gets, once, the text of the program, which has no cycles yet, and the bytes of HBM that
      its arguments and temporaries are laid out in, gaps included. Says whether to go on. Not
      called if the compiler ends before.

  Returns:
    What `compile_with` does; None if `tell` does not go on, and then nothing stops the thread but
    the end of the process by `os._exit`.
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
    while not futures.wait([future], _LOOK_EVERY).done:
      settled = None if told else _settled(Path(name))
      if settled:
        told = True
        if not tell(*settled):
          return None
    return future.result()


def _settled(directory: Path) -> tuple[str, int] | None:
  """The program and its bytes, if they are there."""
  for file in directory.glob(_MEMORY):
    if found := _HBM.search(file.read_text()):
      return next(directory.glob(_PROGRAM)).read_text(), int(found[1])
  return None
