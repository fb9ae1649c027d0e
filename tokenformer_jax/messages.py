"""Messages to the user at the terminal, from the library and from commands."""

import sys

from tokenformer_jax.parallel import hosts


def say(text: str) -> None:
  """Print a line on the standard error of the first process; other processes print nothing."""
  if hosts.is_first():
    print(text, file=sys.stderr, flush=True)
