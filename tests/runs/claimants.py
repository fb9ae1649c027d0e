"""Processes that claim a directory. This module imports little: each process begins with it."""

import contextlib
import time

from tokenformer_jax.errors import UserError
from tokenformer_jax.runs import claim

# On a loaded machine a silence of 0.3 s is seen after many looks.
FAST = claim.Timing(beat=0.1, silence=0.3, patience=90)
SLOW_BEAT = claim.Timing(beat=60, silence=0.3, patience=90)


def hold(directory, timing=FAST, **options):
  return claim.hold(directory, 'the folder', 'go elsewhere', timing=timing, **options)


def succeed(root, rounds, together, owners):
  """Claim the directory of each round at the same instant as the other processes.

  The owner of an odd round stays until the others have tried.
  """
  for number in range(rounds):
    together.wait()
    waited = False
    with contextlib.suppress(UserError), hold(root / str(number), claim.Timing(0.1, 30, 60)) as own:
      with owners.get_lock():
        owners[number] += 1
      if number % 2:
        together.wait()
        waited = True
      own.check()
    if not waited:
      together.wait()


def own(directory, ready, result):
  try:
    with hold(directory, SLOW_BEAT) as held:
      ready.set()
      while True:
        time.sleep(0.05)
        held.check()
  except UserError as error:
    result.put(str(error))
