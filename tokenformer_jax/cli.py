"""What the command-line entries share: running `main`, and naming a checkpoint."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags, logging

from tokenformer_jax.errors import UserError


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Parses flags and runs `main`; a `UserError` becomes one line and exit status 2."""

  def guarded(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f'unexpected argument {argv[1]!r}; flags look like --name=value')
    main(argv)

  flags.FLAGS.set_default('verbosity', logging.WARNING)  # --verbosity=0 shows Orbax's lines, too
  try:
    app.run(guarded)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


def split_source(source: str) -> tuple[Path, int | None]:
  """`DIR` or `DIR@STEP` as a path and a step (None: the newest)."""
  directory, at, step = source.rpartition('@')
  if not at:
    return Path(source), None
  if not step.isdigit():
    raise UserError(f'source {source!r} does not end in a step; it is DIR or DIR@STEP')
  return Path(directory), int(step)
