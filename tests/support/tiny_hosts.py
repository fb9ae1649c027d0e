"""The same command in several processes, each with some fake CPU devices, joined as on a pod.

As a script: the processes of `gather_batches`, each of which reads its own rows.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tiny_run
from jax.experimental import multihost_utils

from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import Config
from tokenformer_jax.config import values as config_values
from tokenformer_jax.parallel import hosts

_GLOO = re.compile(
  r'(\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of|[\d\s:])+', re.DOTALL
)
_PATHS = (tiny_run.ROOT, tiny_run.ROOT / 'tests', tiny_run.ROOT / 'tests' / 'support')
HEARTBEAT = 30  # seconds after which a process that says nothing is lost


@dataclasses.dataclass(frozen=True)
class Ended:
  """What a process left."""

  status: int
  out: str
  err: str


def flags(count: int, i: int, port: int, **more: int) -> list[str]:
  """Those that join process `i` of `count` on this machine."""
  values = {
    'coordinator': f'localhost:{port}',
    'num_processes': count,
    'process_id': i,
    'heartbeat_timeout': HEARTBEAT,
    **more,
  }
  return [f'--{name}={value}' for name, value in values.items()]


def environment(devices: int) -> dict[str, str]:
  """Return the environment of a process with fake devices, which can import modules of tests."""
  base = tiny_run.environment(devices)
  path = os.pathsep.join(filter(None, [*map(str, _PATHS), os.environ.get('PYTHONPATH', '')]))
  return {**base, 'PYTHONPATH': path}


@contextlib.contextmanager
def started(
  arguments: Sequence[str], processes: int, devices: int
) -> Iterator[list[subprocess.Popen]]:
  """Starts them; those that are left at the end are killed."""
  port, running = free_port(), []
  try:
    for i in range(processes):
      running.append(
        subprocess.Popen(
          [*arguments, *flags(processes, i, port)],
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
          env=environment(devices),
        )
      )
    yield running
  finally:
    for process in running:
      process.kill()
      process.wait()


def ends(running: Sequence[subprocess.Popen], timeout: float = 500) -> list[Ended]:
  """Waits for all of them."""
  ended = []
  for process in running:
    out, err = process.communicate(timeout=timeout)
    ended.append(Ended(process.returncode, without_gloo(out), err))
  return ended


def run(arguments: Sequence[str], processes: int, devices: int) -> list[Ended]:
  """Runs a command in several processes and checks that all of them end well."""
  with started(arguments, processes, devices) as running:
    ended = ends(running)
  assert [process.status for process in ended] == [0] * processes, [p.err for p in ended]
  return ended


def without_gloo(out: str) -> str:
  """Output without the lines that the collectives of the CPU write there when they connect.

  Several threads write them, a word at a time: one's end may stand in a line of its own.
  """
  return ''.join(line for line in out.splitlines(True) if not _GLOO.fullmatch(line))


def free_port() -> int:
  """A port that nothing listens on."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return free.getsockname()[1]


def gather_batches(
  config: Config, home: Path, processes: int, devices: int, steps: range
) -> list[np.ndarray]:
  """Return the batches of steps, as processes with so many devices in all have them."""
  saved, out = home / 'config.json', home / 'batches.npz'
  saved.write_text(json.dumps(config_values.to_json(config)))
  paths = [str(saved), str(home / 'run'), str(out)]
  command = [sys.executable, __file__, *paths, str(steps.start), str(steps.stop)]
  run(command, processes, devices // processes)
  return list(np.load(out).values())


def _write(argv: list[str]) -> None:
  _, saved, workdir, out, first, stop = argv
  config = config_values.from_dict(Config, json.loads(Path(saved).read_text()))
  trainer = tiny_run.trainer(config, Path(workdir))
  batches = itertools.islice(trainer.batches(int(first), print), int(stop) - int(first))
  found = [multihost_utils.process_allgather(batch, tiled=True) for _, _, batch in batches]
  if hosts.is_first():
    np.savez(out, *found)


if __name__ == '__main__':
  cli.run(_write, positional=True)
