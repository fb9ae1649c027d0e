"""The one exception for a user's mistake, and the sentence-building helper that goes with it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
  """A mistake of the user's, told in one sentence.

  The message names the key, path or shape, what was found, what is allowed and what to do. Command
  line entries print it without a traceback and exit with status 2 (`tokenformer_jax.cli.run`).
  """


def nearest(name: str, allowed: Iterable[str]) -> str:
  """A hint `; did you mean X?` with the allowed name closest to `name`, or all of them."""
  allowed = sorted(allowed)
  close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
  return f'; did you mean {close[0]!r}?' if close else f'; known names: {", ".join(allowed)}'
