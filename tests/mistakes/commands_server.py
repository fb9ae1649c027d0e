"""A process that has imported everything, and forks for each command that it is asked to run.

A command then costs what it does and not the seconds of its imports. The process itself starts no
device, so that a fork of it is as good as a new process.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import xla_flags

ROOT = Path(__file__).parent.parent.parent
_LIMIT = 200  # seconds for a command
_ALSO = ('lm_eval', 'lm_eval.evaluator', 'lm_eval.tasks', 'matplotlib.figure')
# Trackers import much, PyTorch included where it is installed, and mistakes end before they begin.
_WITHOUT = (
  '__main__',
  'modeling_tokenformer',
  'modeling_tokenformer_layers',
  'trackers.mlflow',
  'trackers.tensorboard',
)
# In large pages, the memory of the process takes a fork half the time.
_LARGE_PAGES = {'PYTHONMALLOC': 'malloc', 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


@dataclasses.dataclass(frozen=True)
class Done:
  """How a command ended: its exit status (−N: by the signal N), and what it printed."""

  status: int
  out: str
  err: str


class Server:
  """The process, from the side of a test."""

  def __init__(self):
    environment = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': xla_flags.join_flags(devices=1),
      'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests' / 'support')]),
      'PYTHONDONTWRITEBYTECODE': '1',
      'HF_HUB_OFFLINE': '1',
      **_LARGE_PAGES,
    }
    self._process = subprocess.Popen(
      [sys.executable, __file__],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=environment,
    )

  def run(self, arguments: list[str], folder: Path, **environment: str) -> Done:
    """Runs a command in a folder.

    Args:
      arguments: of python: `train.py …` or `-m MODULE …`.
      folder: the working directory.
      **environment: variables to set.
    """
    asked = {'arguments': arguments, 'folder': str(folder), 'environment': environment}
    self._process.stdin.write(json.dumps(asked) + '\n')
    self._process.stdin.flush()
    return Done(**json.loads(self._process.stdout.readline()))

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(timeout=30)


def serve() -> None:
  """Runs the commands that come on standard input, one a line, and answers on standard output."""
  os.chdir(ROOT)
  import tokenformer_jax  # noqa: PLC0415 (only here, in the process that forks)

  prefix = 'tokenformer_jax.'
  names = [name for _, name, _ in pkgutil.walk_packages(tokenformer_jax.__path__, prefix)]
  names = [name for name in names if not name.endswith(_WITHOUT)]
  for name in [*names, *_ALSO]:
    importlib.import_module(name)
  gc.collect()
  gc.freeze()  # A collection in a fork would write to, and so copy, shared memory.
  for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(_fork(**asked)), flush=True)


def _fork(arguments: list[str], folder: str, environment: dict[str, str]) -> dict[str, object]:
  streams = [os.memfd_create(name) for name in ('out', 'err')]
  pid = os.fork()
  if pid == 0:
    os._exit(_child(arguments, folder, environment, streams))
  _, ended = os.waitpid(pid, 0)
  said = []
  for stream in streams:
    os.lseek(stream, 0, os.SEEK_SET)
    with open(stream, encoding='utf-8', errors='replace') as file:
      said.append(file.read())
  return {'status': os.waitstatus_to_exitcode(ended), 'out': said[0], 'err': said[1]}


def _child(
  arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]
) -> int:
  """Is the command: what `python ARGUMENTS` would do in this folder; its exit status."""
  signal.alarm(_LIMIT)
  for number, stream in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *streams), strict=True):
    os.dup2(stream, number)
  os.chdir(folder)
  os.environ.update(environment)
  status: object = 0
  try:
    if arguments[0] == '-m':
      sys.argv = arguments[1:]
      runpy.run_module(arguments[1], run_name='__main__', alter_sys=True)
    else:
      sys.argv = arguments
      runpy.run_path(arguments[0], run_name='__main__')
  except SystemExit as ended:
    status = ended.code
  except BaseException:
    traceback.print_exc()
    status = 1
  with contextlib.suppress(OSError):
    sys.stdout.flush()
    sys.stderr.flush()
  return status if isinstance(status, int) else 0 if status is None else 1


if __name__ == '__main__':
  serve()
