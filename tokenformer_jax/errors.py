"""Exceptions that become one sentence at the terminal, and helpers to build such sentences."""

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator


class UserError(Exception):
  """A mistake of the user, described in one sentence.

  The message names the key, path or shape, the value found, the allowed values and the remedy.
  Commands print it without a traceback and exit with status 2 (`tokenformer_jax.cli.run`).
  """


class TransientError(Exception):
  """A failure outside the program that retries did not cure, but that may pass later.

  The message is one sentence: what failed, how often, and why. Commands print it without a
  traceback and exit with status 75 (EX_TEMPFAIL), so that `launch/` starts the command again.
  """


class FaultyDeviceError(Exception):
  """A device that computes wrong results without an error.

  The message is one sentence: which devices, of which hosts, and what to do. Commands print it
  without a traceback and exit with status 76, so that `launch/` starts the command elsewhere.
  """

  def __init__(self, message: str, hosts: tuple[str, ...]):
    """Keep the names of the hosts that have these devices."""
    super().__init__(message)
    self.hosts = hosts


class _Arguments:
  """The names of arguments in messages: `arg.groups` is `--groups` in a command, else `groups`."""

  _prefix = ''

  def __getattr__(self, name: str) -> str:
    return f'{self._prefix}{name}'

  __getitem__ = __getattr__

  @contextlib.contextmanager
  def as_flags(self) -> Iterator[None]:
    """Write arguments as flags inside the `with` block, which runs a command."""
    before, self._prefix = self._prefix, '--'
    try:
      yield
    finally:
      self._prefix = before


arg = _Arguments()


def check_installed(package: str, purpose: str, extra: str) -> None:
  """Check that a package of an extra is installed; call it before any long computation.

  Args:
    package: its name for `import`.
    purpose: what it does here, such as `draws the curves`.
    extra: the extra that brings it.

  Raises:
    UserError: it is not installed.
  """
  if importlib.util.find_spec(package) is None:
    raise UserError(
      f'{package}, which {purpose}, is not installed; run pip install -e ".[{extra}]"'
    )


def nearest(name: str, allowed: Iterable[str]) -> str:
  """Return `; did you mean X?` if `name` misspells an allowed name, else a list of all names."""
  allowed = sorted(allowed)
  found = misspelt(name, allowed)
  return f'; did you mean {found!r}?' if found else f'; known names: {", ".join(allowed)}'


def misspelt(name: str, allowed: Iterable[str]) -> str | None:
  """Return the allowed name that `name` misspells or abbreviates, or None.

  A wrong suggestion is worse than none. So at most a quarter of the letters may differ, or one name
  must be a prefix of the other.
  """
  asked = _plain(name)
  near = []
  for candidate in sorted(allowed):
    plain = _plain(candidate)
    distance = _edits(asked, plain)
    begins = min(len(asked), len(plain)) >= 3 and (
      asked.startswith(plain) or plain.startswith(asked)
    )
    if distance <= max(1, len(asked) // 4) and len(asked) > 2:
      near.append((0, distance, candidate))
    elif begins:
      near.append((1, distance, candidate))
  return min(near)[2] if near else None


def _plain(name: str) -> str:
  return name.lower().replace('-', '_')


def _edits(a: str, b: str) -> int:
  """Count the letters to insert, delete, replace or swap with a neighbour to turn `a` into `b`."""
  rows = [[*range(len(b) + 1)]]
  for i, x in enumerate(a, start=1):
    row = [i]
    for j, y in enumerate(b, start=1):
      row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
      if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
        row[-1] = min(row[-1], rows[-2][j - 2] + 1)
    rows.append(row)
  return rows[-1][-1]


def counted(count: int, noun: str) -> str:
  """Return a count and its noun, such as `1 class` or `1,234 images`."""
  ending = '' if count == 1 else 'es' if noun.endswith('s') else 's'
  return f'{count:,} {noun}{ending}'
