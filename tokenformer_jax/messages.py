"""Lines for the person at the terminal, from library and commands alike."""

import sys

from tokenformer_jax import hosts


def say(text: str) -> None:
  """Print a line on the standard error of the first process; other processes print nothing."""
  if hosts.is_first():
    print(text, file=sys.stderr, flush=True)
