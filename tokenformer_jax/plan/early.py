"""What the TPU's compiler has settled before it writes code, which takes nearly all of its time.

In seconds it has chosen the operations, their order and their places in memory. It writes them to a
file, if it is asked to, before it spends minutes on their code, from which it takes their cycles.
"""

import multiprocessing
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import jax

from tokenformer_jax.errors import UserError

T = TypeVar('T')

_LOOK_EVERY = 0.2  # seconds
_REFUSES_WITHIN = 1.0  # seconds after the last of these files, of a program that is too large
_PROGRAM = '.after_optimizations.txt'
_MEMORY = '.after_optimizations-memory-usage-report.txt'
_LAST = '.after_optimizations_after_buffer_assignment.txt'
_BYTES = re.compile(r'^Memory Space: .* \(color=(\d+)\)\nTotal bytes: (\d+) ', re.MULTILINE)
_HBM, _HOST = '0', '5'  # XLA's numbers of them; the report has other names for some


def run(
  compile_with: Callable[[dict[str, str]], T], tell: Callable[[str, int, int], bool]
) -> T | None:
  """Compiles in another thread, so that Ctrl-C is heard, and says on the way what is settled.

  Args:
    compile_with: compiles with such options.
    tell: gets, once, the text of the program, which has no cycles yet, and the bytes that its
      arguments and temporaries are laid out in, gaps included, in HBM and in the host's memory.
      Says whether to go on. Not called if the compiler ends before, as it does if there is no room
      for them, or writes something else than libtpu 0.0.42.1.

  Returns:
    What `compile_with` does; None if `tell` does not go on. The compiler does, and nothing but the
    end of the process stops it: see `alone`.
  """
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
    future: futures.Future[T] = futures.Future()

    def work() -> None:
      try:
        future.set_result(compile_with({'xla_dump_to': name}))
      except Exception as error:
        future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not futures.wait([future], _LOOK_EVERY).done:
      if any(Path(name).glob(f'*{_LAST}')):
        refused = futures.wait([future], _REFUSES_WITHIN).done
        if not refused and (settled := _settled(Path(name))) and not tell(*settled):
          return None
        break
    return future.result()


def _settled(directory: Path) -> tuple[str, int, int] | None:
  """The program and its bytes, if both are found."""
  texts = [file.read_text() for end in (_PROGRAM, _MEMORY) for file in directory.glob(f'*{end}')]
  found = dict(_BYTES.findall(texts[-1])) if len(texts) == 2 else {}
  return (texts[0], int(found[_HBM]), int(found.get(_HOST, 0))) if _HBM in found else None


def alone(function: Callable[..., T], *arguments: Any) -> T:
  """Calls a function in a process of its own, which ends with it, whatever its threads still do.

  Raises:
    UserError: the process ended without an answer.
    Exception: what the function raises.
  """
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
  process.start()
  sender.close()
  try:
    answer, error = receiver.recv()
  except EOFError:
    process.join()
    raise UserError(
      f'the compiler ended with status {process.exitcode}, without an answer'
    ) from None
  finally:
    process.kill()
    process.join()
  if error is not None:
    raise error
  return answer


def _answer(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
  jax.config.update('jax_platforms', 'cpu')  # as in the other process
  try:
    sender.send((function(*arguments), None))
  except KeyboardInterrupt:
    pass  # It came to the other process, too, which ends this one.
  except Exception as error:
    sender.send((None, error))
