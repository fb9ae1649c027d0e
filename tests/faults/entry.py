"""Run `train.py` in a process of the fault tests, forked from one that is ready for it.

Imports take three seconds a process; a fork of one that has imported everything, and has started no
device yet, takes none.
"""

import os
import sys

PRELOAD = ['tokenformer_jax.cli.train', 'entry']


def main(argv: list[str], said: str) -> None:
  """Run `train.py` with the arguments `argv[1:]`, with its output in the file `said`."""
  from tokenformer_jax.cli import train  # noqa: PLC0415 (only in this process)

  output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(output, 1)
  os.dup2(output, 2)
  sys.argv = argv
  train.run()
