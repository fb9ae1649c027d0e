"""Messages to the user at the terminal, from the library and from commands."""

import sys
from collections.abc import Container, Sequence


def is_first() -> bool:
  """Return whether this process writes and prints. A lone process initialises no device here."""
  jax = sys.modules.get('jax')  # Without it this process has not joined others.
  return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


def say(text: str) -> None:
  """Print a line on the standard error of the first process; other processes print nothing."""
  if is_first():
    print(text, file=sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
  """Return rows of a table as lines; columns of the numbers `left` are aligned left."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join(
    '  '.join(
      cell.ljust(width) if i in left else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  )
