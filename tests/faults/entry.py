"""Run `train.py` in a process of the fault tests, forked from one that is ready for it.

Imports take three seconds a process; a fork of one that has imported everything, and has started no
device yet, takes none.
"""

import functools
import gc
import os
import sys

gc.set_threshold(100_000, 20, 100)  # as for_all_tests
PRELOAD = ['tokenformer_jax.cli.train', 'entry']


def main(argv: list[str], said: str, environment: dict[str, str], fast: bool) -> None:
  """Run `train.py` with the arguments `argv[1:]`, with its output in the file `said`.

  With `fast` the counter of its claim is raised so often that a silence is short.
  """
  from tokenformer_jax.cli import train  # noqa: PLC0415 (only in this process)
  from tokenformer_jax.runs import claim  # noqa: PLC0415

  output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(output, 1)
  os.dup2(output, 2)
  os.environ.update(environment)
  if fast:
    timing = claim.Timing(beat=0.3, silence=4, patience=8)
    claim.hold = functools.partial(claim.hold, timing=timing)
  sys.argv = argv
  train.run()
