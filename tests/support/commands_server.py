"""A process that has imported everything, and forks for each command that it is asked to run.

A command then costs what it does and not the seconds of its imports. The process itself starts no
device, so that a fork of it is as good as a new process.

    python commands_server.py SOCKET                    serve until standard input ends
    python -S commands_server.py SOCKET ARGUMENTS       be `python ARGUMENTS`
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

_LIMIT = 300  # seconds for a command
_ALSO = ('lm_eval', 'lm_eval.evaluator', 'lm_eval.tasks', 'matplotlib.figure')
# Trackers import much, PyTorch included where it is installed, and few commands use them.
_WITHOUT = (
  '__main__',
  'modeling_tokenformer',
  'modeling_tokenformer_layers',
  'trackers.mlflow',
  'trackers.tensorboard',
)
# In large pages, the memory of the process takes a fork half the time.
_LARGE_PAGES = {'PYTHONMALLOC': 'malloc', 'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


class Server:
  """The process, from the side of a test."""

  def __init__(self, environment: dict[str, str]):
    self._folder = tempfile.TemporaryDirectory(prefix='commands-')
    self.socket = os.path.join(self._folder.name, 'socket')
    self._process = subprocess.Popen(
      [sys.executable, __file__, self.socket],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env={**environment, **_LARGE_PAGES},
    )
    assert self._process.stdout.readline(), 'the server of commands did not start'

  def run(self, arguments: list[str], folder, **environment: str) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` in a folder, with variables set; return its status and its text."""
    with (
      open(os.devnull) as nothing,
      tempfile.TemporaryFile() as out,
      tempfile.TemporaryFile() as err,
    ):
      streams = [stream.fileno() for stream in (nothing, out, err)]
      status = _ask(self.socket, arguments, folder, environment, streams)
      said = []
      for stream in (out, err):
        stream.seek(0)
        said.append(stream.read().decode(errors='replace'))
    return subprocess.CompletedProcess(arguments, status, *said)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait(timeout=30)
    self._folder.cleanup()


def _ask(path: str, arguments: list[str], folder, environment, streams: list[int]) -> int:
  """Have a command run with the streams of this process; return its status (−N: by signal N)."""
  asked = {'arguments': arguments, 'folder': str(folder), 'environment': environment}
  with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(path)
    socket.send_fds(connection, [b'.'], streams)
    connection.sendall(json.dumps(asked).encode())
    connection.shutdown(socket.SHUT_WR)
    return int(connection.makefile().read())


def serve(path: str) -> None:
  """Run the commands that are asked for on a socket, one after another."""
  import gc  # noqa: PLC0415 (a client would wait for these)
  import importlib  # noqa: PLC0415
  import pkgutil  # noqa: PLC0415
  import select  # noqa: PLC0415

  import tokenformer_jax  # noqa: PLC0415

  prefix = 'tokenformer_jax.'
  names = [name for _, name, _ in pkgutil.walk_packages(tokenformer_jax.__path__, prefix)]
  names = [name for name in names if not name.endswith(_WITHOUT)]
  for name in [*names, *_ALSO]:
    importlib.import_module(name)
  gc.set_threshold(100_000, 20, 100)  # as for_all_tests
  gc.collect()
  gc.freeze()  # A collection in a fork would write to, and so copy, shared memory.
  with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(path)
    listening.listen()
    print('ready', flush=True)
    while listening in select.select([listening, sys.stdin], [], [])[0]:
      connection, _ = listening.accept()
      with connection:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        asked = json.loads(connection.makefile().read())
        pid = os.fork()
        if pid == 0:
          os._exit(_child(asked['arguments'], asked['folder'], asked['environment'], streams))
        for stream in streams:
          os.close(stream)
        _, ended = os.waitpid(pid, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(ended)).encode())


def _child(arguments: list[str], folder: str, environment, streams: list[int]) -> int:
  """Be the command: what `python ARGUMENTS` would do in this folder; its exit status."""
  import contextlib  # noqa: PLC0415
  import runpy  # noqa: PLC0415
  import traceback  # noqa: PLC0415

  signal.alarm(_LIMIT)
  for number, stream in enumerate(streams):
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
  if len(sys.argv) == 2:
    serve(sys.argv[1])
  else:
    status = _ask(sys.argv[1], sys.argv[2:], os.getcwd(), {}, [0, 1, 2])
    sys.exit(status if status >= 0 else 128 - status)
