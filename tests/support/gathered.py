"""The batches that several processes read together, each its own rows."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import tiny_hosts
from jax.experimental import multihost_utils
from trainers import trainer

from tokenformer_jax.cli import main as cli
from tokenformer_jax.config import Config
from tokenformer_jax.config import values as config_values
from tokenformer_jax.parallel import hosts


def gather_batches(
  config: Config, home: Path, processes: int, devices: int, steps: range
) -> list[np.ndarray]:
  """Return the batches of steps, as processes with so many devices in all have them."""
  saved, out = home / 'config.json', home / 'batches.npz'
  saved.write_text(json.dumps(config_values.to_json(config)))
  paths = [str(saved), str(home / 'run'), str(out)]
  command = [sys.executable, __file__, *paths, str(steps.start), str(steps.stop)]
  tiny_hosts.run(command, processes, devices // processes)
  return list(np.load(out).values())


def _write(argv: list[str]) -> None:
  _, saved, workdir, out, first, stop = argv
  config = config_values.from_dict(Config, json.loads(Path(saved).read_text()))
  run = trainer(config, Path(workdir))
  batches = itertools.islice(run.batches(int(first), print), int(stop) - int(first))
  found = [multihost_utils.process_allgather(batch, tiled=True) for _, _, batch in batches]
  if hosts.is_first():
    np.savez(out, *found)


if __name__ == '__main__':
  cli.run(_write, positional=True)
